"""The forced tokens of a thinking budget, compared with an automaton that reads the output token by token."""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np
import pytest

from step_protocol.features import START_WITHIN, ThinkingBudget

END, STOP, START, HEAD = 1, 2, 3, 4
MARKERS = {"open": [], "one": [START], "header": [HEAD, START, START]}


def budget(num_tokens: int, start: list[int], last: list[int], *, repeats: bool) -> ThinkingBudget:
    ids = [np.array(one, np.uint32) for one in (start, [END, STOP], last)]
    return ThinkingBudget(num_tokens, ids[0], ids[1], ids[2], repeats)


class Automaton:
    """The same rule, with a state."""

    def __init__(self, rule: ThinkingBudget) -> None:
        self._rule, self._start, self._last = rule, rule.start_ids.tolist(), rule.last_ids.tolist()
        self._is_inside, self._num_spans = not self._start, int(not self._start)
        self._spent = self._over = 0
        self._output: list[int] = []
        self._since = 0  # the first token that may belong to a start marker

    def forced(self) -> int | None:
        if not self._is_inside or self._spent < self._rule.num_tokens:
            return None
        over = self._spent - self._rule.num_tokens
        return self._last[over] if over < len(self._last) else END

    def push(self, token: int) -> None:
        self._output.append(token)
        if self._is_inside:
            self._is_inside = token not in (END, STOP)
            self._spent += self._is_inside
            self._since = len(self._output)
            return
        size, place = len(self._start), len(self._output)
        is_start = bool(size) and place - self._since >= size and self._output[-size:] == self._start
        may_begin = self._rule.repeats or (not self._num_spans and place <= START_WITHIN + size)
        if is_start and may_begin:
            self._is_inside, self._num_spans = True, self._num_spans + 1


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("start", MARKERS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_forced_tokens_are_those_of_an_automaton(num_tokens: int, start: str, repeats: bool) -> None:
    rng, num_forced = random.Random(f"{num_tokens} {start} {repeats}"), 0
    for _ in range(150):
        rule = budget(num_tokens, MARKERS[start], [7, 8, 9][: rng.randrange(4)], repeats=repeats)
        automaton, output = Automaton(rule), []
        for _ in range(40):
            forced = rule.forced_id(np.array(output, np.uint32))
            assert forced == automaton.forced(), output
            num_forced += forced is not None
            output.append(rng.choice((END, STOP, START, START, HEAD, 5, 6, 5, 6, 5, 6)) if forced is None else forced)
            automaton.push(output[-1])
    assert num_forced


def test_an_output_that_is_over_its_budget_gets_its_whole_end() -> None:
    """A client may continue an output with a smaller budget, and a grammar may allow no end for some tokens."""
    rule = budget(2, [], [7, 8], repeats=False)
    for output, forced in (
        ([5], None), ([5, 5], 7), ([5, 5, 5], 7), ([5, 5, 7], 8), ([5, 5, 6, 7], 8), ([5, 5, 6, 7, 8], END),
        ([7, 8, 5], 7), ([5, 5, 7, 5], 7), ([5, 5, 7, 8, 5], 7),
    ):  # fmt: skip
        assert rule.forced_id(np.array(output, np.uint32)) == forced, output


def test_markers_of_a_client_that_alternate_end_in_one_pass() -> None:
    """A step waits for the token, so its cost may not grow with the number of reasonings."""
    rule, output = budget(10**6, [START], [], repeats=True), np.array([START, END] * 100_000, np.uint32)
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        assert rule.forced_id(output) is None
    finally:
        sys.setprofile(None)
    assert calls.total() < 200
