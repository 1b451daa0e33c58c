"""Log probabilities in the CPU engine. Prompt tokens are scored in slices of logits, to limit memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import LogprobColumns, PromptLogprobs, concat_columns
from worker_svc.engine.backend import Backend
from worker_svc.engine.rows.logprobs import LogprobRows, PromptTargets, spread, to_columns

LOGITS_AT_ONCE = 64  # rows of logits in memory for prompt tokens: 38 MB if vocab is 150,000


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The logits of the rows that sample, and the log probabilities of prompt tokens."""

    logits: torch.Tensor  # [S, vocab]
    prompt_logprobs: PromptLogprobs
    bad_rows: I64  # rows whose logits have NaN, +inf or no finite number; they have no prompt_logprobs


def heads_with_prompts(heads: I64, targets: PromptTargets) -> I64:
    """The tokens that need logits, ascending: `heads`, which sample, and each token before a prompt token to score."""
    return np.union1d(heads, targets.tokens)


def score_prompts(
    backend: Backend, slices: Iterator[torch.Tensor], heads: I64, targets: PromptTargets
) -> ScoredPrompts:
    """Scores prompt tokens from the slices of the logits of `heads_with_prompts`. Keeps the logits of `heads`."""
    tokens, first, logits = heads_with_prompts(heads, targets), 0, torch.empty(0)
    parts: list[LogprobColumns] = []
    is_bad: list[Bools] = []
    most_top = int(targets.num_top.max())
    for part in slices:
        if not first:
            logits = part.new_empty(len(heads), part.shape[1])
        here = tokens[first : first + len(part)]
        first += len(part)
        _keep(logits, heads, part, here)
        chosen = slice(*np.searchsorted(targets.tokens, (here[0], here[-1] + 1)))
        lines = np.searchsorted(here, targets.tokens[chosen])
        if len(lines):
            found = backend.logprobs(part, lines, targets.token_ids[chosen], most_top)
            parts.append(to_columns(found, targets.num_top[chosen]))
            is_bad.append(found.is_bad)
    bad_rows = np.unique(targets.rows[np.concatenate(is_bad)])
    is_kept = ~np.isin(targets.rows, bad_rows)
    columns = concat_columns(parts).select(is_kept)
    rows, positions = targets.rows[is_kept].astype(np.uint32), targets.positions[is_kept].astype(np.uint32)
    return ScoredPrompts(logits, PromptLogprobs(rows, positions, columns), bad_rows)


def _keep(logits: torch.Tensor, heads: I64, part: torch.Tensor, tokens: I64) -> None:
    is_head = np.isin(tokens, heads)
    if is_head.any():
        lines = np.searchsorted(heads, tokens[is_head])
        logits[torch.from_numpy(lines)] = part[torch.from_numpy(np.flatnonzero(is_head))]


@dataclass(frozen=True, slots=True)
class RawLogits:
    """The logits of the model for the rows that ask for log probabilities, among the S rows that sample."""

    logits: torch.Tensor  # [.., vocab]
    lines: I64  # [n] rows of `logits`
    asked: LogprobRows

    @classmethod
    def of(cls, logits: torch.Tensor, asked: LogprobRows, *, is_changed: bool) -> RawLogits:
        """`logits` [S, vocab]; a copy of the asking rows if `logits` will be changed in place."""
        if not is_changed:
            return cls(logits, asked.lines, asked)
        return cls(logits[torch.from_numpy(asked.lines)], np.arange(len(asked.lines)), asked)


def score_sampled(backend: Backend, raw: RawLogits, token_ids: U32, is_good: Bools) -> LogprobColumns:
    """Columns of the sampled tokens. `token_ids` [S] and `is_good` [S] are of all rows that sampled; the columns have
    the good rows only.
    """
    asked = raw.asked
    is_kept = is_good[asked.lines]
    samplers, num_top = asked.lines[is_kept], asked.num_top[is_kept]
    places = np.cumsum(is_good)[samplers] - 1
    found = backend.logprobs(raw.logits, raw.lines[is_kept], token_ids[samplers], int(num_top.max(initial=0)))
    return spread(to_columns(found, num_top), places, int(is_good.sum()))
