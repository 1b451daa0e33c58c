"""The state of the worker, shared by all parts of the shell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

LOADING = types_pb2.WORKER_STATE_LOADING
READY = types_pb2.WORKER_STATE_READY
DRAINING = types_pb2.WORKER_STATE_DRAINING


@dataclass(slots=True)
class Lifecycle:
    """State of this worker, owned by the event loop. It moves only forward: LOADING, READY, DRAINING.

    `changed` is set on every update that a scheduler should get before the next heartbeat; its only waiter clears it.
    """

    state: types_pb2.WorkerState.ValueType = LOADING
    load_progress: float = 0.0
    capacity: scheduler_pb2.WorkerCapacity | None = None
    adapters: Sequence[worker_pb2.WorkerAdapter] = ()  # in the worker's memory
    weights: worker_pb2.UpdatedWeights | None = None  # in use, if they are not those of the checkpoint
    is_asleep: bool = False  # the weights' memory is free
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_draining(self) -> bool:
        return self.state == DRAINING

    def set_progress(self, fraction: float) -> None:
        """Sets the fraction of the weights that is loaded, 0 to 1."""
        self.load_progress = fraction
        self.changed.set()

    def set_ready(self, capacity: scheduler_pb2.WorkerCapacity) -> None:
        """The model is loaded. A worker that is draining already stays DRAINING."""
        self.load_progress, self.capacity = 1.0, capacity
        if not self.is_draining:
            self.state = READY
        self.changed.set()

    def set_adapters(self, adapters: Sequence[worker_pb2.WorkerAdapter]) -> None:
        """The adapters in the worker's memory."""
        self.adapters = adapters
        self.changed.set()

    def set_draining(self) -> None:
        """Accept no new rows."""
        self.state = DRAINING
        self.changed.set()
