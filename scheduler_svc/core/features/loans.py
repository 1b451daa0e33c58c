"""Blocks, and what rows need besides them, that are kept for workers of other schedulers while these read them.

The caller ends each loan, at the latest after a short deadline, whatever has become of the reader. A reader that comes
too late finds that a block is not committed any longer, and computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scheduler_svc.core.features.block_sources import BlockSource, ExtrasSource, OwnSource
from scheduler_svc.core.messages import Counts
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import I64, U32

MAX_LOANS = 64
MAX_FRACTION = 0.25  # of the blocks of a worker


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """Leading blocks that another scheduler asks for."""

    worker_id: str
    worker_epoch: int
    layout: bytes
    digests: Sequence[bytes]
    token_ids: U32


@dataclass(frozen=True, slots=True)
class ExtrasLoan:
    """What a part keeps so that rows can start after the last block: the indices of the blocks, and the ids."""

    part: ExtrasSource
    indices: Sequence[int]
    ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Blocks with a reference of their own."""

    worker: WorkerState
    block_ids: I64
    extras: Sequence[ExtrasLoan] = ()

    def describe(self) -> BlockSource:
        """For the worker that reads them."""
        return OwnSource(self.worker).describe(self.block_ids)


class Loans:
    """The loans of one scheduler."""

    def __init__(
        self, workers: Mapping[str, WorkerState], counts: Counts, on_change: Callable[[WorkerState], None]
    ) -> None:
        self._workers = workers
        self._counts = counts
        self._on_change = on_change  # the placements on a worker may change
        self.open: set[Loan] = set()

    def begin(self, wanted: WantedPrefix) -> Loan | None:
        """Take references to the leading blocks that are committed and after which rows can start. None if there is
        none, or too many are lent.
        """
        worker = self._workers.get(wanted.worker_id)
        if worker is None or not _may_read(wanted, worker) or len(self.open) == MAX_LOANS:
            return None
        num_lent = sum(len(loan.block_ids) for loan in self.open if loan.worker is worker)
        room = int(worker.capacity.num_blocks * MAX_FRACTION) - num_lent
        source = OwnSource(worker)
        blocks = source.committed(wanted.digests, wanted.token_ids, min(len(wanted.digests), max(0, room)))
        blocks = blocks[: worker.usable_hits(wanted.digests, len(blocks), wanted.token_ids)]
        extras = _lend_extras(worker, wanted.digests, len(blocks)) if len(blocks) else None
        if extras is None:
            return None
        source.share(blocks)
        loan = Loan(worker, blocks, extras)
        self.open.add(loan)
        self._counts.lent_blocks += len(blocks)
        return loan

    def end(self, loan: Loan) -> None:
        """Give the references back: the blocks have been read, or the deadline has passed, or both."""
        if loan not in self.open:
            return
        self.open.discard(loan)
        if self._workers.get(loan.worker.capacity.worker_id) is loan.worker:
            OwnSource(loan.worker).free(loan.block_ids)
            _take_back(loan.extras)
            self._on_change(loan.worker)

    def is_source(self, worker_id: str) -> bool:
        """Whether blocks of this worker are lent."""
        return any(loan.worker.capacity.worker_id == worker_id for loan in self.open)


def _lend_extras(worker: WorkerState, digests: Sequence[bytes], end: int) -> list[ExtrasLoan] | None:
    """What rows need besides the blocks to start after `end` of them. None if a part has no room to keep it."""
    lent: list[ExtrasLoan] = []
    for part in worker.parts_of_all:
        indices = part.extras_at(end)
        ids = part.lend([digests[index] for index in indices])
        lent.append(ExtrasLoan(part, indices, ids))
        if len(ids) < len(indices):
            _take_back(lent)
            return None
    return lent


def _take_back(lent: Sequence[ExtrasLoan]) -> None:
    for one in lent:
        one.part.take_back(one.ids)


def _may_read(wanted: WantedPrefix, worker: WorkerState) -> bool:
    """Whether the worker is the process that the other scheduler means, and the bytes of its blocks mean the same. A
    digest that occurs twice is of no prefix, and its block would be freed twice.
    """
    capacity, movement = worker.capacity, worker.capacity.movement
    return (
        movement is not None
        and movement.can_transfer
        and capacity.worker_epoch == wanted.worker_epoch
        and movement.layout == wanted.layout
        and len(wanted.token_ids) == len(wanted.digests) * capacity.block_size
        and len(set(wanted.digests)) == len(wanted.digests)
    )
