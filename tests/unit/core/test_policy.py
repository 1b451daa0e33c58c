"""Pure choices: the projected peak against a step-by-step count, expected lengths."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.block_manager import ceil_div
from scheduler_svc.core.policy import (
    Rate,
    count_within,
    expected_remaining,
    expected_tokens,
    final_blocks,
    first_token_wait_s,
    is_queue_full,
    is_worth_leaving,
    late_by_s,
    least_busy,
    placement_scores,
    places_near_best,
    projected_peak,
    slowness,
    virtual_arrival,
)

SEQS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=80)


@given(SEQS, st.integers(1, 16))
def test_projected_peak_equals_the_peak_of_a_step_by_step_simulation(
    seqs: list[tuple[int, int]], block_size: int
) -> None:
    tokens, remaining = (np.array(column, dtype=np.int64) for column in zip(*seqs, strict=True))
    order = np.argsort(-remaining, kind="stable")
    saved = np.zeros(len(seqs), dtype=np.int64)
    simulated = max(
        sum(ceil_div(known + step, block_size) for known, left in seqs if left > step or step == 0)
        for step in range(max(1, int(remaining.max())))  # step 0 computes what is known; the last sample needs no KV
    )
    assert projected_peak(tokens[order], remaining[order], saved, block_size) == simulated
    assert final_blocks(tokens, remaining, block_size).sum() >= simulated


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=150))
def test_count_within_equals_a_count_one_by_one(pairs: list[tuple[int, int]]) -> None:
    values, limits = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    counts = [int((values[: k + 1] <= limit).sum()) for k, limit in enumerate(limits)]
    assert count_within(values, limits, 9).tolist() == counts


def test_projected_peak_sees_that_short_ones_end_first() -> None:
    tokens, rest = np.array([100, 100]), np.array([900, 10])
    assert projected_peak(tokens, rest, np.zeros(2, dtype=np.int64), 1) == 999  # not 1,108: the short one is gone then


def test_projected_peak_counts_shared_blocks_once() -> None:
    tokens, rest = np.array([64, 64]), np.array([16, 16])
    alone = projected_peak(tokens, rest, np.array([0, 0]), 16)
    assert projected_peak(tokens, rest, np.array([0, 4]), 16) == alone - 4


def test_expected_remaining_is_exact_when_nothing_can_stop_it() -> None:
    limit, output = np.array([500, 500, 5, 500]), np.array([0, 0, 0, 300])
    may_stop = np.array([False, True, True, True])
    assert expected_remaining(limit, output, may_stop, 200.0).tolist() == [500, 200, 5, 300]


def test_a_full_queue_accepts_a_tenant_below_its_share() -> None:
    assert not is_queue_full(9, 9, 1, 10)
    assert is_queue_full(10, 10, 1, 10)
    assert not is_queue_full(10, 4, 2, 10)
    assert is_queue_full(10, 5, 2, 10)
    assert is_queue_full(20, 0, 2, 10)


def test_what_is_not_known_costs_no_time() -> None:
    assert first_token_wait_s(10_000, None, 500, None) == 0.0
    assert first_token_wait_s(10_000, 1000.0, 500, None) == 10.0
    assert first_token_wait_s(10_000, 1000.0, 500, 250.0) == 12.0


def test_a_first_token_at_the_deadline_is_too_late() -> None:
    assert late_by_s(7.9, 0.0, 10.0) < 0 < late_by_s(8.1, 0.0, 10.0)
    assert late_by_s(5.9, 4.0, 10.0) < 0 < late_by_s(6.1, 4.0, 10.0)
    assert late_by_s(0.0, 0.0, 0.0) == 0


def test_answers_are_expected_at_their_mean_length() -> None:
    assert expected_tokens(100, 4000, 2, 256.0) == 100 + 2 * 256
    assert expected_tokens(100, 10, 1, 256.0) == 110


def test_a_pace_is_unknown_until_it_was_busy_and_follows_what_changes() -> None:
    pace = Rate()
    pace.add(1000, 0.5)
    assert pace.per_s is None
    pace.add(1000, 0.6)
    assert pace.per_s == pytest.approx(2000 / 1.1, rel=0.05)
    for _ in range(100):
        pace.add(10, 1.0)
    assert pace.per_s == pytest.approx(10, rel=0.05)
    idle = Rate()
    idle.add(0, 100.0)
    assert idle.per_s is None


def test_work_that_took_no_time_gives_no_rate() -> None:
    pace = Rate()
    pace.add(8, 0.0)  # steps within one tick of the clock
    assert pace.early_per_s is None
    pace.add(8, 2.0)
    assert pace.early_per_s == pytest.approx(16 / 2.0, rel=0.2)


def best_place(load: list[int], uncached: list[int], written: list[float], alpha: float = 3.0, **options: Any) -> int:
    loads, scores = np.array(load), placement_scores(np.array(load), np.array(uncached), alpha)
    allowed = np.array(options.get("allowed", [True] * len(load)))
    near = places_near_best(scores, options.get("slack", 0.0), loads, allowed)
    return least_busy(near, np.zeros(len(load)), np.array(written), np.ones(len(load)))


def test_a_prefix_draws_a_request_until_too_much_waits_there() -> None:
    uncached, written = [100, 1000], [0.5, 0.5]
    assert best_place([0, 0], uncached, written) == 0
    assert best_place([2800, 0], uncached, written) == 1
    assert best_place([2800, 0], uncached, written, alpha=4.0) == 0


def test_among_those_as_good_the_pool_that_was_written_least_is_chosen_if_it_is_allowed() -> None:
    columns = [0, 0, 0, 0], [5, 5, 6, 9], [0.3, 0.2, 0.1, 0.0]
    assert best_place(*columns) == 1
    assert best_place(*columns, slack=3.0) == 2
    assert best_place(*columns, slack=3.0, allowed=[True, False, False, True]) == 0
    assert best_place(*columns, allowed=[False, False, False, True]) == 3


def test_ties_are_broken_by_rows_and_the_time_of_a_step() -> None:
    places, rows, written = np.arange(3), np.array([8, 7, 0]), np.array([0.0, 0.9, 1.0])
    assert least_busy(places, rows, written, np.ones(3)) == 2
    assert least_busy(places, rows, written, np.array([1.0, 1.0, 10.0])) == 1


def test_slowness_is_relative_and_unknown_times_count_as_fast() -> None:
    step, prefill = slowness(np.array([[0.01, 0.019, np.inf, 0.1], [np.inf, 1e-4, 5e-4, np.inf]]))
    assert step.tolist() == pytest.approx([1, 1.9, 1, 10])
    assert prefill.tolist() == [1, 1, 4, 8]
    assert [times.tolist() for times in slowness(np.full((2, 2), np.inf))] == [[1, 1], [1, 1]]


def test_less_written_is_not_worth_waiting_for() -> None:
    assert best_place([0, 0], [500, 490], [0.1, 0.9], slack=60.0) == 0
    assert best_place([6, 0], [500, 500], [0.1, 0.9], slack=60.0) == 0
    assert best_place([20, 0], [500, 500], [0.1, 0.9], slack=60.0) == 1


def test_short_work_comes_first_until_the_long_one_has_waited_enough() -> None:
    long_one = virtual_arrival(10.0, 3000, 1000.0)
    assert virtual_arrival(12.0, 500, 1000.0) < long_one < virtual_arrival(13.0, 500, 1000.0)
    assert virtual_arrival(11.0, 0, float("inf")) > virtual_arrival(10.0, 10_000, float("inf"))


def test_a_cached_prefix_is_left_when_the_wait_has_cost_more_than_computing_it_again() -> None:
    assert not is_worth_leaving(3000, 0.0, 1000.0, 0.3)
    assert not is_worth_leaving(3000, 9.9, 1000.0, 0.3)
    assert is_worth_leaving(3000, 10.1, 1000.0, 0.3)
    assert is_worth_leaving(0, 0.0, 1000.0, 0.3)  # nothing to compute again: nothing to wait for
    assert is_worth_leaving(3000, 0.0, None, 0.3)  # the cost is unknown
