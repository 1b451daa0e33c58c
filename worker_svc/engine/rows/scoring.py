"""Log probabilities in the CPU engine, and what rows may ask for with them. Prompt tokens are scored in slices of
logits, to limit memory.

A forced token is scored by the same functions as a sampled one: its logits are processed and filtered as for sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from step_protocol.columns import I64, U32, U64, Bools
from step_protocol.messages import LogprobColumns, PromptLogprobs, concat_columns
from worker_svc.engine.backend import Backend, SamplingColumns, TopLogprobs
from worker_svc.engine.rows.logprobs import LogprobRows, PromptTargets, spread, to_columns

LOGITS_AT_ONCE = 64  # rows of logits in memory for prompt tokens: 38 MB if vocab is 150,000


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The logits of the rows that sample, and the log probabilities of prompt tokens."""

    logits: torch.Tensor  # [S, vocab]
    prompt_logprobs: PromptLogprobs
    bad_rows: I64  # rows whose logits have NaN, +inf or no finite number; they have no prompt_logprobs


class ProcessedLogits(NamedTuple):
    """Logits from which n tokens are drawn, before the filters."""

    logits: torch.Tensor  # [.., vocab]
    lines: I64  # [n]
    columns: SamplingColumns  # of the n tokens


# The processed logits of some of the tokens to score, given as indices.
ProcessedOf = Callable[[I64], ProcessedLogits]


@dataclass(frozen=True, slots=True)
class ToScore:
    """n tokens, and what their rows ask for."""

    token_ids: U32  # [n]
    num_top: I64  # [n]
    is_processed: Bools  # [n]
    has_digest: Bools  # [n]


def score(
    backend: Backend, logits: torch.Tensor, lines: I64, asked: ToScore, processed_of: ProcessedOf
) -> tuple[TopLogprobs, dict[str, Any]]:
    """Scores n tokens from the rows `lines` of the logits of the model. Returns the extra columns too."""
    most_top, extras = int(asked.num_top.max(initial=0)), dict[str, Any]()
    found = backend.logprobs(logits, lines, asked.token_ids, most_top)
    chosen = np.flatnonzero(asked.is_processed)
    if len(chosen):
        extras["num_kept"] = np.zeros(len(lines), np.uint32)
        extras["raw_logprobs"] = found.values[:, 0].copy()
        values, extras["num_kept"][chosen] = backend.filter_logits(*processed_of(chosen))
        processed = backend.logprobs(values, np.arange(len(chosen)), asked.token_ids[chosen], most_top)
        for name in ("values", "token_ids", "ranks", "is_bad"):
            getattr(found, name)[chosen] = getattr(processed, name)
    if asked.has_digest.any():
        extras["logits_digests"] = _digests(logits, lines, asked.has_digest)
    return found, extras


def _digests(logits: torch.Tensor, lines: I64, has_digest: Bools) -> U64:
    found = np.zeros(len(lines), np.uint64)
    for i in np.flatnonzero(has_digest):
        values = logits[int(lines[i])].float().numpy()
        found[i] = xxhash.xxh3_64_intdigest(values.astype("<f4", copy=False).data)
    return found


def heads_with_prompts(heads: I64, targets: PromptTargets) -> I64:
    """The tokens that need logits, ascending: `heads`, which sample, and each token before a prompt token to score."""
    return np.union1d(heads, targets.tokens)


def score_prompts(
    backend: Backend, slices: Iterator[torch.Tensor], heads: I64, targets: PromptTargets, process: ProcessForced
) -> ScoredPrompts:
    """Scores prompt tokens and forced tokens from the slices of the logits of `heads_with_prompts`. Keeps the logits of
    `heads`."""
    tokens, first, logits = heads_with_prompts(heads, targets), 0, torch.empty(0)
    parts: list[LogprobColumns] = []
    is_bad: list[Bools] = []
    for part in slices:
        if not first:
            logits = part.new_empty(len(heads), part.shape[1])
        here = tokens[first : first + len(part)]
        first += len(part)
        _keep(logits, heads, part, here)
        chosen = slice(*np.searchsorted(targets.tokens, (here[0], here[-1] + 1)))
        lines = np.searchsorted(here, targets.tokens[chosen])
        if len(lines):
            asked = ToScore(
                targets.token_ids[chosen],
                targets.num_top[chosen],
                targets.is_processed[chosen],
                targets.has_digest[chosen],
            )
            forced = _forced(process, part, lines, targets.rows[chosen], targets.positions[chosen])
            found, extras = score(backend, part, lines, asked, forced)
            parts.append(to_columns(found, asked.num_top, extras))
            is_bad.append(found.is_bad)
    bad_rows = np.unique(targets.rows[np.concatenate(is_bad)])
    is_kept = ~np.isin(targets.rows, bad_rows)
    columns = concat_columns(parts).select(is_kept)
    rows, positions = targets.rows[is_kept].astype(np.uint32), targets.positions[is_kept].astype(np.uint32)
    return ScoredPrompts(logits, PromptLogprobs(rows, positions, columns), bad_rows)


# Processes float32 logits [n, vocab] of these rows in place, before the tokens at these sequence positions. Returns the
# sampling parameters of the rows.
ProcessForced = Callable[[torch.Tensor, I64, I64], SamplingColumns]


def _forced(process: ProcessForced, part: torch.Tensor, lines: I64, rows: I64, positions: I64) -> ProcessedOf:
    def processed_of(chosen: I64) -> ProcessedLogits:
        logits = part[torch.from_numpy(lines[chosen])].float()
        return ProcessedLogits(logits, np.arange(len(chosen)), process(logits, rows[chosen], positions[chosen]))

    return processed_of


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


def score_sampled(
    backend: Backend, raw: RawLogits, logits: torch.Tensor, columns: SamplingColumns, token_ids: U32, is_good: Bools
) -> LogprobColumns:
    """Columns of the sampled tokens of good rows. `logits` [S, vocab], processed, `columns`, `token_ids` [S] and
    `is_good` [S] are of all rows that sampled.
    """
    asked = raw.asked
    is_kept = is_good[asked.lines]
    samplers = asked.lines[is_kept]

    def processed_of(chosen: I64) -> ProcessedLogits:
        lines = samplers[chosen]
        return ProcessedLogits(
            logits, lines, SamplingColumns(columns.params, columns.rows[lines], columns.positions[lines])
        )

    to_score = ToScore(
        token_ids[samplers], asked.num_top[is_kept], asked.is_processed[is_kept], asked.has_digest[is_kept]
    )
    found, extras = score(backend, raw.logits, raw.lines[is_kept], to_score, processed_of)
    places = np.cumsum(is_good)[samplers] - 1
    return spread(to_columns(found, to_score.num_top, extras), places, int(is_good.sum()))
