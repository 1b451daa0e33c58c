"""Thinking budgets: which token must follow the output of a row whose reasoning is too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from request_fields.fields import MAX_UINT32
from step_protocol.columns import I64, U32

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
        """The token that must follow the output; None: any. The time is bounded by the length of the output, whatever a
        client's ids are: reasoning is at most once between two end ids, behind the first start marker there.
        """
        if len(output) not in self.positions:
            return None
        ends = np.flatnonzero(np.isin(output, self.end_ids))
        first, until = np.append(0, ends + 1), np.append(ends, len(output))
        markers = self._markers(output)
        begins = np.append(markers + len(self.start_ids), len(output) + 1)[np.searchsorted(markers, first)]
        num_left = self.num_tokens - int((until - begins)[:-1][begins[:-1] <= ends].sum())
        border = int(begins[-1]) + num_left
        if max(begins[-1], border) > len(output):
            return None
        return self._closing_id(output[max(border, 0) :], num_left)

    def _closing_id(self, over: U32, num_left: int) -> int:
        """The token behind the tokens `over` the budget: those of a grammar that allowed no end in the middle of a
        character, and some of `last_ids`. Reasoning that begins again behind the budget has no `last_ids`."""
        size = len(self.last_ids)
        known = next(k for k in range(min(size, len(over)), -1, -1) if not k or _is_end(over, self.last_ids[:k]))
        return int(self.end_ids[0] if known == size or num_left < 0 else self.last_ids[known])

    def _markers(self, output: U32) -> I64:
        """Where the start markers begin."""
        if not len(self.start_ids):
            return np.zeros(1, np.int64)
        found = np.ones(max(0, len(output) - len(self.start_ids) + 1), np.bool_)
        for i, id_ in enumerate(self.start_ids):
            found &= output[i : i + len(found)] == id_
        return np.flatnonzero(found) if self.repeats else np.flatnonzero(found[: START_WITHIN + 1])[:1]


def _is_end(tokens: U32, end: U32) -> bool:
    return np.array_equal(tokens[len(tokens) - len(end) :], end)
