"""Drafts from an old answer: the output of an earlier request, which the new output may repeat, with or without edits.

A row is followed through the old answer. `_next` is the index of the token that is expected next. After a token that
differs, the answer is searched for the newest tokens of the output; where they do not occur, `_next` stays at the
distance from the start that it has, because most edits replace tokens. An answer that was often wrong proposes only
after a longer match (`least_match`), so a foreign one costs a few drafts in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64, U32
from step_protocol.messages import RowOpen
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.speculation.suffix import FEW, MAX_MATCH, MIN_MATCH, mixed_threes

MANY = 8  # tokens in a row, after which earlier wrong proposals are forgotten
MAX_PLACES = 8  # places of the newest tokens that are compared
MAX_PAUSE = 32  # steps without a look at answers that had nothing
NEAR = 4  # tokens around the expected one, among which one token is a match
ALWAYS_WRONG = 6  # proposals after which the least match grows no more


def least_match(num_wrong: int) -> int:
    """The number of newest tokens that an answer must have before its next token is a draft."""
    return 0 if num_wrong < 2 else 2 ** (min(num_wrong, ALWAYS_WRONG) - 1) - 1


class AnswerIndex:
    """Where three tokens occur in an old answer. The samples of a request share it: to sort 65,536 tokens takes tens of
    milliseconds of a step.
    """

    def __init__(self, answer: U32) -> None:
        self._answer = answer

    @cached_property
    def places(self) -> tuple[npt.NDArray[np.uint64], I64]:
        """The mixed tokens, sorted, and where each three end. Those of equal ones are ascending."""
        mixed = mixed_threes(self._answer)
        order = np.argsort(mixed, kind="stable")
        return mixed[order], order + MIN_MATCH


class OldAnswer:
    """The place of a row in an old answer. `index`: that of another row with the same answer."""

    def __init__(self, answer: U32, index: AnswerIndex | None = None) -> None:
        self.answer = answer
        self.index = index or AnswerIndex(answer)
        self._end = 0  # output tokens that were compared
        self._next = 0
        self._length = 0  # newest tokens of the output that are those before `_next`
        self._num_wrong = 0  # wrong proposals since MANY tokens in a row were right

    def propose(self, output: U32, most: int) -> list[int]:
        """Up to `most` tokens that may follow this output. Earlier calls had no more of it."""
        if len(output) - self._end > FEW:
            self._next, self._length = self._next + len(output) - self._end, 0
            self._search(output)
        else:
            for end in range(self._end + 1, len(output) + 1):
                self._add(output[:end])
        self._end = len(output)
        return self.answer[self._next : self._next + most].tolist() if self._proposes else []

    @property
    def _proposes(self) -> bool:
        return self._next < len(self.answer) and self._length >= least_match(self._num_wrong)

    def _add(self, output: U32) -> None:
        """Compare the newest token of the output."""
        proposed, place = self._proposes, self._next
        self._next += 1
        if place < len(self.answer) and self.answer.item(place) == output.item(-1):
            self._length += 1
            self._num_wrong *= self._length < MANY
            return
        self._num_wrong += proposed
        self._length = 0
        self._search(output)
        first = max(0, place - NEAR)
        if not self._length and (near := np.flatnonzero(self.answer[first : place + NEAR] == output[-1])).size:
            self._next, self._length = first + int(near[np.abs(first + near - place).argmin()]) + 1, 1

    def _search(self, output: U32) -> None:
        """Go to the longest match of the newest tokens, to the nearest of equal ones."""
        if min(len(output), len(self.answer)) < MIN_MATCH:
            return
        newest, expected = output[-MAX_MATCH:][::-1], self._next
        for place in self._places(output):
            earlier = self.answer[max(0, place - MAX_MATCH) : place][::-1]
            size = min(len(earlier), len(newest))
            differs = np.flatnonzero(earlier[:size] != newest[:size])
            length = int(differs[0]) if len(differs) else size
            distance, shortest = abs(place - expected), abs(self._next - expected)
            if length > self._length or (length == self._length > 0 and distance < shortest):
                self._next, self._length = place, length

    def _places(self, output: U32) -> list[int]:
        """Where the newest three tokens end in the answer: those next to the expected place, as far as hashes tell."""
        mixed, places = self.index.places
        newest = mixed_threes(output[-MIN_MATCH:])[0]
        first, last = int(np.searchsorted(mixed, newest)), int(np.searchsorted(mixed, newest, "right"))
        middle = first + int(np.searchsorted(places[first:last], self._next))
        near: list[int] = places[max(first, middle - MAX_PLACES // 2) : min(last, middle + MAX_PLACES // 2)].tolist()
        return near


class OldAnswers:
    """The old answers of open rows."""

    def __init__(self, rows: OpenRows) -> None:
        self._rows = rows
        self.in_use: dict[int, OldAnswer] = {}
        self._pause = self._num_left = 0  # steps

    def open(self, item: RowOpen) -> None:
        """A row opens. A fork has the answer of its parent."""
        parent = None if item.fork_of_row is None else self.in_use.get(item.fork_of_row)
        if parent is not None:
            self.in_use[item.row] = OldAnswer(parent.answer, parent.index)
        elif len(item.draft_token_ids):
            self.in_use[item.row] = OldAnswer(item.draft_token_ids)
        self._pause = self._num_left = 0

    def rest(self) -> bool:
        """Whether to look at no answer after this step: the last looks found nothing."""
        self._num_left -= 1
        return self._num_left >= 0

    def propose(self, rows: I64, counts: I64, others: Callable[[I64, I64], list[list[int]]] | None) -> list[list[int]]:
        """For each row, up to so many tokens that may follow its known tokens. Those without drafts from an answer have
        those of `others`, which is called after each step: a head makes the entries of all rows then."""
        found = [self._propose(row, most) for row, most in zip(rows.tolist(), counts.tolist(), strict=True)]
        self._num_left = self._pause = 0 if any(found) else min(2 * self._pause + 1, MAX_PAUSE)
        left = [i for i, drafts in enumerate(found) if not drafts]
        if others is not None:
            for i, drafts in zip(left, others(rows[left], counts[left]), strict=True):
                found[i] = drafts
        return found

    def _propose(self, row: int, most: int) -> list[int]:
        answer = self.in_use.get(row)
        return [] if answer is None else answer.propose(self._rows.history(row)[1], most)
