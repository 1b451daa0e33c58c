"""Log probabilities on the device, as `engine/logprobs.py` specifies them, and their copy to the host.

Exponentials are added as integer multiples of 2^-40, so the order does not change the sum. All other operations are
element-wise, maxima or counts. With tensor parallelism each rank reads its part of the vocabulary; maxima, sums
and the best k ids of all ranks are combined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.engine.backend import I64, TopLogprobs
from worker_svc.engine.batch import Bools, LogprobColumns, PromptLogprobs
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.logprobs import Asked, PromptTargets, concat_columns, spread, to_columns

LINES = 16  # rows of logits at once: their temporaries take 30 bytes per logit
MASS_UNIT = 2.0**40
LOW_32 = 0xFFFFFFFF
MAX_INT32 = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class WantedScores:
    """The log probabilities that a step must compute."""

    asked: Asked | None  # among the rows that sample
    targets: PromptTargets | None


class HostScores:
    """Scores of n tokens in host memory, valid once the step's event has fired."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        """`parts`: values float32 [n, 1 + k], ids int64 [n, 1 + k], ranks int64 [n], faults bool [n]."""
        is_cuda = parts[0].device.type == "cuda"
        self._parts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=is_cuda) for part in parts]
        for host, part in zip(self._parts, parts, strict=True):
            host.copy_(part, non_blocking=True)

    def read(self) -> TopLogprobs:
        values, ids, ranks, is_bad = (part.numpy() for part in self._parts)
        return TopLogprobs(values, ids.astype(np.uint32), ranks.astype(np.uint32), is_bad)


@dataclass(frozen=True, slots=True)
class StepScores:
    """The log probabilities of a launched step."""

    wanted: WantedScores
    sampled: HostScores | None
    prompt: list[HostScores]

    def columns_of(self, is_good: Bools) -> LogprobColumns | None:
        """Columns of the good rows among the rows that sampled."""
        asked = self.wanted.asked
        if asked is None or self.sampled is None:
            return None
        columns = to_columns(self.sampled.read(), asked.num_top)
        return spread(columns, asked.lines, len(is_good)).select(is_good)

    def prompt_columns(self) -> tuple[PromptLogprobs | None, I64]:
        """The prompt tokens of good rows, and the rows with NaN, +inf or no finite number."""
        targets = self.wanted.targets
        if targets is None:
            return None, np.empty(0, np.int64)
        parts = [part.read() for part in self.prompt]
        is_bad = np.concatenate([part.is_bad for part in parts])
        ends = np.cumsum([len(part.ranks) for part in parts])
        num_top = np.split(targets.num_top, ends[:-1])
        columns = concat_columns([to_columns(part, top) for part, top in zip(parts, num_top, strict=True)])
        bad_rows = np.unique(targets.rows[is_bad])
        is_kept = ~np.isin(targets.rows, bad_rows)
        rows, positions = targets.rows[is_kept].astype(np.uint32), targets.positions[is_kept].astype(np.uint32)
        return PromptLogprobs(rows, positions, columns.select(is_kept)), bad_rows


class Scorer:
    """Computes log probabilities from logits of this rank's part of the vocabulary."""

    def __init__(self, vocab: range, group: Group, device: torch.device) -> None:
        self._first = vocab.start
        self._group = group
        self._device = device
        self._ids = LOW_32 - torch.arange(vocab.start, vocab.stop, device=device)

    def upload(self, values: I64) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values, np.int64))
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def sampled(self, raw: torch.Tensor, asked: Asked, tokens: torch.Tensor) -> HostScores:
        """`raw` [n, part] are the model's logits of the asking rows, `tokens` int32 [S] of all rows that sampled."""
        chosen = tokens.index_select(0, self.upload(asked.lines)).long()
        return HostScores(self._score(raw, chosen, int(asked.num_top.max())))

    def prompt(
        self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], targets: PromptTargets
    ) -> list[HostScores]:
        """Scores prompt tokens from the hidden states [n, dim] before them, a few logits at a time."""
        chosen, num_top = self.upload(targets.token_ids.astype(np.int64)), int(targets.num_top.max())
        parts = [
            self._score(head(hidden[first : first + LINES]), chosen[first : first + LINES], num_top)
            for first in range(0, len(hidden), LINES)
        ]
        return [HostScores([torch.cat(columns) for columns in zip(*parts, strict=True)])]

    def _score(self, logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[torch.Tensor]:
        slices = [
            self._score_slice(logits[first : first + LINES].float(), chosen[first : first + LINES, None], num_top)
            for first in range(0, len(logits), LINES)
        ]
        return [torch.cat(columns) for columns in zip(*slices, strict=True)]

    def _score_slice(self, x: torch.Tensor, chosen: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
        """x [n, part] float32, chosen [n, 1]. Values and ids [n, 1 + num_top], ranks [n], faults [n]."""
        group = self._group
        is_bad = group.all_reduce_max((x.isnan() | (x == torch.inf)).any(1, keepdim=True).int()) > 0
        x = x.masked_fill(is_bad, 0.0)
        top = group.all_reduce_max(x.amax(1, keepdim=True))
        is_bad |= top == -torch.inf
        top = top.masked_fill(is_bad, 0.0)
        local = chosen - self._first
        is_here = (local >= 0) & (local < x.shape[1])
        own = x.gather(1, local.clamp(0, x.shape[1] - 1)).masked_fill(~is_here, -torch.inf)
        own = group.all_reduce_max(own)
        mass = group.all_reduce(((x - top).exp().double() * MASS_UNIT).round().long().sum(1, keepdim=True))
        ranks = 1 + group.all_reduce((x > own).sum(1))
        best = self._best(x, num_top)
        values = torch.cat((own, _from_order(best >> 32)), 1)
        ids = torch.cat((chosen, LOW_32 - (best & LOW_32)), 1)
        logprobs = ((values - top).double() - (mass.double() / MASS_UNIT).log()).float()
        return logprobs.masked_fill(is_bad, torch.nan), ids, ranks, is_bad[:, 0]

    def _best(self, x: torch.Tensor, num_top: int) -> torch.Tensor:
        """Keys [n, num_top] of the largest logits in descending order; ties by lowest id."""
        keys = (_to_order(x) << 32) | self._ids
        best = keys.topk(min(num_top, keys.shape[1]), 1).values
        if self._group.size == 1:
            return best
        missing = best.new_full((len(best), num_top - best.shape[1]), torch.iinfo(torch.int64).min)
        gathered = self._group.all_gather(torch.cat((best, missing), 1))
        return gathered.movedim(0, 1).flatten(1).topk(num_top, 1).values


def _to_order(x: torch.Tensor) -> torch.Tensor:
    """float32 as integers in the same order; -0.0 equals 0.0."""
    bits = (x + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, bits ^ MAX_INT32, bits)


def _from_order(order: torch.Tensor) -> torch.Tensor:
    return torch.where(order < 0, order ^ MAX_INT32, order).int().view(torch.float32)
