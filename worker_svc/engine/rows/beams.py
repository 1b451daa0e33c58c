"""Beams among the open rows, and their candidates: the most likely continuations, by the log-softmax of the logits.

As in transformers, the log-softmax is computed first. processors.py then applies to its values what it applies to the
logits of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from step_protocol.columns import F32, I64, U32, Bools
from step_protocol.features import BeamCandidates, BeamMoves
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.row_part import SomeRows
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.step import Logits, RowErrors, Sampled, Step, StepPart

if TYPE_CHECKING:
    import torch  # rows use these types even if torch is not installed


@dataclass(frozen=True, slots=True)
class BeamLines:
    """The beams among the S rows of logits of a step."""

    lines: I64  # [P] indices into the logits
    rows: I64  # [P]
    counts: I64  # [P] number of candidates of each


class BeamTable(SomeRows[int], StepPart):
    """The beams among the open rows: the number of candidates of each."""

    def __init__(self, rows: OpenRows) -> None:
        super().__init__()
        self._rows = rows

    def refusal(self, item: RowOpen) -> str | None:
        if item.num_candidates <= self._rows.vocab_size:
            return None
        return f"num_candidates is {item.num_candidates}, expected at most the vocabulary size {self._rows.vocab_size}"

    def _state_of(self, item: RowOpen) -> int | None:
        return item.num_candidates or None

    def apply(self, batch: StepBatch, errors: RowErrors) -> None:
        """Lets beams continue other beams. An invalid row fails and is closed."""
        moves = batch.part(BeamMoves)
        if moves is None:
            return
        rows, parents, token_ids = moves.rows, moves.parents, moves.tokens
        is_good = self._are_beams(rows) & self._are_beams(parents) & (token_ids < self._rows.vocab_size)
        for row in rows[~is_good].tolist():
            self._rows.fail(
                row, "the row or its parent is not an open beam, or the beam's token is not in the vocabulary", errors
            )
        if is_good.any():
            sources, targets = parents[is_good].astype(np.int64), rows[is_good].astype(np.int64)
            self._rows.continue_from(sources, targets, token_ids[is_good])

    def _are_beams(self, rows: U32) -> Bools:
        return np.array([row in self.in_use and bool(self._rows.is_open[row]) for row in rows.tolist()], np.bool_)

    def lines(self, rows: I64) -> BeamLines | None:
        """The beams among the sampling rows of a step; None if there are none."""
        if not self.in_use:
            return None
        counts = np.array([self.in_use.get(row, 0) for row in rows.tolist()], np.int64)
        lines = np.flatnonzero(counts)
        return BeamLines(lines, rows[lines], counts[lines]) if len(lines) else None

    def process(self, step: Step, logits: Logits) -> None:
        if (beams := self.lines(logits.rows)) is not None:
            take_log_softmax(logits.as_float(), beams)

    def sampled(self, step: Step, logits: Logits, found: Sampled) -> None:
        if (beams := self.lines(logits.rows)) is not None:
            step.output.add(best_candidates(logits.values, beams).without(logits.rows[~found.is_good]))


def take_log_softmax(logits: torch.Tensor, beams: BeamLines) -> None:
    """Replaces the float32 logits [S, vocab] of beams by their log-softmax. It is computed row by row, so that the
    rounding does not depend on other rows.
    """
    for line in beams.lines.tolist():
        logits[line] = logits[line].log_softmax(-1)


def best_candidates(logprobs: torch.Tensor, beams: BeamLines) -> BeamCandidates:
    """The candidates of all beams of a step; `logprobs` [S, vocab] float32, processed."""
    counts = zip(beams.lines.tolist(), beams.counts.tolist(), strict=True)
    parts = [_best(logprobs[line], count) for line, count in counts]
    rows = np.repeat(beams.rows, beams.counts).astype(np.uint32)
    return BeamCandidates(rows, np.concatenate([ids for ids, _ in parts]), np.concatenate([best for _, best in parts]))


def _best(logprobs: torch.Tensor, count: int) -> tuple[U32, F32]:
    lowest = logprobs.topk(count).values[-1]
    ids = (~(logprobs < lowest)).nonzero()[:, 0]  # topk chooses any of the ids that are as likely as the last one
    values = logprobs[ids].numpy()
    order = np.lexsort((ids, -values))[:count]
    return ids.numpy()[order].astype(np.uint32), values[order]
