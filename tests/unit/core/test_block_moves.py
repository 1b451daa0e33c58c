"""Which blocks move: the price of a move against that of computing, and what a sequence waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefix_index.hashing import snapshot_digest, state_id
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.policy import MoveSpeed, TierKind, moved_tokens_gain
from scheduler_svc.core.scheduler import Scheduler
from step_protocol.types import BlockMovement
from tests.builders import answer, make_capacity, make_group, make_scheduler, run_to_end
from tests.invariants import check_scheduler

PROMPT = list(range(1, 41))  # ten blocks
BOTH = BlockMovement(b"layout", 100, has_tier=True, can_transfer=True)


def test_a_move_gains_the_tokens_that_are_computed_in_the_time_saved() -> None:
    assert moved_tokens_gain(1000, 0.1, 2000.0) == 800
    assert moved_tokens_gain(100, 0.1, 2000.0) == -100
    assert moved_tokens_gain(100, 0.1, None) == 100


def test_the_time_of_a_block_follows_the_measured_moves() -> None:
    speed = MoveSpeed(1 << 20)
    assert speed.seconds(100) == pytest.approx(0.005 + 100 * (0.0002 + (1 << 20) / 500e6))
    for _ in range(30):
        speed.add(10, 0.105)
    assert speed.seconds(10) == pytest.approx(0.105, rel=0.01)
    speed.add(0, 9.0)
    assert speed.seconds(10) == pytest.approx(0.105, rel=0.01)


def test_short_moves_measure_what_a_move_costs_and_long_ones_what_a_block_costs() -> None:
    """Short moves on a busy machine must not make long ones look expensive: nothing would be moved again."""
    speed = MoveSpeed(100)
    for _ in range(60):
        speed.add(1, 0.05)
    assert speed.seconds(1) == pytest.approx(0.05, rel=0.01)
    assert speed.seconds(500) < 0.05 + 500 * 0.0021
    for _ in range(60):
        speed.add(500, 0.25)
        speed.add(1, 0.05)
    assert speed.seconds(500) == pytest.approx(0.25, rel=0.1)


def test_an_estimate_that_forbids_moves_is_forgotten_in_time() -> None:
    speed = MoveSpeed(100)
    for _ in range(30):
        speed.add(100, 60.0)
    assert speed.seconds(100) > 50
    for _ in range(5000):
        speed.add_unmoved()
    assert speed.seconds(100) == pytest.approx(MoveSpeed(100).seconds(100), rel=0.2)
    before = speed.seconds(100)
    for _ in range(30):
        speed.add(100, 0.002)
    assert speed.seconds(100) < before / 5
    low = speed.seconds(100)
    speed.add_unmoved()
    assert speed.seconds(100) == low, "a measured low price stays"


def capacity(name: str, movement: BlockMovement | None = BOTH, **sizes: int) -> WorkerCapacity:
    return replace(make_capacity(name, **sizes), movement=movement)


def digests_of(scheduler: Scheduler, worker_id: str) -> list[bytes]:
    return scheduler._workers[worker_id].pool.cached_digests()


def warm(scheduler: Scheduler, name: str = "first") -> None:
    """Compute and cache the prompt."""
    scheduler.add_group(make_group(PROMPT, name, max_tokens=1), 0.0)
    run_to_end(scheduler)


def moves_of(scheduler: Scheduler, now: float = 1.0) -> list[BlockMove]:
    assert scheduler.schedule(now) == [], "nothing is computed while the blocks are on the way"
    return scheduler.moves.take_moves()


def test_a_restarted_worker_reads_its_tier_and_the_sequence_hits_it() -> None:
    scheduler = make_scheduler(capacity("w0"))
    warm(scheduler)
    held = digests_of(scheduler, "w0")
    scheduler.remove_worker("w0")
    scheduler.add_worker(capacity("w0", worker_epoch=2))
    scheduler.moves.change_tiers("w0", dict.fromkeys(held, TierKind.DISK))
    scheduler.add_group(make_group([*PROMPT, 7], "again", max_tokens=1), 1.0)
    (move,) = moves_of(scheduler)
    assert (move.source, len(move.digests), move.after_step_id) == (None, 10, 0)
    check_scheduler(scheduler)
    scheduler.end_move(move.move_id, 10, 0.01, 1.1)
    check_scheduler(scheduler)
    (batch,) = scheduler.schedule(1.1)
    assert batch.context_lens.tolist() == [40]
    assert sorted(batch.commit_digests) == sorted(held)


def test_a_read_ends_where_the_next_tier_costs_more_than_computing() -> None:
    """Each tier has its price, and what a move measures counts for the tiers that it read."""
    scheduler = make_scheduler(capacity("w0"))
    warm(scheduler)
    held = digests_of(scheduler, "w0")
    scheduler.remove_worker("w0")
    scheduler.add_worker(capacity("w0", worker_epoch=2))
    moves = scheduler.moves
    moves.change_tiers("w0", dict.fromkeys(held[:6], TierKind.MEMORY) | dict.fromkeys(held[6:], TierKind.DISK))
    speeds = moves._movers["w0"].tier_speeds
    for _ in range(30):
        speeds[TierKind.DISK].add(4, 60.0)
    rate = moves._throughput.prefill
    rate._amount, rate._busy_s = 2000.0, 1.0
    before = {kind: speed.seconds(6) for kind, speed in speeds.items()}
    scheduler.add_group(make_group([*PROMPT, 7], "again", max_tokens=1), 1.0)
    (move,) = moves_of(scheduler)
    assert move.digests == held[:6]
    scheduler.end_move(move.move_id, 6, 2 * before[TierKind.MEMORY], 1.1)
    lost_s = 2 * before[TierKind.MEMORY] - 24 / 2000
    assert moves.take_losses() == [pytest.approx(lost_s)], "computing 24 tokens takes 12 ms"
    assert moves.take_losses() == []
    assert speeds[TierKind.MEMORY].seconds(6) > 1.1 * before[TierKind.MEMORY]
    assert speeds[TierKind.DISK].seconds(6) == pytest.approx(before[TierKind.DISK], rel=0.01)
    moves.change_tiers("w0", dict.fromkeys(held[:2]))
    assert moves.num_in_tiers("w0") == 8


@pytest.mark.parametrize(
    "other", [None, replace(BOTH, layout=b"other"), replace(BOTH, can_transfer=False)], ids=["none", "layout", "flag"]
)
def test_workers_that_cannot_exchange_blocks_do_not(other: BlockMovement | None) -> None:
    scheduler = make_scheduler(capacity("w0"), capacity("w1", other))
    scheduler.add_group(make_group(PROMPT, "stream", max_tokens=100), 0.0)
    scheduler.schedule(0.0)
    source = next(w for w in scheduler._workers.values() if w.rows.num_used)
    scheduler.drain_worker(source.capacity.worker_id)
    assert scheduler.moves.take_moves() == []
    assert not source.rows.num_used, "it leaves at once, as without moves"


def recurrent(name: str, num_snapshots: int = 2, snapshot_tokens: int = 8, **sizes: int) -> WorkerCapacity:
    """A worker whose rows start from snapshots; one is worth two blocks."""
    return replace(capacity(name, **sizes), num_snapshots=num_snapshots, snapshot_tokens=snapshot_tokens)


def test_a_restarted_worker_reads_the_deepest_snapshot_and_the_blocks_before_it() -> None:
    scheduler = make_scheduler(recurrent("w0", snapshot_tokens=40))
    warm(scheduler)
    (step,) = scheduler.schedule(1.0)
    held = digests_of(scheduler, "w0")
    at = [digest for digest in held if snapshot_digest(digest) in step.commit_digests]
    assert len(at) == 1
    answer(scheduler, step, 1.0)
    scheduler.remove_worker("w0")
    scheduler.add_worker(recurrent("w0", snapshot_tokens=40, worker_epoch=2))
    scheduler.moves.change_tiers("w0", dict.fromkeys((*held, snapshot_digest(at[0])), TierKind.DISK))
    scheduler.add_group(make_group([*PROMPT, 7], "again", max_tokens=1), 1.0)
    (move,) = moves_of(scheduler)
    assert (len(move.digests), move.digests[-1]) == (9, at[0]), "the last block of the prompt is after the snapshot"
    (extra,) = move.extras
    assert (extra.digest, extra.block_id) == (snapshot_digest(at[0]), scheduler._workers["w0"].capacity.num_blocks)
    assert extra.words.tobytes() == state_id(np.array(PROMPT[:36], np.uint32), b"")
    check_scheduler(scheduler)
    scheduler.end_move(move.move_id, move.num_items, 0.01, 1.1)
    check_scheduler(scheduler)
    (batch,) = scheduler.schedule(1.1)
    assert batch.context_lens.tolist() == [36]
    assert [opened.snapshot for opened in batch.opens] == [0]


def test_without_its_snapshot_no_block_moves_and_a_dear_one_is_computed() -> None:
    scheduler = make_scheduler(recurrent("w0", snapshot_tokens=4_000_000))
    warm(scheduler)
    held = digests_of(scheduler, "w0")
    scheduler.remove_worker("w0")
    scheduler.add_worker(recurrent("w0", worker_epoch=2, snapshot_tokens=4_000_000))
    scheduler._throughput.prefill.add(1000, 0.1)
    names = [snapshot_digest(digest) for digest in held]
    for tier in (held, [*held, *names]):
        scheduler.moves.change_tiers("w0", dict.fromkeys(tier, TierKind.DISK))
        scheduler.add_group(make_group([*PROMPT, len(tier)], str(len(tier)), max_tokens=1), 1.0)
        (batch,) = scheduler.schedule(1.0)
        assert scheduler.moves.take_moves() == []
        answer(scheduler, batch, 1.0)
        scheduler.forget_prefixes()
