"""What the worker is doing now, as every part of the shell sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quire.v1 import scheduler_pb2

LOADING = scheduler_pb2.WORKER_STATE_LOADING
READY = scheduler_pb2.WORKER_STATE_READY
DRAINING = scheduler_pb2.WORKER_STATE_DRAINING


@dataclass(slots=True)
class Lifecycle:
    """State of this worker; belongs to the event loop. It moves only forward: LOADING, READY, DRAINING.

    `changed` is set on every news that a scheduler should hear before the next heartbeat; its one waiter clears it.
    """

    state: scheduler_pb2.WorkerState.ValueType = LOADING
    load_progress: float = 0.0
    capacity: scheduler_pb2.WorkerCapacity | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_draining(self) -> bool:
        return self.state == DRAINING

    def set_progress(self, part: float) -> None:
        """`part` of the weights, 0 to 1, is loaded."""
        self.load_progress = part
        self.changed.set()

    def set_ready(self, capacity: scheduler_pb2.WorkerCapacity) -> None:
        """The model is loaded. A worker that was told to leave meanwhile stays DRAINING."""
        self.load_progress, self.capacity = 1.0, capacity
        if not self.is_draining:
            self.state = READY
        self.changed.set()

    def set_draining(self) -> None:
        """No new rows from now on."""
        self.state = DRAINING
        self.changed.set()
