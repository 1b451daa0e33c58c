"""Candidates of beams: the most likely continuations of a row, by the log-softmax of its logits.

As in transformers, the log-softmax is computed first. processors.py then applies to its values what it applies to the
logits of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from step_protocol.columns import F32, I64, U32
from step_protocol.messages import BeamCandidates

if TYPE_CHECKING:
    import torch  # rows use these types even if torch is not installed


@dataclass(frozen=True, slots=True)
class BeamLines:
    """The beams among the S rows of logits of a step."""

    lines: I64  # [P] indices into the logits
    rows: I64  # [P]
    counts: I64  # [P] number of candidates of each


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
