"""What a prefix index must hear: blocks that became cached prefixes of a worker, or ceased to be."""

from __future__ import annotations

from scheduler_svc.core.messages import PrefixEvent
from scheduler_svc.core.steps.worker_state import WorkerState


class PrefixEvents:
    """Asks only those workers to which something has happened."""

    def __init__(self) -> None:
        self._changed: dict[str, WorkerState] = {}
        self._events: list[PrefixEvent] = []  # of workers that are gone

    def note(self, worker: WorkerState) -> None:
        """It may have events."""
        self._changed[worker.capacity.worker_id] = worker

    def leave(self, worker: WorkerState) -> None:
        """Whatever it held is gone with it."""
        self._changed.pop(worker.capacity.worker_id, None)
        self._events += _events_of(worker)
        self._events += _told(worker, worker.pool.cached_digests(), is_cached=False)

    def take(self) -> list[PrefixEvent]:
        """Since the last call, those of one worker in order."""
        events, self._events = self._events, []
        for worker in self._changed.values():
            events += _events_of(worker)
        self._changed.clear()
        return events


def cached_prefixes(worker: WorkerState) -> list[PrefixEvent]:
    """Everything an index should hold now of this worker: for filling it again."""
    return _told(worker, worker.pool.cached_digests(), is_cached=True)


def _events_of(worker: WorkerState) -> list[PrefixEvent]:
    worker_id, epoch = worker.capacity.worker_id, worker.capacity.worker_epoch
    new = tuple.__new__  # what PrefixEvent(...) does, without a Python call for each: every block makes one
    return [new(PrefixEvent, (worker_id, epoch, digest, is_cached)) for digest, is_cached in worker.pool.take_events()]


def _told(worker: WorkerState, digests: list[bytes], *, is_cached: bool) -> list[PrefixEvent]:
    c = worker.capacity
    return [PrefixEvent(c.worker_id, c.worker_epoch, digest, is_cached) for digest in digests]
