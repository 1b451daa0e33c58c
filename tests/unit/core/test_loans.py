"""A scheduler borrows blocks that another one keeps: what it searches for, what may be lent, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.block_manager import NO_BLOCKS
from scheduler_svc.core.features.block_moves import BlockMove, BlockSearch
from scheduler_svc.core.features.block_sources import BlockSource, LentBlocks
from scheduler_svc.core.features.loans import MAX_FRACTION, Loan, WantedPrefix
from scheduler_svc.core.scheduler import Scheduler
from step_protocol.messages import StepOutput
from step_protocol.types import BlockMovement
from tests.builders import make_capacity, make_group, make_scheduler, run_to_end
from tests.invariants import check_scheduler

PROMPT = list(range(1, 41))  # ten blocks
LAYOUT = b"layout"
MOVEMENT = BlockMovement(LAYOUT, 100, can_transfer=True)


def scheduler_of(name: str, *, borrows: bool = False, movement: BlockMovement | None = MOVEMENT) -> Scheduler:
    capacity = replace(make_capacity(name, num_blocks=64), movement=movement)
    return make_scheduler(capacity, borrows_prefixes=borrows)


@pytest.fixture
def lender() -> Scheduler:
    """Its worker holds the blocks of the prompt."""
    scheduler = scheduler_of("theirs")
    scheduler.add_group(make_group(PROMPT, "first", max_tokens=1), 0.0)
    run_to_end(scheduler)
    return scheduler


@pytest.fixture
def borrower() -> Scheduler:
    return scheduler_of("ours", borrows=True)


def search_of(scheduler: Scheduler, name: str = "again", now: float = 1.0) -> BlockSearch:
    """A prompt whose blocks this scheduler does not have waits for a search."""
    scheduler.add_group(make_group([*PROMPT, 7], name, max_tokens=1), now)
    assert scheduler.schedule(now) == []
    (search,) = scheduler.moves.take_searches()
    return search


def wanted(search: BlockSearch, **changed: Any) -> WantedPrefix:
    own = WantedPrefix("theirs", make_capacity("theirs").worker_epoch, LAYOUT, search.digests, search.token_ids)
    return replace(own, **changed)


def lend(lender: Scheduler, search: BlockSearch) -> tuple[Loan, LentBlocks]:
    loan = lender.loans.begin(wanted(search))
    assert loan is not None
    source = replace(loan.describe(), address="there:1")
    return loan, LentBlocks(source, search.digests[: len(loan.block_ids)])


def move_of(scheduler: Scheduler, now: float = 1.1) -> BlockMove:
    assert scheduler.schedule(now) == []
    (move,) = scheduler.moves.take_moves()
    check_scheduler(scheduler)
    return move


def test_a_prefix_of_another_scheduler_is_pulled_and_hit(lender: Scheduler, borrower: Scheduler) -> None:
    search = search_of(borrower)
    loan, lent = lend(lender, search)
    check_scheduler(lender)
    assert lender.is_source("theirs")
    borrower.moves.end_search(search, lent, 1.05)
    move = move_of(borrower)
    assert move.source is not None
    assert (move.source.worker_id, move.source.address) == ("theirs", "there:1")
    assert (move.source.block_ids.tolist(), move.digests) == (loan.block_ids.tolist(), search.digests)
    borrower.end_move(move.move_id, 10, 0.01, 1.2)
    assert borrower.moves.take_read() == [lent]
    (batch,) = borrower.schedule(1.2)
    assert batch.context_lens.tolist() == [40]
    counts = borrower.stats().counts
    assert (counts.prefix_searches, counts.borrowed_tokens, counts.transferred_tokens) == (1, 40, 40)
    lender.loans.end(loan)
    lender.loans.end(loan)  # by its deadline, after the call has ended
    check_scheduler(lender)
    assert not lender.is_source("theirs")


def test_a_search_that_finds_nothing_costs_one_wait(borrower: Scheduler) -> None:
    search = search_of(borrower)
    borrower.moves.end_search(search, None, 1.05)
    (batch,) = borrower.schedule(1.1)
    assert batch.context_lens.tolist() == [0]
    assert borrower.moves.take_searches() == []


def test_short_prompts_and_other_settings_search_nothing(lender: Scheduler) -> None:
    for scheduler in (
        scheduler_of("ours", borrows=True, movement=replace(MOVEMENT, can_transfer=False, has_tier=True)),
        scheduler_of("ours", borrows=False),
        scheduler_of("ours", borrows=True, movement=None),
    ):
        scheduler.add_group(make_group([*PROMPT, 7], "again", max_tokens=1), 1.0)
        assert len(scheduler.schedule(1.0)) == 1
        assert scheduler.moves.take_searches() == []
    fast = scheduler_of("ours", borrows=True)
    rate = fast.moves._throughput.prefill
    rate._amount, rate._busy_s = 4000.0, 1.0  # 40 tokens take 10 ms, longer than a search or a move, but not both
    fast.add_group(make_group([*PROMPT, 7], "again", max_tokens=1), 1.0)
    assert len(fast.schedule(1.0)) == 1


def test_the_price_of_searches_is_measured(borrower: Scheduler) -> None:
    """After slow ones there are none, until enough prompts came without."""
    rate, nothing = borrower.moves._throughput.prefill, BlockSource("theirs", 1, NO_BLOCKS, "there:1")

    def searches(number: int, took_s: float) -> bool:
        rate._amount, rate._busy_s = 400.0, 1.0  # 40 tokens take 100 ms
        borrower.add_group(make_group([number, *PROMPT], str(number), max_tokens=1), 0.0)
        batches = borrower.schedule(0.0)
        found = borrower.moves.take_searches()
        for search in found:
            borrower.moves.end_search(search, LentBlocks(nothing, []), took_s)
            borrower.moves.end_search(search, None, 50.0)  # lent blocks are not kept any longer: no part of the search
        for batch in batches + borrower.schedule(0.0):
            borrower.update(StepOutput(batch.step_id, batch.rows, np.full_like(batch.rows, 9), worker_id="ours"), 0.0)
        return bool(found)

    assert searches(50, took_s=2.0)
    assert not any(searches(number, took_s=0.001) for number in range(51, 60))
    assert any(searches(number, took_s=0.001) for number in range(60, 2000))


def test_a_part_of_a_pool_can_be_lent_at_once(lender: Scheduler, borrower: Scheduler) -> None:
    search = search_of(borrower)
    loans = [loan for _ in range(4) if (loan := lender.loans.begin(wanted(search))) is not None]
    assert sum(len(loan.block_ids) for loan in loans) == int(64 * MAX_FRACTION)
    check_scheduler(lender)
    for loan in loans:
        lender.loans.end(loan)
    check_scheduler(lender)
    assert lender.loans.begin(wanted(search)) is not None
