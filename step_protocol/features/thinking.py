"""Thinking budgets: which token must follow the output of a row whose reasoning is too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from request_fields.fields import MAX_UINT32
from step_protocol.columns import U32

START_WITHIN = 4  # tokens, such as white space, in front of the start marker of reasoning
MAX_DELAY = 8  # tokens after which a grammar allows the end of reasoning: the rest of a character


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Ends the reasoning of a row after `num_tokens` tokens. A function of the output alone."""

    num_tokens: int
    start_ids: U32  # reasoning begins behind these ids in a row; empty: with the output
    end_ids: U32  # each ends reasoning
    last_ids: U32  # forced before the first of `end_ids`
    repeats: bool  # reasoning begins anywhere, and again; else behind at most START_WITHIN tokens, once

    @property
    def positions(self) -> range:
        """Output positions of which one may be forced."""
        last = self.num_tokens + START_WITHIN + len(self.start_ids) + len(self.last_ids) + MAX_DELAY
        return range(self.num_tokens, MAX_UINT32 if self.repeats else last + 1)

    def forced_id(self, output: U32) -> int | None:
        """The token that must follow the output; None: any."""
        if len(output) not in self.positions:
            return None
        at, num_left = self._begin(output, 0), self.num_tokens
        while at is not None:
            ends = np.flatnonzero(np.isin(output[at:], self.end_ids))
            if not len(ends):
                border = at + num_left
                return None if len(output) < border else self._closing_id(output[max(border, 0) :], num_left)
            end = at + int(ends[0])
            num_left -= end - at
            at = self._begin(output, end + 1) if self.repeats else None
        return None

    def _closing_id(self, over: U32, num_left: int) -> int:
        """The token behind the tokens `over` the budget: those of a grammar that allowed no end in the middle of a
        character, and some of `last_ids`. Reasoning that begins again behind the budget has no `last_ids`."""
        size = len(self.last_ids)
        known = next(k for k in range(min(size, len(over)), -1, -1) if not k or _is_end(over, self.last_ids[:k]))
        return int(self.end_ids[0] if known == size or num_left < 0 else self.last_ids[known])

    def _begin(self, output: U32, first: int) -> int | None:
        """Where reasoning begins at or after an index."""
        size = len(self.start_ids)
        if not size:
            return None if first else 0
        end = len(output) if self.repeats else START_WITHIN + size
        for i in np.flatnonzero(output[first:end] == self.start_ids[0]).tolist():
            if np.array_equal(output[first + i : first + i + size], self.start_ids):
                return first + i + size
        return None


def _is_end(tokens: U32, end: U32) -> bool:
    return np.array_equal(tokens[len(tokens) - len(end) :], end)
