"""Proposed drafts and their number: suffixes against a search of all places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.engine.speculation.draft_len import StepTimes, draft_len
from worker_svc.engine.speculation.suffix import MAX_MATCH, MIN_MATCH, SuffixIndex


def length_at(tokens: list[int], place: int, end: int) -> int:
    """How many tokens before `place` equal those before `end`."""
    count = 0
    while count < min(place, MAX_MATCH) and tokens[place - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.lists(st.integers(1, 40), max_size=12))
def test_a_draft_follows_an_earlier_match(tokens: list[int], chunks: list[int]) -> None:
    column = np.array(tokens, np.uint32)
    index, end = SuffixIndex(column), 0
    for chunk in [*chunks, len(tokens)]:
        end = min(end + chunk, len(tokens))
        found = index.propose(end, 6)
        best = max((length_at(tokens, place, end) for place in range(MIN_MATCH, end)), default=0)
        assert bool(found) == (best >= MIN_MATCH)
        if found:
            places = [p for p in range(MIN_MATCH, end) if length_at(tokens, p, end) >= MIN_MATCH]
            drafts = [[(tokens[:end] + found)[p + i] for i in range(6)] for p in places]
            assert found in drafts


def test_the_longest_of_the_newest_matches_is_proposed() -> None:
    tokens = [9, 1, 2, 3, 4, 50, 8, 2, 3, 4, 60, 9, 1, 2, 3, 4]
    assert SuffixIndex(np.array(tokens, np.uint32)).propose(len(tokens), 1) == [50]


def test_a_loop_is_continued_beyond_the_end() -> None:
    tokens = np.array([5, 6, 7] * 3, np.uint32)
    assert SuffixIndex(tokens).propose(9, 7) == [5, 6, 7, 5, 6, 7, 5]


def test_content_ids_and_long_prompts_are_indexed_at_once() -> None:
    rng = np.random.default_rng(1)
    tokens = np.append(rng.integers(2**31, 2**32, 5000), np.zeros(9, np.int64)).astype(np.uint32)
    tokens[5000:5005] = tokens[100:105]
    assert SuffixIndex(tokens).propose(5005, 3) == tokens[105:108].tolist()


@pytest.mark.parametrize(
    ("acceptance", "num_outputs", "token_cost", "expected"),
    [
        (0.7, 2.0, 0.1, 4),  # 0.7 ** 4 = 0.24 > 0.2
        (0.0, 1.0, 0.01, 0),
        (0.99, 1.0, 0.01, 8),  # at most
        (0.7, 64.0, 1 / 64, 0),  # a step that computes as much as it can
        (0.3, 1.0, 0.3, 0),
    ],
)
def test_drafts_are_computed_while_they_pay(
    acceptance: float, num_outputs: float, token_cost: float, expected: int
) -> None:
    assert draft_len(acceptance, num_outputs, token_cost, 8) == expected


def test_the_cost_of_a_token_follows_from_the_times_of_steps() -> None:
    times = StepTimes()
    assert times.token_cost(4) == pytest.approx(1 / 14)
    for _ in range(200):
        for num_tokens, seconds in ((1, 0.020), (4, 0.026), (64, 0.4), (128, 0.8)):
            times.observe(num_tokens, seconds)
        times.observe(1, 0.5 if np.random.default_rng(_).random() < 0.02 else 0.020)
    assert times.token_cost(1) == pytest.approx(0.1, rel=0.3)  # 6 ms for 3 tokens, in a step of 20 ms
    assert times.token_cost(64) == pytest.approx(1 / 64, rel=0.1)
