"""The barrier: no worker computes a step, so that weights, keys or memory can change between two steps of all of them.

holders     close it, by name; it is open when the last one has released it
finish      a holder waits for the requests that have begun: until they have ended, only their sequences run
reached     no step is in flight, and none is planned
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scheduler_svc.core.messages import MigrationReason
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A sample with output that is not finished."""

    request_id: str
    index: int
    num_output_tokens: int


class Barrier:
    """Owns the holders. Shares workers, requests and placement with the scheduler."""

    def __init__(self, workers: Mapping[str, WorkerState], requests: Requests, placement: Placement) -> None:
        self._workers = workers
        self._requests = requests
        self._placement = placement
        self._finishes: dict[str, bool] = {}  # by holder: it waits for requests that have begun
        # Attributes, because every step reads them.
        self.is_held = False
        self.is_closed = False  # no step may be planned

    @property
    def holders(self) -> list[str]:
        return list(self._finishes)

    @property
    def is_reached(self) -> bool:
        """No worker computes, and none will."""
        return self.is_closed and not any(worker.in_flight for worker in self._workers.values())

    def hold(self, holder: str, *, finishes: bool = False) -> None:
        """Close the barrier. With `finishes`, it closes when the requests that have begun have ended."""
        self._finishes.setdefault(holder, finishes)
        self._note()
        self._admit(is_new=False)
        self.advance()

    def release(self, holder: str) -> None:
        """Open the barrier, unless another holder keeps it closed."""
        if self._finishes.pop(holder, None) is None:
            return
        self._note()
        if not self._finishes:
            self._admit(is_new=True)
        for worker in self._workers.values():
            self._placement.mark_changed(worker)

    def advance(self) -> None:
        """Close it for the holders that wait for requests, if these have ended."""
        if any(self._finishes.values()) and not any(self._begun()):
            self._finishes = dict.fromkeys(self._finishes, False)
            self._note()

    def _note(self) -> None:
        self.is_held, self.is_closed = bool(self._finishes), False in self._finishes.values()

    def _begun(self) -> Iterator[bool]:
        """True for each sequence that has begun and has not ended."""
        for group in self._requests.groups.values():
            yield from (not (seq.is_finished or seq.is_new) for seq in group.sequences)

    def _admit(self, *, is_new: bool) -> None:
        if self._requests.admits_new != is_new:
            self._requests.admits_new = is_new
            self._requests.update_schedulable()

    # -- while it is reached ------------------------------------------------------------------------------------------

    def samples(self) -> list[HeldSample]:
        """All samples that have output."""
        found = []
        for group in self._requests.groups.values():
            if not group.features.is_gang:
                found += [self._held(seq) for seq in group.sequences if not seq.is_finished]
        return [held for held in found if held.num_output_tokens]

    def _held(self, seq: Sequence) -> HeldSample:
        output = seq.data.output
        if seq.worker_id is not None and seq.row is not None:
            output = self._workers[seq.worker_id].rows.output_tokens(seq.row)
        return HeldSample(seq.group.request_id, seq.sample_index, len(output))

    def retract(self, reason: MigrationReason) -> int:
        """Queue all running sequences again. Returns their number."""
        return sum(self._requests.requeue_all(worker, reason) for worker in self._workers.values())

    def forget_prefixes(self) -> None:
        """No prefix stays cached."""
        for worker in self._workers.values():
            worker.pool.forget_all()
            for part in worker.parts_of_all:
                part.forget_all()
            self._placement.mark_changed(worker)

    def change_weights(self, root_salt: bytes, *, keeps_kv: bool) -> int:
        """The workers compute with other weights from the next step on. Running rows are queued again, or keep what the
        earlier weights have computed: then their blocks become no prefixes. Returns their number.
        """
        if keeps_kv:
            num_rows = sum(worker.make_private() for worker in self._workers.values())
        else:
            num_rows = self.retract(MigrationReason.UPDATE)
        self.forget_prefixes()
        for group in self._requests.groups.values():
            for seq in group.sequences:
                seq.digests.clear()
        for worker in self._workers.values():
            worker.change_root(root_salt)
        self._placement.change_root(root_salt)
        return num_rows
