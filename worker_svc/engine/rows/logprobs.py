"""Log probabilities of sampled and of prompt tokens: the specification, and their columns.

    log probability of id i      (x[i] - max(x)) - log(sum(exp(x - max(x)))) in float32, for the values x of one row
    rank of id i                 1 + number of ids with a greater value
    k most likely ids            by descending value; ties by lowest id

Raw: x are the logits of the model, before bans, penalties and temperature. Processed: x is z of noise.py for the ids
that the filters keep and minus infinity for others, so x is the distribution from which a token is drawn; below a
temperature of 1e-5 the one id that is taken has the value 0. If a chosen token is also among the most likely ones, its
value is the same. `exact_ops.top_logprobs` is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from request_fields.fields import MAX_LOGPROBS
from step_protocol.columns import I64, U32, Bools
from step_protocol.features import LogprobColumns, PromptLogprobs, concat_columns
from step_protocol.messages import RowOpen
from worker_svc.engine.backend import TopLogprobs
from worker_svc.engine.row_part import RowPart

if TYPE_CHECKING:
    from worker_svc.engine.rows.open_rows import OpenRows

NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows of logits that need log probabilities."""

    lines: I64  # [n] rows of the logits
    num_top: I64  # [n] number of most likely tokens of each
    is_processed: Bools  # [n]
    has_digest: Bools  # [n]

    def of(self, chosen: Bools) -> LogprobRows:
        """Some of the n rows."""
        return LogprobRows(*(getattr(self, name)[chosen] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens and forced output tokens whose log probabilities a step computes: each from the logits of the
    token before it."""

    tokens: I64  # [n] ascending indices of the preceding tokens among the tokens of the step
    rows: I64  # [n]
    positions: I64  # [n] of these tokens
    token_ids: U32  # [n]
    num_top: I64  # [n]
    is_processed: Bools  # [n] never true for a prompt token
    has_digest: Bools  # [n]

    def of(self, chosen: slice) -> PromptTargets:
        """Some of the n tokens."""
        return PromptTargets(*(getattr(self, name)[chosen] for name in self.__slots__))

    def to_columns(self, parts: Sequence[LogprobColumns], bad_rows: I64) -> PromptLogprobs:
        """The columns of all n tokens, without those of bad rows."""
        is_kept = ~np.isin(self.rows, bad_rows)
        rows, positions = self.rows[is_kept].astype(np.uint32), self.positions[is_kept].astype(np.uint32)
        return PromptLogprobs(rows, positions, concat_columns(parts).select(is_kept))


class _AskingRows:
    """The number of most likely tokens that each row requests."""

    def __init__(self, num_rows: int) -> None:
        self._num_top: I64 = np.full(num_rows, NOT_ASKED)
        self.in_use: set[int] = set()

    def set(self, row: int, num_top: int | None) -> None:
        self._num_top[row] = NOT_ASKED if num_top is None else num_top
        if num_top is None:
            self.in_use.discard(row)
        else:
            self.in_use.add(row)

    def among(self, rows: I64) -> tuple[I64, I64] | None:
        """Those of `rows` that request log probabilities, and their numbers of tokens; None if there are none."""
        if not self.in_use:
            return None
        num_top = self._num_top[rows]
        lines = np.flatnonzero(num_top != NOT_ASKED)
        return (lines, num_top[lines]) if len(lines) else None


class LogprobTable(RowPart):
    """The log probabilities that each open row requests."""

    def __init__(self, rows: OpenRows, *, are_raw_only: bool = False) -> None:
        """`are_raw_only`: the engine computes neither processed log probabilities nor digests."""
        self._rows, num_rows = rows, rows.max_num_seqs
        self._are_raw_only = are_raw_only
        self._most = min(MAX_LOGPROBS, rows.vocab_size)
        self._is_processed = np.zeros(num_rows, np.bool_)
        self._has_digest = np.zeros(num_rows, np.bool_)
        self._ends: I64 = np.zeros(num_rows, np.int64)  # of the tokens that `prompt_logprobs` covers
        self._sampled = _AskingRows(num_rows)
        self._prompt = _AskingRows(num_rows)
        self.sampled_rows, self.prompt_rows = self._sampled.in_use, self._prompt.in_use
        self.in_use: set[int] = set()

    def refusal(self, item: RowOpen) -> str | None:
        for name, num_top in (("logprobs", item.logprobs), ("prompt_logprobs", item.prompt_logprobs)):
            if num_top is not None and num_top > self._most:
                return f"{name} is {num_top}, expected at most {self._most}"
        if item.num_forced and item.fork_of_row is None and item.prompt_len + item.num_forced > len(item.token_ids):
            return f"num_forced_tokens is {item.num_forced}, but the row has {len(item.token_ids)} tokens"
        if not self._are_raw_only or (item.logprobs is None and item.prompt_logprobs is None):
            return None
        for name, is_set in (("logprobs_mode", item.processed_logprobs), ("logits_digests", item.logits_digests)):
            if is_set:
                return f"{name} is set, but this worker's backend returns raw log probabilities only; leave it unset"
        return None

    def open(self, item: RowOpen) -> None:
        self.in_use.add(item.row)
        self._sampled.set(item.row, item.logprobs)
        self._prompt.set(item.row, item.prompt_logprobs)
        self._is_processed[item.row], self._has_digest[item.row] = item.processed_logprobs, item.logits_digests
        self._ends[item.row] = item.prompt_len + item.num_forced

    def close(self, rows: U32) -> None:
        closed = self.in_use.intersection(rows.tolist())
        for row in closed:
            self._sampled.set(row, None)
            self._prompt.set(row, None)
        self.in_use -= closed

    def reset(self) -> None:
        self.close(np.array(list(self.in_use), np.uint32))

    def asked(self, rows: I64) -> LogprobRows | None:
        """The sampling rows that request log probabilities; None if there are none."""
        found = self._sampled.among(rows)
        if found is None:
            return None
        lines, num_top = found
        return LogprobRows(lines, num_top, self._is_processed[rows[lines]], self._has_digest[rows[lines]])

    def prompt_targets(self, rows: I64, positions: I64) -> PromptTargets | None:
        """The prompt and forced tokens to score, which follow the computed tokens at (row, position); None if there are
        none."""
        asked = self._prompt.among(rows)
        if asked is None:
            return None
        lines, num_top = asked
        is_scored = positions[lines] + 1 < self._ends[rows[lines]]
        found = lines[is_scored]
        if not len(found):
            return None
        rows, targets = rows[found], positions[found] + 1
        is_processed = self._is_processed[rows] & (targets >= self._rows.prompt_lens[rows])
        return PromptTargets(
            found,
            rows,
            targets,
            self._rows.tokens[rows, targets],
            num_top[is_scored],
            is_processed,
            self._has_digest[rows],
        )


def to_columns(found: TopLogprobs, num_top: I64, extras: Mapping[str, Any] = MappingProxyType({})) -> LogprobColumns:
    """Columns of n tokens, of which token i keeps `num_top[i]` of the most likely ids."""
    lens = (num_top + 1).astype(np.uint32)
    if (lens == found.values.shape[1]).all():
        return LogprobColumns(lens, found.values.reshape(-1), found.token_ids.reshape(-1), found.ranks, **extras)
    is_kept = np.arange(found.values.shape[1]) < lens[:, None]
    return LogprobColumns(lens, found.values[is_kept], found.token_ids[is_kept], found.ranks, **extras)


def spread(columns: LogprobColumns, lines: I64, num_tokens: int) -> LogprobColumns:
    """The columns of `num_tokens` tokens: those at `lines` (ascending) have the given entries, the others have none."""
    lens = np.zeros(num_tokens, np.uint32)
    lens[lines] = columns.lens
    return replace(columns, lens=lens)
