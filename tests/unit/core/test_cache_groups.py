"""Cache groups: layers with windows free their blocks although other layers keep all of them."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from request_fields.sizes import blocks_before, blocks_of_row
from scheduler_svc.core.features.cache_groups import WindowGroup
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from step_protocol.messages import StepBatch
from step_protocol.types import CacheGroup
from tests.builders import answer, make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler

WINDOW, BLOCK = 10, 4


def capacity(num_rows: int = 8, window: int = WINDOW, **sizes: int) -> WorkerCapacity:
    group = CacheGroup(window, num_rows * blocks_of_row(window, BLOCK, sizes.get("pipeline_depth", 1)))
    return make_capacity(**{"block_size": BLOCK, "num_blocks": 200, **sizes}, groups=(group,))


def group_of(scheduler: Scheduler) -> WindowGroup:
    (group,) = scheduler._workers["w0"].parts_of_all
    assert isinstance(group, WindowGroup)
    return group


def num_held(scheduler: Scheduler, row: int = 0) -> int:
    tables = group_of(scheduler).tables
    return int(tables.num_blocks[row] - tables.first_block[row])


def run(scheduler: Scheduler) -> list[StepBatch]:
    """Run to the end. Returns the steps."""
    steps, queue = [], deque[StepBatch]()
    while scheduler.has_work:
        queue += scheduler.schedule(0.0)
        check_scheduler(scheduler)
        steps.append(queue.popleft())
        answer(scheduler, steps[-1])
    while queue:
        answer(scheduler, queue.popleft())
    return steps


@pytest.mark.parametrize("budget", [8, 64])
def test_a_long_sequence_holds_the_blocks_of_its_window(budget: int) -> None:
    scheduler = make_scheduler(capacity(max_num_batched_tokens=budget))
    scheduler.add_group(make_group(120, max_tokens=130), 0.0)
    most: list[int] = []
    while scheduler.has_work:
        (batch,) = scheduler.schedule(0.0)
        if batch.query_lens[0] == 1:
            most.append(num_held(scheduler))
        answer(scheduler, batch)
        check_scheduler(scheduler)
    assert max(most[BLOCK:]) == blocks_before(WINDOW, BLOCK) + 1 <= WINDOW // BLOCK + 2
    assert scheduler._workers["w0"].rows.num_blocks[0] == 63  # the first group keeps all blocks
    assert group_of(scheduler).pool.num_used == 0


@pytest.mark.parametrize("window", [1, 2, 5, 6, 10, 13])
def test_a_block_is_freed_exactly_when_no_token_attends_to_it(window: int) -> None:
    scheduler = make_scheduler(capacity(window=window))
    scheduler.add_group(make_group(3, max_tokens=60), 0.0)
    while scheduler.has_work:
        (batch,) = scheduler.schedule(0.0)
        position = int(batch.context_lens[0])
        first_seen = max(0, position - window + 1) // BLOCK
        first = int(group_of(scheduler).tables.first_block[0])
        assert first <= first_seen
        if position and position % BLOCK == 0:  # it takes a block, and frees what the block's tokens do not attend to
            assert first == max(0, position // BLOCK - blocks_before(window, BLOCK))
        answer(scheduler, batch)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_group_limits_the_rows(num_rows: int) -> None:
    scheduler = make_scheduler(capacity(num_rows))
    for number in range(4):
        scheduler.add_group(make_group(range(number, number + 50), f"r{number}", max_tokens=30), 0.0)
    assert max(len(step.rows) for step in run(scheduler)) == num_rows
    assert scheduler.stats().counts.num_preemptions == 0


def serve(scheduler: Scheduler, length: int, request_id: str) -> tuple[int, list[bytes]]:
    """Run a request. Returns the number of cached tokens from which it started, and its digests."""
    group = make_group(range(length), request_id, max_tokens=2)
    scheduler.add_group(group, 0.0)
    return int(run(scheduler)[0].context_lens[0]), group.sequences[0].digests


def test_a_hit_compares_the_tokens_of_the_group() -> None:
    scheduler = make_scheduler(capacity())
    _, chain = serve(scheduler, 50, "a")
    group, worker = group_of(scheduler), scheduler._workers["w0"]
    tokens = np.arange(48, dtype=np.uint32)
    assert worker.usable_hits(chain, 12, tokens) == 12
    group.pool._tokens[group.pool.held[chain[11]], 1] ^= 1
    assert worker.usable_hits(chain, 12, tokens) == 11
