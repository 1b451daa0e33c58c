"""Log probabilities of sampled and of prompt tokens: the specification, and their columns.

    log probability of id i      (x[i] - max(x)) - log(sum(exp(x - max(x)))) in float32, for the logits x of one row
    rank of id i                 1 + number of ids with a greater logit
    k most likely ids            by descending logit; ties by lowest id

The logits are those of the model, before bans, penalties and temperature. If a chosen token is also among the most
likely tokens, its value is the same. `exact_ops.top_logprobs` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from request_fields.fields import MAX_LOGPROBS
from step_protocol.columns import I64, U32
from step_protocol.messages import LogprobColumns, RowOpen
from worker_svc.engine.backend import TopLogprobs

NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows of logits that need log probabilities."""

    lines: I64  # [n] rows of the logits
    num_top: I64  # [n] number of most likely tokens of each


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens whose log probabilities a step computes: each from the logits of the token before it."""

    tokens: I64  # [n] ascending indices of the preceding tokens among the tokens of the step
    rows: I64  # [n]
    positions: I64  # [n] of the prompt tokens
    token_ids: U32  # [n]
    num_top: I64  # [n]


class _AskingRows:
    """The number of most likely tokens that each row requests."""

    def __init__(self, num_rows: int) -> None:
        self._num_top: I64 = np.full(num_rows, NOT_ASKED)
        self._num_asking = 0

    def set(self, row: int, num_top: int | None) -> None:
        self._num_asking += (num_top is not None) - int(self._num_top[row] != NOT_ASKED)
        self._num_top[row] = NOT_ASKED if num_top is None else num_top

    def close(self, rows: U32) -> None:
        """Rows beyond the table are ignored."""
        if not self._num_asking:
            return
        for row in rows.tolist():
            if row < len(self._num_top):
                self.set(row, None)

    def reset(self) -> None:
        self._num_top[:] = NOT_ASKED
        self._num_asking = 0

    def among(self, rows: I64) -> LogprobRows | None:
        """Those of `rows` that request log probabilities; None if there are none."""
        if not self._num_asking:
            return None
        num_top = self._num_top[rows]
        lines = np.flatnonzero(num_top != NOT_ASKED)
        return LogprobRows(lines, num_top[lines]) if len(lines) else None


class LogprobTable:
    """The log probabilities that each open row requests. All its state comes from RowOpen."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._most = min(MAX_LOGPROBS, vocab_size)
        self._sampled = _AskingRows(num_rows)
        self._prompt = _AskingRows(num_rows)

    def refusal(self, item: RowOpen) -> str | None:
        """The error if the row requests too many log probabilities, else None."""
        for name, num_top in (("logprobs", item.logprobs), ("prompt_logprobs", item.prompt_logprobs)):
            if num_top is not None and num_top > self._most:
                return f"{name} is {num_top}, expected at most {self._most}"
        return None

    def open(self, item: RowOpen) -> None:
        """Sets what an opened row requests. Replaces what the row requested before it was opened."""
        self._sampled.set(item.row, item.logprobs)
        self._prompt.set(item.row, item.prompt_logprobs)

    def close(self, rows: U32) -> None:
        self._sampled.close(rows)
        self._prompt.close(rows)

    def reset(self) -> None:
        """Closes all rows."""
        self._sampled.reset()
        self._prompt.reset()

    def asked(self, rows: I64) -> LogprobRows | None:
        """The sampling rows that request log probabilities; None if there are none."""
        return self._sampled.among(rows)

    def prompt_targets(self, rows: I64, positions: I64, prompt_lens: I64, tokens: U32) -> PromptTargets | None:
        """The prompt tokens to score after computing the tokens at (row, position) of a step; None if there are none.

        prompt_lens [num_rows] and tokens [num_rows, width] are of all rows.
        """
        asked = self._prompt.among(rows)
        if asked is None:
            return None
        is_prompt = positions[asked.lines] + 1 < prompt_lens[rows[asked.lines]]
        found = asked.lines[is_prompt]
        if not len(found):
            return None
        rows, targets = rows[found], positions[found] + 1
        return PromptTargets(found, rows, targets, tokens[rows, targets], asked.num_top[is_prompt])


def to_columns(found: TopLogprobs, num_top: I64) -> LogprobColumns:
    """Columns of n tokens, of which token i keeps `num_top[i]` of the most likely ids."""
    lens = (num_top + 1).astype(np.uint32)
    if (lens == found.values.shape[1]).all():
        return LogprobColumns(lens, found.values.reshape(-1), found.token_ids.reshape(-1), found.ranks)
    is_kept = np.arange(found.values.shape[1]) < lens[:, None]
    return LogprobColumns(lens, found.values[is_kept], found.token_ids[is_kept], found.ranks)


def spread(columns: LogprobColumns, lines: I64, num_tokens: int) -> LogprobColumns:
    """The columns of `num_tokens` tokens: those at `lines` (ascending) have the given entries, the others have none."""
    lens = np.zeros(num_tokens, np.uint32)
    lens[lines] = columns.lens
    return LogprobColumns(lens, columns.logprobs, columns.token_ids, columns.ranks)
