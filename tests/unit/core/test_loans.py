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


def test_lent_blocks_are_given_back_when_the_only_worker_leaves(lender: Scheduler, borrower: Scheduler) -> None:
    search = search_of(borrower)
    _, lent = lend(lender, search)
    borrower.moves.end_search(search, lent, 1.05)
    move_of(borrower)
    borrower.remove_worker("ours")
    assert borrower.moves.is_on
    assert borrower.moves.take_read() == [lent]
    assert not borrower.moves.is_on


def test_a_search_that_finds_nothing_costs_one_wait(borrower: Scheduler) -> None:
    search = search_of(borrower)
    borrower.moves.end_search(search, None, 1.05)
    (batch,) = borrower.schedule(1.1)
    assert batch.context_lens.tolist() == [0]
    assert borrower.moves.take_searches() == []


def test_a_search_without_an_answer_ends_by_itself(borrower: Scheduler) -> None:
    search = search_of(borrower)
    assert borrower.moves.next_end_of_patience(1.0) == search.give_up_at
    (batch,) = borrower.schedule(search.give_up_at)
    assert batch.context_lens.tolist() == [0]


def test_a_loan_that_ended_before_the_move_began_is_not_read(lender: Scheduler, borrower: Scheduler) -> None:
    search = search_of(borrower)
    _, lent = lend(lender, search)
    borrower.moves.end_search(search, lent, 1.05)
    borrower.moves.end_search(search, None, 1.05)
    (batch,) = borrower.schedule(1.1)
    assert batch.context_lens.tolist() == [0]


def test_sequences_with_the_same_prefix_wait_for_one_search(lender: Scheduler, borrower: Scheduler) -> None:
    borrower.add_group(make_group([*PROMPT, 8], "other", max_tokens=1), 1.0)
    search = search_of(borrower)
    _, lent = lend(lender, search)
    borrower.moves.end_search(search, lent, 1.05)
    move = move_of(borrower)
    borrower.end_move(move.move_id, 10, 0.01, 1.2)
    (batch,) = borrower.schedule(1.2)
    assert batch.context_lens.tolist() == [40, 40]


def test_another_prompt_takes_only_the_blocks_that_it_shares(lender: Scheduler, borrower: Scheduler) -> None:
    """It waits for the search of the first, whose first block it has too."""
    other = [*PROMPT[:20], *range(60, 81)]
    search = search_of(borrower)
    borrower.add_group(make_group(other, "other", max_tokens=1), 1.0)
    assert borrower.schedule(1.0) == []
    _, lent = lend(lender, search)
    assert lent.num_held(borrower._requests.groups["other"].sequences[0].digests, 10) == 5
    borrower.moves.end_search(search, lent, 1.05)
    assert [len(move.digests) for move in (borrower.schedule(1.1), borrower.moves.take_moves())[1]] == [10]


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


@pytest.mark.parametrize(
    "changed",
    [
        {"worker_id": "gone"},
        {"worker_epoch": 77},
        {"layout": b"other revision or numerics"},
        {"token_ids": np.zeros(40, np.uint32)},
        {"token_ids": np.arange(1, 40, dtype=np.uint32)},
        {"digests": [bytes(16)] * 10},
        {"digests": [], "token_ids": np.zeros(0, np.uint32)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_only_exactly_these_blocks_are_lent(lender: Scheduler, borrower: Scheduler, changed: dict[str, object]) -> None:
    search = search_of(borrower)
    assert lender.loans.begin(wanted(search, **changed)) is None
    check_scheduler(lender)
    assert not lender.is_source("theirs")
    assert lender.loans.begin(wanted(search)) is not None


def test_a_part_of_a_pool_can_be_lent_at_once(lender: Scheduler, borrower: Scheduler) -> None:
    search = search_of(borrower)
    loans = [loan for _ in range(4) if (loan := lender.loans.begin(wanted(search))) is not None]
    assert sum(len(loan.block_ids) for loan in loans) == int(64 * MAX_FRACTION)
    check_scheduler(lender)
    for loan in loans:
        lender.loans.end(loan)
    check_scheduler(lender)
    assert lender.loans.begin(wanted(search)) is not None
