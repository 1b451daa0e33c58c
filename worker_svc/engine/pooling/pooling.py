"""Pooled rows: which hidden states they need, and on CPUs the vectors that follow from them.

The chunks of a prompt may be computed in several steps. A mean is then a sum over all of them, which must not depend on
the chunks: on CPUs it is in the order of the tokens and in float64 (gpu/step/pooling.py has the sum of the GPU engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from step_protocol.columns import I64
from step_protocol.features import PooledRows
from step_protocol.messages import RowOpen
from step_protocol.types import Pooling, PoolingKind, PoolingTask, RowErrorCode
from worker_svc.engine.row_part import SomeRows
from worker_svc.engine.step import Step, StepPart

if TYPE_CHECKING:  # simulated workers have no torch
    import torch

    from worker_svc.engine.pooling.weights import PoolingWeights

Vector = npt.NDArray[np.floating[Any]]
F64 = npt.NDArray[np.float64]
MAX_LOGITS = 64  # token ids of one row
NOT_FINITE = "the numbers of this row contain NaN or infinity"


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """The tokens of a pooled row in one step."""

    row: int
    pooling: Pooling
    kind: PoolingKind
    first: int  # index of its first token in the step
    end: int
    is_first: bool  # the step computes the row's first token
    is_last: bool  # the step completes the row's prompt
    num_tokens: int  # counted from the row's first one to the last one in this step

    def hidden_tokens(self) -> range:
        """The tokens whose hidden states the row needs."""
        if self.pooling.task is PoolingTask.LOGITS:
            return range(0)
        if self.kind is PoolingKind.MEAN:
            return range(self.first, self.end)
        if self.kind is PoolingKind.CLS:
            return range(self.first, self.first + self.is_first)
        return range(self.end - self.is_last, self.end)


class PoolingTable(SomeRows[Pooling]):
    """The pooled ones among the open rows."""

    def __init__(self, weights: PoolingWeights | None) -> None:
        """Without `weights`, pooled rows are refused."""
        super().__init__()
        self.weights = weights

    def refusal(self, item: RowOpen) -> str | None:
        """Why this row cannot be opened; None if it can."""
        pooling, weights = item.pooling, self.weights
        if pooling is None:
            return None if weights is None or weights.generates else "this model generates no tokens"
        if weights is None:
            return "this worker's backend does not compute pooled rows"
        if pooling.task is PoolingTask.CLASSES and weights.head is None:
            return "the model has no classification head"
        if pooling.task is PoolingTask.LOGITS:
            return self._logits_refusal(pooling, weights)
        if item.num_computed_tokens and not reads_last_token(weights.kind_of(pooling)):
            return f"num_computed_tokens is {item.num_computed_tokens}, but this pooling needs the states of all tokens"
        if pooling.dimensions > weights.dimensions:
            return f"dimensions is {pooling.dimensions}, expected at most {weights.dimensions}"
        return None

    def _logits_refusal(self, pooling: Pooling, weights: PoolingWeights) -> str | None:
        count = len(pooling.token_ids)
        if not weights.generates:
            return "the model has no logits"
        if not 1 <= count <= MAX_LOGITS:
            return f"token_ids has {count} ids, expected 1 to {MAX_LOGITS}"
        if (highest := int(pooling.token_ids.max())) >= weights.vocab_size:
            return f"token_ids has {highest}, expected ids below the vocabulary size {weights.vocab_size}"
        return None

    def _state_of(self, item: RowOpen) -> Pooling | None:
        return item.pooling

    def chunks(self, rows: I64, starts: I64, context_lens: I64, ends: I64, prompt_lens: I64) -> list[PooledChunk]:
        """The pooled ones among the rows of a step. `prompt_lens`: of all rows of the table."""
        if not self.in_use:
            return []
        found = []
        for i, row in enumerate(rows.tolist()):
            pooling = self.in_use.get(row)
            if pooling is not None:
                is_last = int(ends[i]) == int(prompt_lens[row])
                first, end = int(starts[i]), int(starts[i + 1])
                kind = self.weights.kind_of(pooling) if self.weights is not None else pooling.kind
                found.append(PooledChunk(row, pooling, kind, first, end, not context_lens[i], is_last, int(ends[i])))
        return found


class Pooler(StepPart):
    """The numbers of pooled rows on CPUs, from the states of one or several steps."""

    def __init__(self, table: PoolingTable, prompt_lens: I64) -> None:
        """`prompt_lens`: of all rows."""
        self._table, self.in_use, self._prompt_lens = table, table.in_use, prompt_lens
        self._weights = table.weights
        self._chunks: list[PooledChunk] = []  # pooled rows of the step
        self._sums: dict[int, F64] = {}  # of MEAN; the state of CLS

    def use(self, weights: Any) -> None:
        self._weights = None if weights is None else weights.pooling

    def before(self, step: Step) -> None:
        plan, forward = step.plan, step.forward
        chunks = self._chunks = self._table.chunks(
            plan.rows, plan.starts, plan.context_lens, plan.ends, self._prompt_lens
        )
        if not chunks:
            return
        step.heads = forward.head_tokens = np.union1d(forward.head_tokens, logit_tokens(chunks))
        if forward.hidden_tokens is None:
            forward.hidden_tokens = hidden_tokens(chunks)
        forward.token_types = token_types(chunks, plan.positions)

    def computed(self, step: Step, logits: torch.Tensor) -> None:
        if not self._chunks:
            return
        hidden, wanted = step.model.hidden, hidden_tokens(self._chunks)
        hidden = hidden if len(hidden) == len(wanted) else hidden[wanted]
        numbers, bad_rows = self.numbers(self._chunks, hidden, logits, step.heads)
        step.output.add(numbers)
        for row in bad_rows:
            step.errors.add(row, NOT_FINITE, RowErrorCode.NAN)

    def numbers(
        self, chunks: Sequence[PooledChunk], hidden: torch.Tensor, logits: torch.Tensor, head_tokens: I64
    ) -> tuple[PooledRows | None, list[int]]:
        """The numbers of the rows whose prompts are complete, and the rows without finite ones. `hidden`: the states of
        `hidden_tokens`, in float32. `logits`: those of `head_tokens`, which include `logit_tokens`."""
        found, first = [], 0
        for chunk in chunks:
            if chunk.pooling.task is PoolingTask.LOGITS:
                if chunk.is_last:
                    line = logits[int(np.searchsorted(head_tokens, chunk.end - 1))]
                    found.append((chunk.row, line.float().numpy()[chunk.pooling.token_ids]))
                continue
            count = len(chunk.hidden_tokens())
            vector = self._vector(chunk, hidden[first : first + count])
            first += count
            if vector is not None and self._weights is not None:
                found.append((chunk.row, self._weights.numbers(chunk.pooling, vector.astype(np.float32))))
        return to_columns(found)

    def _vector(self, chunk: PooledChunk, hidden: torch.Tensor) -> Vector | None:
        """The vector [hidden_size] of a row from the hidden states of its `hidden_tokens`, float32 [n, hidden_size], in
        this step, and earlier steps. None: its prompt is not complete."""
        if chunk.kind is PoolingKind.LAST:
            return hidden[0].numpy() if chunk.is_last else None
        total = hidden.numpy().astype(np.float64)
        if not chunk.is_first and chunk.row in self._sums:  # else the row has failed in an earlier step
            total = np.concatenate((self._sums[chunk.row][None], total))
        self._sums[chunk.row] = np.add.reduce(total, axis=0)  # row by row
        if not chunk.is_last:
            return None
        found = self._sums.pop(chunk.row)
        return found / chunk.num_tokens if chunk.kind is PoolingKind.MEAN else found


def reads_last_token(kind: PoolingKind) -> bool:
    """Whether the numbers depend on the state of the last token only."""
    return kind is PoolingKind.LAST


def hidden_tokens(chunks: Sequence[PooledChunk]) -> I64:
    """The tokens of a step whose hidden states pooled rows need, ascending."""
    return numbers_of([chunk.hidden_tokens() for chunk in chunks])


def numbers_of(ranges: Sequence[range]) -> I64:
    """The numbers of all ranges, one after the other."""
    parts = [np.arange(each.start, each.stop) for each in ranges]
    return np.concatenate([np.empty(0, np.int64), *parts])


def logit_tokens(chunks: Sequence[PooledChunk]) -> I64:
    """The tokens of a step whose logits pooled rows need, ascending."""
    wanted = [chunk.end - 1 for chunk in chunks if chunk.is_last and chunk.pooling.task is PoolingTask.LOGITS]
    return np.array(wanted, np.int64)


def token_types(chunks: Sequence[PooledChunk], positions: I64) -> I64 | None:
    """The type of each token of a step, for models with token types: 1 in the second text of a row. None: all are 0."""
    if not any(chunk.pooling.second_text for chunk in chunks):
        return None
    types = np.zeros(len(positions), np.int64)
    for chunk in chunks:
        if second := chunk.pooling.second_text:
            types[chunk.first : chunk.end] = positions[chunk.first : chunk.end] >= second
    return types


def to_columns(found: Sequence[tuple[int, npt.NDArray[np.float32]]]) -> tuple[PooledRows | None, list[int]]:
    """Rows and their numbers as columns, None if there are none; and the rows left out whose numbers are not finite."""
    bad_rows = [row for row, values in found if not np.isfinite(values).all()]
    good = [(row, values) for row, values in found if row not in bad_rows]
    if not good:
        return None, bad_rows
    rows, values = zip(*good, strict=True)
    lens = np.array([len(one) for one in values], np.uint32)
    return PooledRows(np.array(rows, np.uint32), lens, np.concatenate(values)), bad_rows
