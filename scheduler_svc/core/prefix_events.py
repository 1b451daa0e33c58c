"""Collects changes of cached prefixes for a prefix index: blocks that were cached, evicted or reused."""

from __future__ import annotations

from prefix_index.changes import Holder, PrefixChanges
from scheduler_svc.core.steps.worker_state import WorkerState


class PrefixEvents:
    """Collects the changes of the workers that `note` names. When it is off, it costs nothing."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._touched: dict[str, WorkerState] = {}
        self._of_gone: list[PrefixChanges] = []

    def note(self, worker: WorkerState) -> None:
        """Remember that the worker may have changes."""
        if self._is_on:
            self._touched[worker.capacity.worker_id] = worker

    def leave(self, worker: WorkerState) -> None:
        """Report every prefix of a worker that has left as evicted."""
        if not self._is_on:
            return
        self._touched.pop(worker.capacity.worker_id, None)
        evicted = [(digest, False) for digest in worker.pool.cached_digests()]
        if events := worker.pool.take_events() + evicted:
            self._of_gone.append(PrefixChanges(_holder(worker), events))

    def take(self) -> list[PrefixChanges]:
        """Returns the changes since the last call. The changes of one worker are in order."""
        changes, self._of_gone = self._of_gone, []
        for worker in self._touched.values():
            if events := worker.pool.take_events():
                changes.append(PrefixChanges(_holder(worker), events))
        self._touched.clear()
        return changes


def cached_prefixes(worker: WorkerState) -> PrefixChanges:
    """All cached prefixes of a worker, to fill an index that has lost its data."""
    return PrefixChanges(_holder(worker), [(digest, True) for digest in worker.pool.cached_digests()])


def _holder(worker: WorkerState) -> Holder:
    return Holder(worker.capacity.worker_id, worker.capacity.worker_epoch)
