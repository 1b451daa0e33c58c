"""Beam search of one request: which beams continue with which tokens, and which sequences are complete.

The rules are those of `generate(num_beams=...)` in transformers:

- All continuations of all beams are ranked by the sum of their log probabilities. The best `width` that do not end
  continue as beams.
- A continuation that ends (EOS, a stop id, the length limit) is complete, but it is kept only if it is among the best
  `width` of all continuations. Its score is its sum / (output tokens, the end included) ** length_penalty. The `width`
  sequences with the best scores are kept.
- `EarlyStopping` says when the search ends. It also ends when no beam can continue.

A beam has at most one continuation per id that ends it. So the best `width` + (number of such ids) continuations of
each beam are enough (`num_candidates`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from request_fields.fields import StopCondition
from request_fields.parameters import BeamParams, EarlyStopping
from scheduler_svc.core.sequence import Completion

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

# Initial score of all beams except the first, of which they are copies. It is below any sum of log probabilities.
REPEATED = -1e9


class Candidates(NamedTuple):
    """The best continuations of one beam, in descending order."""

    token_ids: U32  # [k]
    logprobs: F32  # [k]


class Move(NamedTuple):
    """A beam becomes a continuation of beam `parent`, with this token."""

    parent: int
    token_id: int


class BeamSearch:
    """Owns the scores of the beams and the kept sequences. The tokens of the beams belong to their sequences.

    `put` takes the candidates of each beam. When `is_ready`, `advance` chooses.
    """

    def __init__(self, params: BeamParams, stop: StopCondition, eos_token_ids: frozenset[int]) -> None:
        self.params = params
        self.scores: F32 = np.full(params.width, REPEATED, dtype=np.float32)  # sums of log probabilities
        self.scores[0] = 0.0
        self.hypotheses: list[Completion] = []  # the best first, at most `width`
        self._stop = stop
        self._eos_token_ids = eos_token_ids
        self._candidates: dict[int, Candidates] = {}  # by beam

    @property
    def num_candidates(self) -> int:
        """Number of candidates that each beam needs."""
        ends = self._stop.stop_token_ids.union(() if self._stop.ignore_eos else self._eos_token_ids)
        return self.params.width + len(ends)

    def put(self, beam: int, candidates: Candidates) -> None:
        self._candidates[beam] = candidates

    @property
    def is_ready(self) -> bool:
        """Whether every beam has its candidates."""
        return len(self._candidates) == self.params.width

    def forget_candidates(self) -> None:
        """Drop the candidates before the beams are computed again."""
        self._candidates.clear()

    def advance(self, length: int, tokens_of: Callable[[int], U32]) -> list[Move] | None:
        """Choose the continuations of all beams. Returns one move per beam, or None if the search has ended.

        `length`: output tokens of each continuation. `tokens_of` returns the output tokens of a beam so far.
        """
        token_ids, totals, beams = self._continuations()
        width = self.params.width
        chosen: list[int] = []
        for rank, i in enumerate(np.argsort(-totals, kind="stable").tolist()):
            tokens = np.append(tokens_of(int(beams[i])), token_ids[i])
            end = self._stop.end_of(tokens, self._eos_token_ids)
            if end is None and len(chosen) < width:
                chosen.append(i)
            elif end is not None and rank < width:
                self._keep(Completion(self._score(float(totals[i]), length), float(totals[i]), tokens, end))
            if rank >= width and len(chosen) == width:
                break
        self._candidates.clear()
        if len(chosen) < width or self._is_over(float(totals[chosen[0]]), length):
            return None
        return self._moves(chosen, token_ids, totals, beams)

    def _continuations(self) -> tuple[U32, F32, npt.NDArray[np.int64]]:
        """Token, sum of log probabilities and beam of every continuation."""
        beams = [self._candidates[beam] for beam in range(self.params.width)]
        token_ids = np.concatenate([beam.token_ids for beam in beams])
        totals = np.concatenate([beam.logprobs + score for beam, score in zip(beams, self.scores, strict=True)])
        return token_ids, totals, np.repeat(np.arange(len(beams)), [len(beam.token_ids) for beam in beams])

    def _moves(self, chosen: list[int], token_ids: U32, totals: F32, beams: npt.NDArray[np.int64]) -> list[Move]:
        """One continuation per beam. The best continuation of a beam keeps the beam's index, so that the row keeps
        its blocks.
        """
        placed: dict[int, int] = {}
        for i in chosen:
            placed.setdefault(int(beams[i]), i)
        stays = set(placed.values())
        others = iter([i for i in chosen if i not in stays])
        places = [placed[beam] if beam in placed else next(others) for beam in range(self.params.width)]
        self.scores = totals[places]
        return [Move(int(beams[i]), int(token_ids[i])) for i in places]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)

    def _keep(self, hypothesis: Completion) -> None:
        if hypothesis.logprob <= REPEATED:  # it has a token of probability 0, or is a copy of another beam
            return
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda kept: -kept.score)
        del self.hypotheses[self.params.width :]

    def _is_over(self, best: float, length: int) -> bool:
        """Whether the kept sequences are final. `best`: the largest sum of the running beams."""
        if len(self.hypotheses) < self.params.width:
            return False
        early, penalty = self.params.early_stopping, self.params.length_penalty
        if early is EarlyStopping.TRUE:
            return True
        at_length = self._stop.max_tokens if early is EarlyStopping.NEVER and penalty > 0 else length
        return self._score(best, at_length) <= self.hypotheses[-1].score
