"""Two replicas that lend each other blocks, and the snapshots or windows that rows need besides, in random order, with
loans that end too early and workers that restart.

Every token and every block that a step reads is checked, as in the other simulations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from prefix_index.hashing import group_digest
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.features import loans
from scheduler_svc.core.features.block_moves import BlockMove, BlockSearch
from scheduler_svc.core.features.block_sources import LentBlocks, LentExtras, OwnSource
from scheduler_svc.core.features.cache_groups import WindowGroup
from scheduler_svc.core.features.loans import Loan, Loans, WantedPrefix
from scheduler_svc.core.features.snapshots import Snapshots
from scheduler_svc.core.sequence import StopCondition
from step_protocol.columns import I64, U32
from step_protocol.types import BlockMovement, CacheGroup
from tests.builders import make_capacity
from tests.invariants import check_scheduler
from tests.sim import tiers
from tests.sim.cluster import ROOT_SALT, Cluster
from tests.sim.symbolic_worker import SymbolicWorker
from tests.sim.violation import Violation

BLOCK_SIZE, MAX_LEN, VOCAB = 4, 64, 40
MAX_SEEDS = 60
Patch = pytest.MonkeyPatch


EXTRAS: dict[str, dict[str, Any]] = {
    "": {},
    "snapshots": {"num_snapshots": 4, "snapshot_tokens": 2 * BLOCK_SIZE},
    "groups": {"groups": (CacheGroup(6, 24), CacheGroup(11, 30))},
}


class Replica(Cluster):
    """A scheduler whose workers may read blocks of all workers."""

    def __init__(self, everywhere: dict[str, SymbolicWorker], *, checks_invariants: bool) -> None:
        config = SchedulerConfig(borrows_prefixes=True, root_salt=ROOT_SALT)
        sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "vocab_size": VOCAB}
        super().__init__(config, **sizes, checks_invariants=checks_invariants)
        self.everywhere = everywhere
        self.num_borrowed = self.num_extras_borrowed = 0

    def end_move(self, move: BlockMove, limit: int) -> None:
        self.moves.remove(move)
        count = tiers.fetch(move, self.workers[move.worker_id], self.everywhere, {}, limit)
        if move.source is not None and move.source.address:
            self.num_borrowed += count
            self.num_extras_borrowed += max(0, count - len(move.digests))
        self.scheduler.end_move(move.move_id, count, 0.01, self.now)
        self._follow_prefixes()


class Run:
    """One random run."""

    def __init__(self, seed: int, *, extras: str = "", checks_invariants: bool = True) -> None:
        self.extras = EXTRAS[extras]
        self.rng = Random(f"lending {seed}")
        self.workers: dict[str, SymbolicWorker] = {}
        self.replicas = [Replica(self.workers, checks_invariants=checks_invariants) for _ in range(2)]
        self.searches: list[tuple[Replica, BlockSearch]] = []
        self.loans: list[tuple[Replica, Loan, Replica, BlockSearch, LentBlocks]] = []
        self.num_epochs = 0
        self.prefixes = [[self.rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
        for number, replica in enumerate(self.replicas):
            self.join(replica, f"w{number}")

    def join(self, replica: Replica, name: str) -> None:
        self.num_epochs += 1
        capacity = make_capacity(
            name, num_blocks=24, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, worker_epoch=self.num_epochs
        )
        movement = BlockMovement(b"layout", 100, can_transfer=True)
        self.workers[name] = replica.join(replace(capacity, movement=movement, **self.extras))

    def run(self) -> int:
        """Returns the number of blocks that were borrowed."""
        for _ in range(400):
            self.rng.choices(
                (self.submit, self.step, self.end_move, self.lend, self.end_loan, self.restart),
                (2, 12, 4, 4, 1, 0.15),
            )[0]()
            self.check_loans()
        for replica, search in self.searches:
            replica.scheduler.moves.end_search(search, None, replica.now)
        self.searches.clear()
        for replica in self.replicas:
            replica.settle(self.rng.choice)
            for search in replica.scheduler.moves.take_searches():
                replica.scheduler.moves.end_search(search, None, replica.now)
        while self.loans:
            self.end_loan()
        for replica in self.replicas:
            replica.check_end()
            check_scheduler(replica.scheduler)
        return sum(replica.num_borrowed for replica in self.replicas)

    def submit(self) -> None:
        replica, rng = self.rng.choice(self.replicas), self.rng
        prompt = [*rng.choice(self.prefixes)[: rng.randint(4, 40)], rng.randrange(VOCAB)]
        root_key = rng.choice((b"", b"tenant"))
        replica.submit(replica.make_request(prompt, StopCondition(max_tokens=rng.randint(1, 8)), root_key=root_key))

    def step(self) -> None:
        replica = self.rng.choice(self.replicas)
        replica.now += 0.02
        replica.schedule()
        self.searches += [(replica, search) for search in replica.scheduler.moves.take_searches()]
        read = replica.scheduler.moves.take_read()
        for lent in [one for one in self.loans if one[4] in read]:
            self.give_back(lent)
        if busy := replica.busy_workers():
            replica.answer(self.rng.choice(busy))
            replica.check()

    def end_move(self) -> None:
        replica = self.rng.choice(self.replicas)
        if ready := replica.ready_moves():
            replica.end_move(ready[0], self.rng.choice((100, 100, 2)))

    def lend(self) -> None:
        """A scheduler asks the other one, with what an old index may say."""
        if not self.searches:
            return
        replica, search = self.searches.pop(0)
        other = self.replicas[replica is self.replicas[0]]
        name = f"w{self.replicas.index(other)}"
        epoch = self.workers[name].capacity.worker_epoch
        twice = np.concatenate((search.token_ids[:BLOCK_SIZE],) * 2)
        if other.scheduler.loans.begin(WantedPrefix(name, epoch, b"layout", search.digests[:1] * 2, twice)) is not None:
            raise Violation("a digest that occurs twice is lent, and its block would be freed twice")
        loan = other.scheduler.loans.begin(WantedPrefix(name, epoch, b"layout", search.digests, search.token_ids))
        if loan is None:
            replica.scheduler.moves.end_search(search, None, replica.now)
            return
        kept = [
            LentExtras({search.digests[index]: block for index, block in zip(one.indices, one.ids, strict=True)})
            for one in loan.extras
        ]
        digests = search.digests[: len(loan.block_ids)]
        lent = LentBlocks(replace(loan.describe(), address="there:1"), digests, kept)
        self.loans.append((other, loan, replica, search, lent))
        replica.scheduler.moves.end_search(search, lent, replica.now)

    def end_loan(self) -> None:
        """A deadline passes, perhaps in the middle of a read. The reader learns it later."""
        if self.loans:
            self.give_back(self.loans[0])

    def give_back(self, one: tuple[Replica, Loan, Replica, BlockSearch, LentBlocks]) -> None:
        self.loans.remove(one)
        lender, loan, borrower, search, _ = one
        lender.scheduler.loans.end(loan)
        lender.check()
        if self.rng.random() < 0.5:
            borrower.scheduler.moves.end_search(search, None, borrower.now)

    def restart(self) -> None:
        replica = self.rng.choice(self.replicas)
        name = f"w{self.replicas.index(replica)}"
        replica.lose(replica.workers[name])
        self.join(replica, name)

    def check_loans(self) -> None:
        for _, loan, _, _, lent in self.loans:
            worker = self.workers[lent.worker_id]
            if worker.capacity.worker_epoch != lent.source.worker_epoch:
                continue
            held = [worker.content[block] for block in loan.block_ids.tolist()]
            extras = [
                holds_extra(worker, number, digest, block)
                for number, one in enumerate(lent.extras, 1)
                for digest, block in one.ids.items()
            ]
            if held != lent.digests or not all(extras):
                raise Violation(f"{lent.worker_id} does not hold the blocks that are lent")


def holds_extra(worker: SymbolicWorker, number: int, digest: bytes, block: int) -> bool:
    if worker.group_of(block) is None:
        return tiers.is_snapshot_after(worker, block - worker.capacity.num_all_blocks, digest)
    return worker.holds(block, group_digest(digest, number))


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(4, 200))])
def test_replicas_lend_blocks(seed: int, extras: str) -> None:
    Run(seed, extras=extras).run()


@pytest.mark.parametrize("extras", EXTRAS)
def test_blocks_are_borrowed_often(extras: str) -> None:
    runs = [Run(seed, extras=extras) for seed in range(3)]
    assert sum(run.run() for run in runs) > 30
    assert any(replica.num_extras_borrowed for run in runs for replica in run.replicas) == bool(extras)


def complaint_of(seed: int, extras: str) -> str:
    """The complaint of the symbolic workers, or of the books at the end."""
    try:
        Run(seed, extras=extras, checks_invariants=False).run()
    except (Violation, AssertionError) as found:
        return str(found)
    return ""


def no_references(patch: Patch) -> None:
    patch.setattr("scheduler_svc.core.features.block_sources.OwnSource.share", lambda source, blocks: None)
    patch.setattr("scheduler_svc.core.features.block_sources.OwnSource.free", lambda source, blocks: None)


def no_references_of_groups(patch: Patch) -> None:
    def lend(self: WindowGroup, digests: list[bytes]) -> list[int]:
        return [self._first_id + self.pool.held[digest] for digest in digests]

    patch.setattr(WindowGroup, "lend", lend)
    patch.setattr(WindowGroup, "take_back", lambda self, ids: None)


def snapshots_not_kept(patch: Patch) -> None:
    def lend(self: Snapshots, digests: list[bytes]) -> list[int]:
        return [self._first_id + self.kept[digest].slot for digest in digests]

    patch.setattr(Snapshots, "lend", lend)
    patch.setattr(Snapshots, "take_back", lambda self, ids: None)


def no_end(patch: Patch) -> None:
    patch.setattr(Loans, "end", lambda self, loan: False)


def end_on_the_next_process(patch: Patch) -> None:
    """A loan of a lost worker gives its blocks back to the one that has its id now."""

    def end(self: Loans, loan: Loan) -> bool:
        if loan not in self.open:
            return False
        self.open.discard(loan)
        OwnSource(self._workers[loan.worker.capacity.worker_id]).free(loan.block_ids)
        return True

    patch.setattr(Loans, "end", end)


def repeated_digest_lent(patch: Patch) -> None:
    patch.setattr(loans, "_may_read", lambda wanted, worker: worker.capacity.worker_epoch == wanted.worker_epoch)


def foreign_epoch(patch: Patch) -> None:
    """Neither the scheduler nor the worker compares it."""
    patch.setattr(loans, "_may_read", lambda wanted, worker: len(set(wanted.digests)) == len(wanted.digests))
    patch.setattr(tiers, "is_same_process", lambda source, worker: True)
    patch.setattr(tiers, "is_still_there", lambda worker, block, digest: True)


def read_after_the_end(patch: Patch) -> None:
    """The worker does not compare the digest of a block whose loan is over."""
    patch.setattr(tiers, "is_still_there", lambda worker, block, digest: True)


def other_salt(patch: Patch) -> None:
    """Blocks with the same tokens are lent whatever their chain, and the worker does not compare the digest."""

    def committed(source: OwnSource, digests: list[bytes], token_ids: U32, end: int) -> I64:
        pool, found = source.worker.pool, []
        for row in token_ids[: end * BLOCK_SIZE].reshape(-1, BLOCK_SIZE):
            blocks = np.flatnonzero((pool._tokens == row).all(axis=1) & np.array(pool._is_committed, bool))
            if not len(blocks):
                break
            found.append(blocks[0])
        return np.array(found, np.int64)

    patch.setattr(OwnSource, "committed", committed)
    patch.setattr(tiers, "is_still_there", lambda worker, block, digest: True)


@pytest.mark.parametrize(
    ("plant", "complaint", "extras"),
    [
        (no_references, "does not hold the blocks that are lent", ""),
        (no_references_of_groups, "does not hold the blocks that are lent", "groups"),
        (snapshots_not_kept, "does not hold the blocks that are lent", "snapshots"),
        (other_salt, "does not hold the blocks that are lent", ""),
        (no_end, "leaks", ""),
        (end_on_the_next_process, "a block is in two places", ""),
        (repeated_digest_lent, "a digest that occurs twice is lent", ""),
        (foreign_epoch, "reads the wrong content", ""),
        (read_after_the_end, "reads the wrong content", ""),
    ],
)
def test_a_planted_bug_is_caught(
    plant: Callable[[Patch], None], complaint: str, extras: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    seed = next((seed for seed in range(MAX_SEEDS) if complaint in complaint_of(seed, extras)), None)
    assert seed is not None, f"not caught in {MAX_SEEDS} seeds"
    monkeypatch.undo()
    Run(seed, extras=extras).run()
