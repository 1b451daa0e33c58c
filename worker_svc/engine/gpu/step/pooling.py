"""Pooled rows on the device: their vectors from hidden states, then the dense layers or the head of the model.

A mean is a sum of integers, multiples of a power of two, so neither the order of the additions nor the chunks of a
prompt change it. The final norm limits the size of a hidden state, so no sum overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from step_protocol.columns import I64
from step_protocol.types import PoolingKind, PoolingTask, RowErrorCode
from worker_svc.engine.backend import Linear, Norm
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import Determinism
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.gpu.layers.linears import DeviceLinears
from worker_svc.engine.gpu.step.device_step import DevicePart, DeviceStep, Head, StepResults
from worker_svc.engine.gpu.step.logprobs import Scorer
from worker_svc.engine.gpu.uploads import to_device, to_host
from worker_svc.engine.pooling.config import PoolingConfig
from worker_svc.engine.pooling.pooling import (
    NOT_FINITE,
    PooledChunk,
    PoolingTable,
    hidden_tokens,
    logit_tokens,
    numbers_of,
    to_columns,
)
from worker_svc.engine.pooling.weights import PoolingWeights, load_pooling

TOKENS_AT_ONCE = 1024  # hidden states that become integers at a time: 24 bytes per number
SUM_BITS = 61  # of the largest sum


class _PlacedLinears:
    """Makes float32 linear layers of the device from tensors in host memory."""

    copies_weights = False

    def __init__(self, determinism: Determinism, device: torch.device) -> None:
        self._linears = DeviceLinears(determinism, torch.float32)
        self._device = device

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._linears.make_linear(weight.to(self._device), None if bias is None else bias.to(self._device))


def load_device_pooling(
    checkpoint: Checkpoint, settings: PoolingConfig, model: ModelConfig, determinism: Determinism, device: torch.device
) -> PoolingWeights:
    """The layers after the pooling. Every rank has all of them. Raises CheckpointError."""
    return load_pooling(
        checkpoint, settings, model.classes(settings.num_classes), _PlacedLinears(determinism, device),
        sizes=(model.hidden_size, model.vocab_size), generates=model.head == "tokens",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostPooled:
    """The numbers of the rows that a step completes, in host memory; valid once the step's event has fired."""

    weights: PoolingWeights
    parts: list[tuple[Sequence[PooledChunk], torch.Tensor]]  # rows, and the outputs [n, out] of their layers

    def read(self, results: StepResults) -> None:
        """The numbers of good rows. A row whose numbers are not finite fails."""
        found = []
        for chunks, values in self.parts:
            for chunk, line in zip(chunks, values.numpy(), strict=True):
                found.append((chunk.row, self.weights.finished(chunk.pooling, line)))
        numbers, bad_rows = to_columns(found)
        results.output.add(numbers)
        for row in bad_rows:
            results.errors.add(row, NOT_FINITE, RowErrorCode.NAN)


class DevicePooling(DevicePart):
    """Computes the numbers of pooled rows. Owns the sums of rows whose prompts are computed in several steps."""

    def __init__(
        self, weights: PoolingWeights, final_norm: Norm, max_tokens: int, max_rows: int, scorer: Scorer
    ) -> None:
        """`max_tokens`: of a prompt of this model, on every worker."""
        self._weights = weights
        self._scorer = scorer
        self._device = final_norm.weight.device
        self._scale = 2.0 ** (SUM_BITS - math.ceil(math.log2(_largest_state(final_norm) * max_tokens)))
        # One more column: the number of states that are not finite
        self._sums = torch.zeros(max_rows, len(final_norm.weight) + 1, dtype=torch.int64, device=self._device)

    def serve(self, table: PoolingTable, prompt_lens: I64) -> DevicePooling:
        """Computes the numbers of these rows from now on. `prompt_lens`: of all rows."""
        self._table, self.in_use, self._prompt_lens = table, table.in_use, prompt_lens
        return self

    def before(self, step: DeviceStep) -> None:
        plan = step.plan
        chunks = self._table.chunks(plan.rows, plan.starts, plan.context_lens, plan.ends, self._prompt_lens)
        hidden, logits = hidden_tokens(chunks), logit_tokens(chunks)
        if len(hidden) or any(chunk.is_last for chunk in chunks):
            step.states.append((np.append(hidden, logits), partial(self._compute, step, chunks)))

    def _compute(self, step: DeviceStep, pooled: Sequence[PooledChunk], states: torch.Tensor, head: Head) -> None:
        """Launches the rest of a step. `states`: the hidden states of `hidden_tokens`, then those of `logit_tokens`."""
        chunks, vectors = self._vectors(pooled, states)
        parts: list[tuple[Sequence[PooledChunk], torch.Tensor]] = []
        for task in (PoolingTask.VECTOR, PoolingTask.CLASSES):
            lines = np.array([i for i, chunk in enumerate(chunks) if chunk.pooling.task is task], np.int64)
            if len(lines):
                of_task = vectors.index_select(0, to_device(lines, self._device))
                parts.append(([chunks[i] for i in lines.tolist()], to_host(self._weights.layers(task, of_task))))
        answering = [c for c in pooled if c.is_last and c.pooling.task is PoolingTask.LOGITS]
        if answering:
            ids = [chunk.pooling.token_ids.astype(np.int64) for chunk in answering]
            parts.append((answering, to_host(self._scorer.logits_of(states[-len(answering) :], head, ids))))
        step.reads.append(HostPooled(self._weights, parts).read)

    def warm_up(self, states: torch.Tensor) -> None:
        """Launches everything that a pooled row may need, with these hidden states [n, hidden_size]."""
        rows = to_device(np.zeros(len(states), np.int64), self._device)
        self._add(states, rows)
        vectors = self._means(rows[:1], np.ones(1, np.int64))
        for task in (PoolingTask.VECTOR, PoolingTask.CLASSES):
            self._weights.layers(task, vectors)

    def _vectors(self, pooled: Sequence[PooledChunk], states: torch.Tensor) -> tuple[list[PooledChunk], torch.Tensor]:
        """The rows that the step completes and that return no logits, and their vectors, float32 [n, hidden_size]."""
        last: list[PooledChunk] = []
        last_lines: list[int] = []
        complete: list[PooledChunk] = []
        summed: list[tuple[PooledChunk, range]] = []
        first = 0
        for chunk in pooled:
            lines = range(first, first + len(chunk.hidden_tokens()))
            first = lines.stop
            if chunk.pooling.task is PoolingTask.LOGITS:
                continue
            if chunk.kind is PoolingKind.LAST:
                last += [chunk] if chunk.is_last else []
                last_lines += lines
                continue
            summed.append((chunk, lines))
            complete += [chunk] if chunk.is_last else []
        found = states.index_select(0, to_device(np.array(last_lines, np.int64), self._device)).float()
        if summed:
            self._add_chunks(states, summed)
        if complete:
            rows = to_device(np.array([chunk.row for chunk in complete], np.int64), self._device)
            counts = np.array([c.num_tokens if c.kind is PoolingKind.MEAN else 1 for c in complete], np.int64)
            found = torch.cat((found, self._means(rows, counts)))
        return [*last, *complete], found

    def _add_chunks(self, states: torch.Tensor, summed: list[tuple[PooledChunk, range]]) -> None:
        begun = np.array([chunk.row for chunk, _ in summed if chunk.is_first], np.int64)
        self._sums.index_fill_(0, to_device(begun, self._device), 0)
        lines = to_device(numbers_of([of_row for _, of_row in summed]), self._device)
        sizes = [len(of_row) for _, of_row in summed]
        rows = np.repeat(np.array([chunk.row for chunk, _ in summed], np.int64), sizes)
        self._add(states.index_select(0, lines), to_device(rows, self._device))

    def _add(self, states: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds each of the states [n, hidden_size] to the sum of its row."""
        for first in range(0, len(states), TOKENS_AT_ONCE):
            wide = states[first : first + TOKENS_AT_ONCE].double()
            is_bad = ~wide.isfinite().all(1, keepdim=True)
            steps = wide.masked_fill_(is_bad, 0.0).mul_(self._scale).round_().long()
            self._sums.index_add_(0, rows[first : first + TOKENS_AT_ONCE], torch.cat((steps, is_bad.long()), 1))

    def _means(self, rows: torch.Tensor, counts: I64) -> torch.Tensor:
        """The sums of some rows divided by `counts`; NaN if a state was not finite."""
        found = self._sums.index_select(0, rows)
        divisors = to_device(counts, self._device)[:, None] * self._scale
        return (found[:, :-1].double() / divisors).float().masked_fill_(found[:, -1:] > 0, torch.nan)


def _largest_state(norm: Norm) -> float:
    """No number of a normed vector is larger: before its weight, a vector of n numbers has the length sqrt(n)."""
    weight = norm.weight.double().abs().amax() + (norm.kind == "rms_offset")
    bias = 0.0 if norm.bias is None else norm.bias.double().abs().amax()
    found = float(math.sqrt(len(norm.weight)) * weight + bias)
    return max(found, 1.0) if math.isfinite(found) else 1.0  # then every state is NaN and none is added
