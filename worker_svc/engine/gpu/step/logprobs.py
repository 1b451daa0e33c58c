"""Log probabilities and candidates of beams on the device, as rows/logprobs.py and rows/beams.py specify them.

Exponentials are added as integer multiples of 2^-40, so the order does not change the sum. All other operations are
element-wise, maxima or counts. With tensor parallelism each rank reads its part of the vocabulary; maxima, sums
and the best k ids of all ranks are combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from step_protocol.columns import I64
from step_protocol.features import BeamCandidates
from step_protocol.types import RowErrorCode
from worker_svc.engine.backend import TopLogprobs
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.step.device_step import DeviceLogits, DevicePart, DeviceStep, Head, StepResults
from worker_svc.engine.gpu.uploads import to_device, to_host
from worker_svc.engine.rows.beams import BeamLines, BeamTable
from worker_svc.engine.rows.logprobs import LogprobRows, LogprobTable, PromptTargets, spread, to_columns
from worker_svc.engine.step import NOTHING_TO_SAMPLE

LINES = 16  # rows of logits at once: their temporaries take 30 bytes per logit
MASS_UNIT = 2.0**40
LOW_32 = 0xFFFFFFFF
MAX_INT32 = 0x7FFFFFFF


class HostScores:
    """Scores of n tokens in host memory, valid once the step's event has fired."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        """`parts`: values float32 [n, 1 + k], ids int64 [n, 1 + k], ranks int64 [n], faults bool [n]."""
        self._parts = [to_host(part) for part in parts]

    def read(self) -> TopLogprobs:
        values, ids, ranks, is_bad = (part.numpy() for part in self._parts)
        return TopLogprobs(values, ids.astype(np.uint32), ranks.astype(np.uint32), is_bad)


@dataclass(frozen=True, slots=True)
class HostCandidates:
    """Candidates of beams in host memory, valid once the step's event has fired."""

    beams: BeamLines
    values: torch.Tensor  # float32 [P, most candidates]
    ids: torch.Tensor  # int64 [P, most candidates]

    def read(self) -> BeamCandidates:
        is_kept = np.arange(self.values.shape[1]) < self.beams.counts[:, None]
        rows = np.repeat(self.beams.rows, self.beams.counts).astype(np.uint32)
        return BeamCandidates(rows, self.ids.numpy()[is_kept].astype(np.uint32), self.values.numpy()[is_kept])


class Scorer:
    """Computes log probabilities from logits of this rank's part of the vocabulary."""

    def __init__(self, vocab: range, group: Group, device: torch.device) -> None:
        self._first = vocab.start
        self._group = group
        self._device = device
        self._ids = LOW_32 - torch.arange(vocab.start, vocab.stop, device=device)

    def upload(self, values: I64) -> torch.Tensor:
        return to_device(values.astype(np.int64, copy=False), self._device)

    def sampled(self, raw: torch.Tensor, asked: LogprobRows, tokens: torch.Tensor) -> HostScores:
        """`raw` [n, part] are the model's logits of the asking rows, `tokens` int32 [S] of all rows that sampled."""
        chosen = tokens.index_select(0, self.upload(asked.lines)).long()
        return HostScores(self._score(raw, chosen, int(asked.num_top.max())))

    def prompt(self, hidden: torch.Tensor, head: Head, targets: PromptTargets) -> HostScores:
        """Scores prompt tokens from the hidden states [n, dim] before them, a few logits at a time."""
        chosen, num_top = self.upload(targets.token_ids.astype(np.int64)), int(targets.num_top.max())
        parts = [
            self._score(head(hidden[first : first + LINES]), chosen[first : first + LINES], num_top)
            for first in range(0, len(hidden), LINES)
        ]
        return HostScores([torch.cat(columns) for columns in zip(*parts, strict=True)])

    def logits_of(self, hidden: torch.Tensor, head: Head, token_ids: Sequence[I64]) -> torch.Tensor:
        """The logits of some ids of each of the hidden states [n, dim], float32 [n, most ids]. The rest of a line has
        no meaning. NaN becomes +inf, because a maximum over ranks may lose it."""
        ids = np.zeros((len(token_ids), max(map(len, token_ids))), np.int64)
        for line, of_line in zip(ids, token_ids, strict=True):
            line[: len(of_line)] = of_line
        chosen = self.upload(ids)
        parts = [
            self._own(head(hidden[first : first + LINES]).float(), chosen[first : first + LINES])
            for first in range(0, len(hidden), LINES)
        ]
        found = torch.cat(parts)
        return self._group.all_reduce_max(found.masked_fill_(found.isnan(), torch.inf))

    def _own(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The logits of `ids` [n, k] in this rank's part x [n, part]; -inf for ids of other ranks."""
        local = ids - self._first
        is_here = (local >= 0) & (local < x.shape[1])
        return x.gather(1, local.clamp(0, x.shape[1] - 1)).masked_fill_(~is_here, -torch.inf)

    def _score(self, logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[torch.Tensor]:
        slices = [
            self._score_slice(logits[first : first + LINES].float(), chosen[first : first + LINES, None], num_top)
            for first in range(0, len(logits), LINES)
        ]
        return [torch.cat(columns) for columns in zip(*slices, strict=True)]

    def _score_slice(self, x: torch.Tensor, chosen: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
        """x [n, part] float32, chosen [n, 1]. Values and ids [n, 1 + num_top], ranks [n], faults [n]."""
        group = self._group
        x, top, log_mass, is_bad = self._totals(x)
        own = group.all_reduce_max(self._own(x, chosen))
        ranks = 1 + group.all_reduce((x > own).sum(1))
        best_values, best_ids = self._best(x, num_top)
        values, ids = torch.cat((own, best_values), 1), torch.cat((chosen, best_ids), 1)
        logprobs = ((values - top).double() - log_mass).float()
        return logprobs.masked_fill(is_bad, torch.nan), ids, ranks, is_bad[:, 0]

    def _totals(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For x [n, part] float32: x with zeros in bad rows, and [n, 1] the maximum, the logarithm of the sum of
        exp(x - maximum), float64, and whether a row is bad: it has NaN, +inf or no finite number."""
        group = self._group
        is_bad = group.all_reduce_max((x.isnan() | (x == torch.inf)).any(1, keepdim=True).int()) > 0
        x = x.masked_fill(is_bad, 0.0)
        top = group.all_reduce_max(x.amax(1, keepdim=True))
        is_bad |= top == -torch.inf
        top = top.masked_fill(is_bad, 0.0)
        mass = group.all_reduce(((x - top).exp().double() * MASS_UNIT).round().long().sum(1, keepdim=True))
        return x, top, (mass.double() / MASS_UNIT).log(), is_bad

    def _best(self, x: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logits [n, num_top] in descending order, and their ids; ties by lowest id."""
        keys = (_to_order(x) << 32) | self._ids
        best = keys.topk(min(num_top, keys.shape[1]), 1).values
        if self._group.size > 1:
            missing = best.new_full((len(best), num_top - best.shape[1]), torch.iinfo(torch.int64).min)
            gathered = self._group.all_gather(torch.cat((best, missing), 1))
            best = gathered.movedim(0, 1).flatten(1).topk(num_top, 1).values
        return _from_order(best >> 32), LOW_32 - (best & LOW_32)

    def take_log_softmax(self, logits: torch.Tensor, lines: I64) -> torch.Tensor:
        """The logits [S, part] in float32, of which those of `lines` are replaced by their log-softmax. A bad row gets
        NaN."""
        wide, index = logits.float(), self.upload(lines)
        for part in torch.split(index, LINES):
            x, top, log_mass, is_bad = self._totals(wide.index_select(0, part))
            logprobs = ((x - top).double() - log_mass).float()
            wide.index_copy_(0, part, logprobs.masked_fill_(is_bad, torch.nan))
        return wide

    def warm_up(self, num_rows: int) -> None:
        """Launches what a beam needs beside other steps."""
        beam = BeamLines(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
        logits = torch.zeros(num_rows, len(self._ids), device=self._device)
        self.candidates(self.take_log_softmax(logits, beam.lines), beam)

    def candidates(self, logprobs: torch.Tensor, beams: BeamLines) -> HostCandidates:
        """The best ids of beams, from their processed log probabilities among float32 [S, part]."""
        most = int(beams.counts.max())
        lines = torch.split(self.upload(beams.lines), LINES)
        parts = [self._best(logprobs.index_select(0, part), most) for part in lines]
        values, ids = (to_host(torch.cat(columns)) for columns in zip(*parts, strict=True))
        return HostCandidates(beams, values, ids)


class DeviceSampledScores(DevicePart):
    """Log probabilities of sampled tokens. Comes before the parts that change logits: it keeps those of the model."""

    def __init__(self, table: LogprobTable, scorer: Scorer) -> None:
        self._table, self.in_use, self._scorer = table, table.sampled_rows, scorer

    def before(self, step: DeviceStep) -> None:
        self._asked = self._table.asked(step.plan.sampling_rows)
        step.ends_at_logits |= self._asked is not None

    def process(self, step: DeviceStep, logits: DeviceLogits) -> None:
        if self._asked is not None:
            self._raw = logits.values.index_select(0, self._scorer.upload(self._asked.lines))

    def sampled(self, step: DeviceStep, logits: DeviceLogits, tokens: torch.Tensor) -> None:
        if self._asked is not None:
            step.reads.append(partial(_read_sampled, self._asked, self._scorer.sampled(self._raw, self._asked, tokens)))


def _read_sampled(asked: LogprobRows, scores: HostScores, results: StepResults) -> None:
    columns = spread(to_columns(scores.read(), asked.num_top), asked.lines, len(results.rows))
    results.output.logprobs = columns.select(results.is_good)


class DevicePromptScores(DevicePart):
    """Log probabilities of prompt tokens and of forced tokens."""

    def __init__(self, table: LogprobTable, scorer: Scorer) -> None:
        self._table, self.in_use, self._scorer = table, table.prompt_rows, scorer

    def before(self, step: DeviceStep) -> None:
        targets = self._table.prompt_targets(step.plan.token_rows, step.plan.positions)
        if targets is not None:
            step.states.append((targets.tokens, partial(self._score, step, targets)))

    def _score(self, step: DeviceStep, targets: PromptTargets, states: torch.Tensor, head: Head) -> None:
        step.reads.append(partial(_read_prompt, targets, self._scorer.prompt(states, head, targets)))


def _read_prompt(targets: PromptTargets, scores: HostScores, results: StepResults) -> None:
    """Rows with NaN, +inf or no finite number fail, also if they sample."""
    found = scores.read()
    bad_rows = np.unique(targets.rows[found.is_bad])
    results.is_bad |= results.is_token & np.isin(results.rows, bad_rows)
    for row in bad_rows.tolist():
        results.errors.add(row, NOTHING_TO_SAMPLE, RowErrorCode.NAN)
    results.output.add(targets.to_columns([to_columns(found, targets.num_top)], bad_rows))


class DeviceCandidates(DevicePart):
    """The candidates of beams, from their log-softmax instead of their logits."""

    def __init__(self, table: BeamTable, scorer: Scorer) -> None:
        self._table, self.in_use, self._scorer = table, table.in_use, scorer

    def before(self, step: DeviceStep) -> None:
        self._beams = self._table.lines(step.plan.sampling_rows)
        step.ends_at_logits |= self._beams is not None

    def process(self, step: DeviceStep, logits: DeviceLogits) -> None:
        if self._beams is not None:
            logits.values = self._scorer.take_log_softmax(logits.values, self._beams.lines)

    def sampled(self, step: DeviceStep, logits: DeviceLogits, tokens: torch.Tensor) -> None:
        if self._beams is not None:
            step.reads.append(partial(_read_candidates, self._scorer.candidates(logits.values, self._beams)))


def _read_candidates(candidates: HostCandidates, results: StepResults) -> None:
    results.output.add(candidates.read().without(results.rows[results.is_bad]))


def _to_order(x: torch.Tensor) -> torch.Tensor:
    """float32 as integers in the same order; -0.0 equals 0.0."""
    bits = (x + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, bits ^ MAX_INT32, bits)


def _from_order(order: torch.Tensor) -> torch.Tensor:
    return torch.where(order < 0, order ^ MAX_INT32, order).int().view(torch.float32)
