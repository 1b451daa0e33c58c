"""Beams: rows that return candidates instead of a sampled token, and that continue as the scheduler chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from step_protocol.columns import EMPTY, F32, I64, NO_FLOATS, U32, AnswerPart, Columns


@dataclass(frozen=True, slots=True)
class BeamMoves(Columns):
    """Beams that get new tokens, all at once. A beam continues the computed tokens of its parent, or of itself."""

    FIELDS = ("beam_rows", "beam_parents", "beam_tokens")

    rows: U32  # [M]
    parents: U32  # [M] rows of the same request
    tokens: U32  # [M] to append


@dataclass(frozen=True, slots=True)
class BeamCandidates(Columns, AnswerPart):
    """Candidates of several rows. Those of one row are adjacent, in descending order; ties by lowest id."""

    FIELDS = ("candidate_rows", "candidate_ids", "candidate_logprobs")
    FLOATS = frozenset({"candidate_logprobs"})

    rows: U32  # [C]
    token_ids: U32  # [C]
    logprobs: F32  # [C]

    def checked(self, vocab_size: int) -> BeamCandidates:
        """The candidates of all rows but those with an invalid candidate, which fail for lack of candidates."""
        is_valid = (self.token_ids < vocab_size) & (self.logprobs < np.inf)  # false for NaN
        return self if is_valid.all() else self.without(self.rows[~is_valid].astype(np.int64))

    def without(self, rows: I64) -> BeamCandidates:
        """The candidates of all other rows."""
        kept = ~np.isin(self.rows, rows)
        return BeamCandidates(self.rows[kept], self.token_ids[kept], self.logprobs[kept])


NO_CANDIDATES = BeamCandidates(EMPTY, EMPTY, NO_FLOATS)
