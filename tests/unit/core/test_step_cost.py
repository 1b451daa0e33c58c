"""A step of steady decode stays cheap: counted in calls, which are the same on every machine, never in seconds.

When a limit is passed on purpose, run `make bench-core` before and after, and raise it with the reason in the commit.
"""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from bench.core import SteadyDecode

BLOCK_SIZE = 16


def calls_per_step(num_seqs: int) -> Counter[str]:
    """Mean Python and C calls of a step, messages included, over one cycle in which every row opens one block."""
    decode = SteadyDecode(num_seqs, BLOCK_SIZE)
    for _ in range(4):
        decode.step(decode.answer(), has_messages=True)
    answers_calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        answers_calls[event] += 1

    for _ in range(BLOCK_SIZE):
        answer = decode.answer()
        sys.setprofile(count)
        decode.step(answer, has_messages=True)
        sys.setprofile(None)
    return Counter({event: round(total / BLOCK_SIZE) for event, total in answers_calls.items()})


@pytest.mark.parametrize(("num_seqs", "python_calls", "c_calls"), [(1, 56, 54), (256, 69, 196)])
def test_calls_of_a_steady_step(num_seqs: int, python_calls: int, c_calls: int) -> None:
    calls = calls_per_step(num_seqs)
    assert calls["call"] <= python_calls, "Python calls"
    assert calls["c_call"] <= c_calls, "calls of C functions"


def test_a_row_that_opens_no_block_costs_no_call() -> None:
    few, many = calls_per_step(16), calls_per_step(256)
    rows_that_open_a_block = (256 - 16) // BLOCK_SIZE
    per_row = (many["call"] + many["c_call"] - few["call"] - few["c_call"]) / rows_that_open_a_block
    assert per_row <= 10, "calls for each row that fills a block and opens the next"
