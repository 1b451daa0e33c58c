"""Attention windows: blocks that no later token attends to are freed, counted out of admission, and shared."""

from __future__ import annotations

import pytest

from request_fields.sizes import SizeLimits, blocks_before
from scheduler_svc.core.errors import NeverFitsError, WorkerMismatchError
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from tests.builders import answer, make_capacity, make_group, make_scheduler, run_to_end
from tests.invariants import check_scheduler

WINDOW = 10  # with blocks of 4 tokens: 3 blocks before the one that a token is in


def window_capacity(worker_id: str = "w0", **sizes: int) -> WorkerCapacity:
    return make_capacity(worker_id, **{"attention_window": WINDOW, "block_size": 4, **sizes})


def num_used(scheduler: Scheduler, worker_id: str = "w0") -> int:
    return scheduler.worker_stats(worker_id).blocks_used


@pytest.mark.parametrize(
    ("window", "block_size", "expected"), [(1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2), (90, 16, 6)]
)
def test_blocks_before_the_block_of_a_token(window: int, block_size: int, expected: int) -> None:
    assert blocks_before(window, block_size) == expected
    positions = range(window, 200)
    needed = [p // block_size - (p - window + 1) // block_size for p in positions]
    assert max(needed) == expected


def test_a_pool_that_holds_the_window_holds_any_length() -> None:
    assert SizeLimits.of_pool(1000, 4, 4, WINDOW).fits(600, 400)
    assert not SizeLimits.of_pool(1000, 4, 4, WINDOW).fits(600, 401)  # the model's limit
    assert not SizeLimits.of_pool(1000, 3, 4, WINDOW).fits(10, 10)
    assert SizeLimits.of_pool(1000, 3, 4, WINDOW).fits(10, 3)
    assert not SizeLimits.of_pool(1000, 4, 4, None).fits(600, 400)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("num_prompt", [3, 40, 180])
def test_a_long_sequence_runs_in_the_blocks_of_its_window(depth: int, num_prompt: int) -> None:
    scheduler = make_scheduler(window_capacity(num_blocks=4, pipeline_depth=depth))
    scheduler.add_group(make_group(num_prompt, max_tokens=250 - num_prompt), 0.0)
    run_to_end(scheduler, lambda step: check_scheduler(scheduler))
    assert scheduler.stats().counts.num_preemptions == 0
    assert num_used(scheduler) == 0


def test_a_pool_without_room_for_the_window_refuses_a_longer_sequence() -> None:
    scheduler = make_scheduler(window_capacity(num_blocks=3))
    with pytest.raises(NeverFitsError, match="the largest KV pool"):
        scheduler.add_group(make_group(5, max_tokens=9), 0.0)
    scheduler.add_group(make_group(5, max_tokens=8), 0.0)


def test_workers_with_different_windows_do_not_mix() -> None:
    scheduler = make_scheduler(window_capacity())
    with pytest.raises(WorkerMismatchError, match="attention_window 12, but worker w0 has 10"):
        scheduler.add_worker(window_capacity("w1", attention_window=12))


def test_admission_counts_a_long_sequence_with_its_window() -> None:
    scheduler = make_scheduler(window_capacity(num_blocks=8), watermark=0.0)
    for i in range(3):
        scheduler.add_group(make_group([i + 1] * 30, f"r{i}", max_tokens=200, ignore_eos=True), 0.0)
    num_running = []
    run_to_end(scheduler, lambda step: num_running.append(scheduler.load().num_running))
    assert max(num_running) == 2  # 58 blocks each, but 4 at a time
    assert num_running.count(2) > 150
    assert scheduler.stats().counts.num_preemptions == 0


def test_freed_blocks_of_a_running_row_can_be_hit() -> None:
    scheduler = make_scheduler(window_capacity(num_blocks=64))
    prompt = list(range(1, 41))
    scheduler.add_group(make_group(prompt, max_tokens=100, ignore_eos=True), 0.0)
    for _ in range(3):
        answer(scheduler, *scheduler.schedule(0.0))
    assert scheduler.worker_stats("w0").blocks_cached >= 7  # most of the first 10
    scheduler.add_group(make_group([*prompt[:24], 99], "r1", max_tokens=2), 0.0)
    (batch,) = scheduler.schedule(0.0)
    (opened,) = batch.opens
    assert opened.num_computed_tokens == 24
    assert num_used(scheduler) <= 4 + 3 + 1  # only the hit's blocks in the window are in use
    check_scheduler(scheduler)


def test_an_ended_row_leaves_its_whole_prefix_to_be_hit() -> None:
    """The first blocks were freed first. They must not be evicted before the blocks that continue them."""
    scheduler = make_scheduler(window_capacity(num_blocks=16))
    prompt = list(range(1, 49))
    scheduler.add_group(make_group(prompt, max_tokens=4), 0.0)
    run_to_end(scheduler)
    scheduler.add_group(make_group(range(100, 110), "other", max_tokens=6), 0.0)  # takes four blocks: it evicts some
    run_to_end(scheduler)
    scheduler.add_group(make_group([*prompt[:20], 7], "again", max_tokens=1), 0.0)
    (batch,) = scheduler.schedule(0.0)
    assert batch.opens[0].num_computed_tokens == 20


def test_a_blocked_prompt_does_not_stop_others() -> None:
    """Prompts longer than the window share a pool that holds three windows, but not their chunks at once."""
    capacity = window_capacity(num_blocks=13, max_num_batched_tokens=64, pipeline_depth=3)
    scheduler = make_scheduler(capacity, watermark=0.0)
    for i in range(8):
        scheduler.add_group(make_group([i + 1] * 90, f"r{i}", max_tokens=60, n=1 + i % 2), 0.0)
    assert run_to_end(scheduler, lambda step: check_scheduler(scheduler)) < 2000
    assert num_used(scheduler) == 0
