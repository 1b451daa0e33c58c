"""Snapshots of pools: states, owners, bounds, and that reading changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from quire.internal.v1 import scheduler_pb2

from scheduler_svc import status
from scheduler_svc.core import stats
from scheduler_svc.core.block_manager import CACHED, EMPTY, SHARED, USED
from scheduler_svc.core.scheduler import Scheduler
from step_protocol.columns import u32_from_bytes
from step_protocol.messages import StepBatch, StepOutput
from tests.builders import make_capacity, make_group, make_scheduler, run_to_end
from tests.invariants import check_scheduler


def answer(scheduler: Scheduler, batch: StepBatch) -> None:
    """Each sample gets token 9."""
    rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
    scheduler.update(StepOutput(batch.step_id, rows, np.full_like(rows, 9), worker_id=batch.worker_id), 10.0)


def pool_of(scheduler: Scheduler) -> tuple[scheduler_pb2.PoolState, np.ndarray, np.ndarray]:
    """The pool, and the states and owners of its cells."""
    pool = status.pool_state(*scheduler.first_workers(), 10.0)
    return pool, np.frombuffer(pool.states, np.uint8), u32_from_bytes(pool.owners, "owners")


def running(num_blocks: int = 32, **sizes: int) -> Scheduler:
    """One request of 10 tokens with two samples has run; then one with the same prompt starts."""
    scheduler = make_scheduler(make_capacity(num_blocks=num_blocks, block_size=4, **sizes))
    scheduler.add_group(make_group(10, "first", max_tokens=2, ignore_eos=True), 0.0)
    run_to_end(scheduler)
    scheduler.add_group(make_group(10, "second", n=2, max_tokens=8, ignore_eos=True), 9.0)
    for batch in scheduler.schedule(10.0):
        answer(scheduler, batch)
    return scheduler


def test_states_and_owners_of_blocks() -> None:
    scheduler = running()
    pool, states, owners = pool_of(scheduler)
    (stats,) = scheduler.stats().workers
    counts = {state: int((states == state).sum()) for state in (EMPTY, CACHED, USED, SHARED)}
    assert counts[USED] + counts[SHARED] == stats.blocks_used
    assert (counts[EMPTY], counts[CACHED]) == (stats.blocks_free, stats.blocks_cached)
    assert counts[SHARED] == pool.num_shared == 3, "the prompt's blocks; the last one is copied before a write"
    assert [(row.request_id, row.sample_index) for row in pool.rows] == [("second", 0), ("second", 1)]
    assert ((owners > 0) == (states >= USED)).all()
    check_scheduler(scheduler)


@pytest.mark.parametrize(("max_cells", "per_cell"), [(8, 1), (2, 2)])
def test_used_blocks_of_a_large_pool_are_shown_first(
    monkeypatch: pytest.MonkeyPatch, max_cells: int, per_cell: int
) -> None:
    whole, all_states, _ = pool_of(running(30))
    monkeypatch.setattr(status, "MAX_CELLS", max_cells)
    cells, states, owners = pool_of(running(30))
    assert (whole.is_ordered, cells.is_ordered) == (False, True)
    assert (cells.blocks_per_cell, len(states), len(owners)) == (per_cell, max_cells, max_cells)
    num_used = -(-int((all_states >= USED).sum()) // per_cell)
    assert (states >= USED).tolist() == [True] * num_used + [False] * (max_cells - num_used)
    assert (np.diff(owners[:num_used].astype(int)) >= 0).all(), "the blocks of a row are together"


def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_ROWS", 1)
    monkeypatch.setattr(stats, "MAX_WAITING", 3)
    monkeypatch.setattr(stats, "MAX_SLOWEST", 2)
    scheduler = running(max_num_seqs=2)
    for i in range(5):
        scheduler.add_group(make_group(10, f"w{i}"), 11.0 + i)
    assert len(pool_of(scheduler)[0].rows) == 1
    waiting = scheduler.waiting_snapshot(20.0)
    assert [(w.sequence.group.request_id, w.age_s) for w in waiting] == [("w0", 9.0), ("w1", 8.0), ("w2", 7.0)]
    assert [s.sequence.group.request_id for s in scheduler.slowest(20.0)] == ["second", "w0"]
