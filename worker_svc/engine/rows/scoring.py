"""Log probabilities in the CPU engine, and what rows may ask for with them. Prompt tokens are scored in slices of
logits, to limit memory.

A forced token is scored by the same functions as a sampled one: its logits are processed and filtered as for sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from step_protocol.columns import I64, U32, U64, Bools
from step_protocol.features import LogprobColumns
from step_protocol.types import RowErrorCode
from worker_svc.engine.backend import Backend, SamplingColumns
from worker_svc.engine.rows.logprobs import LogprobRows, LogprobTable, PromptTargets, spread, to_columns
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.step import NOTHING_TO_SAMPLE, Logits, Sampled, Step, StepPart


class ProcessedLogits(NamedTuple):
    """Logits from which n tokens are drawn, before the filters."""

    logits: torch.Tensor  # [.., vocab]
    lines: I64  # [n]
    columns: SamplingColumns  # of the n tokens


# The processed logits of some of the tokens to score, given as indices.
ProcessedOf = Callable[[I64], ProcessedLogits]


def score(
    backend: Backend,
    logits: torch.Tensor,
    lines: I64,
    token_ids: U32,
    asked: LogprobRows | PromptTargets,
    processed_of: ProcessedOf,
) -> tuple[Bools, LogprobColumns]:
    """Scores n tokens from the rows `lines` of the logits of the model, as their rows ask. Returns those with bad
    logits, too."""
    most_top, extras = int(asked.num_top.max(initial=0)), dict[str, Any]()
    found = backend.logprobs(logits, lines, token_ids, most_top)
    chosen = np.flatnonzero(asked.is_processed)
    if len(chosen):
        extras["num_kept"] = np.zeros(len(lines), np.uint32)
        extras["raw_logprobs"] = found.values[:, 0].copy()
        values, extras["num_kept"][chosen] = backend.filter_logits(*processed_of(chosen))
        processed = backend.logprobs(values, np.arange(len(chosen)), token_ids[chosen], most_top)
        for name in ("values", "token_ids", "ranks", "is_bad"):
            getattr(found, name)[chosen] = getattr(processed, name)
    if asked.has_digest.any():
        extras["logits_digests"] = _digests(logits, lines, asked.has_digest)
    return found.is_bad, to_columns(found, asked.num_top, extras)


def _digests(logits: torch.Tensor, lines: I64, has_digest: Bools) -> U64:
    found = np.zeros(len(lines), np.uint64)
    for i in np.flatnonzero(has_digest):
        values = logits[int(lines[i])].float().numpy()
        found[i] = xxhash.xxh3_64_intdigest(values.astype("<f4", copy=False).data)
    return found


class PromptScores(StepPart):
    """Log probabilities of prompt tokens and of forced tokens. Reads the logits in slices, to limit memory."""

    def __init__(self, table: LogprobTable, rows: OpenRows, processing: Sequence[StepPart]) -> None:
        """`processing`: the parts that process the logits of forced tokens."""
        self._table, self.in_use, self._rows, self._processing = table, table.prompt_rows, rows, processing

    def before(self, step: Step) -> None:
        targets = self._table.prompt_targets(step.plan.token_rows, step.plan.positions)
        if targets is not None:
            step.forward.head_tokens = np.union1d(step.heads, targets.tokens)
            step.read_slices = partial(self._score, targets)

    def _score(self, targets: PromptTargets, step: Step, slices: Iterator[torch.Tensor]) -> torch.Tensor:
        """Keeps the logits of the step's `heads`."""
        tokens, first, logits = step.forward.head_tokens, 0, torch.empty(0)
        parts: list[LogprobColumns] = []
        is_bad: list[Bools] = []
        for part in slices:
            if not first:
                logits = part.new_empty(len(step.heads), part.shape[1])
            here = tokens[first : first + len(part)]
            first += len(part)
            _keep(logits, step.heads, part, here)
            chosen = targets.of(slice(*np.searchsorted(targets.tokens, (here[0], here[-1] + 1))))
            if len(chosen.tokens):
                lines = np.searchsorted(here, chosen.tokens)
                forced = partial(self._forced, step, part, lines, chosen)
                bad, columns = score(step.backend, part, lines, chosen.token_ids, chosen, forced)
                parts.append(columns)
                is_bad.append(bad)
        bad_rows = np.unique(targets.rows[np.concatenate(is_bad)])
        for row in bad_rows.tolist():
            step.errors.add(row, NOTHING_TO_SAMPLE, RowErrorCode.NAN)
        step.output.add(targets.to_columns(parts, bad_rows))
        return logits

    def _forced(
        self, step: Step, part: torch.Tensor, lines: I64, targets: PromptTargets, chosen: I64
    ) -> ProcessedLogits:
        """The processed logits of some of these targets, whose logits are `lines` of `part`."""
        rows, positions = targets.rows[chosen], targets.positions[chosen]
        columns = self._rows.sampling_columns(rows, positions)
        values = part[torch.from_numpy(lines[chosen])].float()
        for i in range(len(rows)):  # the matcher of a row consumes one token after the other
            one = slice(i, i + 1)
            logits = Logits(values[one], rows[one], positions[one], columns.positions[one])
            for processing in self._processing:
                if processing.in_use:
                    processing.process(step, logits)
        return ProcessedLogits(values, np.arange(len(rows)), columns)


def _keep(logits: torch.Tensor, heads: I64, part: torch.Tensor, tokens: I64) -> None:
    is_head = np.isin(tokens, heads)
    if is_head.any():
        lines = np.searchsorted(heads, tokens[is_head])
        logits[torch.from_numpy(lines)] = part[torch.from_numpy(np.flatnonzero(is_head))]


class SampledScores(StepPart):
    """Log probabilities of sampled tokens. Comes before the parts that change logits: it keeps those of the model."""

    def __init__(self, table: LogprobTable, changing: Sequence[StepPart]) -> None:
        """`changing`: the parts that change logits."""
        self._table, self.in_use, self._changing = table, table.sampled_rows, changing
        self._raw: tuple[LogprobRows, torch.Tensor, I64] | None = None  # rows of the step, logits, and their lines

    def process(self, step: Step, logits: Logits) -> None:
        asked = self._table.asked(logits.rows)
        if asked is None:
            self._raw = None
        elif any(part.in_use for part in self._changing):  # in place, so they are copied
            self._raw = asked, logits.values[torch.from_numpy(asked.lines)], np.arange(len(asked.lines))
        else:
            self._raw = asked, logits.values, asked.lines

    def sampled(self, step: Step, logits: Logits, found: Sampled) -> None:
        """Columns of the sampled tokens of good rows."""
        if self._raw is None:
            return
        (asked, raw, lines), columns, self._raw = self._raw, found.columns, None
        is_kept = found.is_good[asked.lines]
        asked, lines = asked.of(is_kept), lines[is_kept]

        def processed_of(chosen: I64) -> ProcessedLogits:
            of = asked.lines[chosen]
            return ProcessedLogits(
                logits.values, of, SamplingColumns(columns.params, columns.rows[of], columns.positions[of])
            )

        _, scores = score(step.backend, raw, lines, found.token_ids[asked.lines], asked, processed_of)
        places = np.cumsum(found.is_good)[asked.lines] - 1
        step.output.logprobs = spread(scores, places, int(found.is_good.sum()))
