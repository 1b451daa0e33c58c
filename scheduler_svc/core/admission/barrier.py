"""The barrier: no worker computes a step, so that weights, keys or memory can change between two steps of all of them.

Each holder has a hold of its own, which no other holder moves, carries out or ends:

    finishing   the requests that have begun run to their ends, and no others begin
    closed      this holder lets no step be planned, but steps may be in flight
    reached     no worker computes, until this holder releases it

A hold begins as closed, or as finishing in mode FINISH. It is reached once, when it is closed itself and no step is in
flight. A release ends it in any state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.features.block_moves import BlockMoves
from scheduler_svc.core.messages import MigrationReason
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.types import PausedSample


class HoldMode(Enum):
    """The fate of requests when a hold is reached, or in mode FINISH before."""

    KEEP = "keep"
    RETRACT = "retract"
    ABORT = "abort"
    FINISH = "finish"


class HoldState(Enum):
    """The states of a hold, in their order."""

    FINISHING = "finishing"
    CLOSED = "closed"
    REACHED = "reached"


@dataclass(eq=False, slots=True)
class Hold:
    """The hold of one holder, whose name is that of no other one."""

    holder: str
    mode: HoldMode
    state: HoldState = HoldState.FINISHING
    samples: list[PausedSample] | None = None  # when it was reached

    @property
    def aborts(self) -> bool:
        return self.mode is HoldMode.ABORT


class Barrier:
    """Owns the holds. Shares workers, requests, placement and moves with the scheduler."""

    def __init__(
        self, workers: Mapping[str, WorkerState], requests: Requests, placement: Placement, moves: BlockMoves
    ) -> None:
        self._workers = workers
        self._requests = requests
        self._placement = placement
        self._moves = moves
        self._holds: dict[str, Hold] = {}  # by holder
        # Attributes, because every step reads them.
        self.is_held = False
        self.is_closed = False  # no step may be planned

    @property
    def holders(self) -> list[str]:
        return list(self._holds)

    def hold(self, hold: Hold) -> None:
        """Begin a hold."""
        if hold.mode is not HoldMode.FINISH:
            hold.state = HoldState.CLOSED
        self._holds[hold.holder] = hold
        self._note()

    def release(self, holder: str) -> Hold | None:
        """End a hold, and return it. The barrier opens, unless another one keeps it closed."""
        hold = self._holds.pop(holder, None)
        if hold is not None:
            self._note()
            for worker in self._workers.values():
                self._placement.mark_changed(worker)
        return hold

    def advance(self) -> None:
        """Close the holds that wait for requests, if these have ended."""
        finishing = [hold for hold in self._holds.values() if hold.state is HoldState.FINISHING]
        if finishing and not any(self._begun()):
            for hold in finishing:
                hold.state = HoldState.CLOSED
            self._note()

    def take_reached(self) -> list[Hold]:
        """The holds that are reached since the last call, with their samples. The caller aborts requests."""
        self.advance()
        if any(worker.in_flight for worker in self._workers.values()):
            return []
        reached = [hold for hold in self._holds.values() if hold.state is HoldState.CLOSED]
        for hold in reached:
            hold.state, hold.samples = HoldState.REACHED, self._samples()
            if hold.mode is HoldMode.RETRACT:
                self.retract(MigrationReason.PAUSE)
        return reached

    def adopt(self, other: Barrier) -> None:
        """Take over the holds of a scheduler that has no work."""
        self._holds = other._holds
        self._note()

    def _note(self) -> None:
        self.is_held = bool(self._holds)
        self.is_closed = any(hold.state is not HoldState.FINISHING for hold in self._holds.values())
        self._admit(is_new=not self.is_held)

    def _begun(self) -> Iterator[bool]:
        """True for each sequence that has begun and has not ended."""
        for group in self._requests.groups.values():
            yield from (not (seq.is_finished or seq.is_new) for seq in group.sequences)

    def _admit(self, *, is_new: bool) -> None:
        if self._requests.admits_new != is_new:
            self._requests.admits_new = is_new
            self._requests.update_schedulable()

    # -- while it is reached ------------------------------------------------------------------------------------------

    def _samples(self) -> list[PausedSample]:
        """All samples that have output."""
        found = []
        for group in self._requests.groups.values():
            if not group.features.is_gang:
                found += [self._held(seq) for seq in group.sequences if not seq.is_finished]
        return [held for held in found if held.num_output_tokens]

    def _held(self, seq: Sequence) -> PausedSample:
        output = seq.data.output
        if seq.worker_id is not None and seq.row is not None:
            output = self._workers[seq.worker_id].rows.output_tokens(seq.row)
        return PausedSample(seq.group.request_id, seq.sample_index, len(output))

    def retract(self, reason: MigrationReason) -> int:
        """Queue all running sequences again. Returns their number."""
        return sum(self._requests.requeue_all(worker, reason) for worker in self._workers.values())

    def forget_prefixes(self) -> None:
        """No prefix stays cached, and none that is on its way will be."""
        self._moves.cancel_all()
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
