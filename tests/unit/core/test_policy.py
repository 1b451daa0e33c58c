"""Pure choices: the projected peak against a step-by-step count, expected lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.policy import ceil_div, expected_remaining, projected_peak

SEQS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=8)


@given(SEQS, st.integers(1, 16))
def test_projected_peak_is_never_below_what_really_happens_and_never_far_above(
    seqs: list[tuple[int, int]], block_size: int
) -> None:
    tokens, rest = (np.array(column, dtype=np.int64) for column in zip(*seqs, strict=True))
    peak = projected_peak(tokens, rest, np.zeros(len(seqs), dtype=np.int64), block_size)
    real = max(sum(ceil_div(n + t, block_size) for n, r in seqs if r >= t) for t in range(int(rest.max()) + 1))
    assert real <= peak <= real + len(seqs)


def test_projected_peak_sees_that_short_ones_end_first() -> None:
    tokens, rest = np.array([100, 100]), np.array([900, 10])
    assert projected_peak(tokens, rest, np.zeros(2, dtype=np.int64), 1) == 1000  # not 1,110: the short one is gone then


def test_projected_peak_counts_shared_blocks_once() -> None:
    tokens, rest = np.array([64, 64]), np.array([16, 16])
    alone = projected_peak(tokens, rest, np.array([0, 0]), 16)
    assert projected_peak(tokens, rest, np.array([0, 4]), 16) == alone - 4


def test_expected_remaining_is_exact_when_nothing_can_stop_it() -> None:
    limit, output = np.array([500, 500, 5, 500]), np.array([0, 0, 0, 300])
    may_stop = np.array([False, True, True, True])
    assert expected_remaining(limit, output, may_stop, 200.0).tolist() == [500, 200, 5, 300]
