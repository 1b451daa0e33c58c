"""What rows may want from a step besides tokens: log probabilities, pooled numbers, candidates of beams."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from step_protocol.columns import I64, Bools
from step_protocol.messages import (
    NO_CANDIDATES,
    BeamCandidates,
    LogprobColumns,
    PooledRows,
    PromptLogprobs,
    concat_columns,
)
from worker_svc.engine.gpu.step.pooling import HostPooled, PooledTokens
from worker_svc.engine.gpu.step.scores import HostCandidates, HostScores
from worker_svc.engine.rows.logprobs import LogprobRows, PromptTargets, spread, to_columns
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.step_checker import CheckedStep
from worker_svc.engine.sampling.beams import BeamLines

NO_TOKENS: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step must compute besides tokens. Such a step ends at its logits."""

    asked: LogprobRows | None = None  # rows that want log probabilities, among those that sample
    targets: PromptTargets | None = None
    pooled: PooledTokens | None = None
    beams: BeamLines | None = None

    @classmethod
    def of(cls, plan: CheckedStep, rows: OpenRows) -> Wanted | None:
        """What the rows of a step want; None if nothing."""
        chunks = rows.pooling.chunks(plan.rows, plan.starts, plan.context_lens, plan.ends, rows.prompt_lens)
        parts = (
            rows.logprobs.asked(plan.sampling_rows),
            rows.prompt_targets(plan.token_rows, plan.positions),
            PooledTokens.of(chunks) if chunks else None,
            rows.beam_lines(plan.sampling_rows),
        )
        return None if all(part is None for part in parts) else cls(*parts)

    @property
    def needs_states(self) -> bool:
        """Whether the step needs hidden states of tokens that are not sampled from."""
        return self.targets is not None or self.pooled is not None

    def state_tokens(self) -> list[I64]:
        """The tokens whose hidden states are needed: for prompt tokens to score, for pooled rows, for their logits."""
        return [
            NO_TOKENS if self.targets is None else self.targets.tokens,
            *((NO_TOKENS, NO_TOKENS) if self.pooled is None else (self.pooled.hidden, self.pooled.logits)),
        ]


@dataclass(slots=True)
class StepExtras:
    """What a launched step computes besides tokens, in host memory; valid once the step's event has fired."""

    wanted: Wanted
    sampled: HostScores | None = None
    prompt: list[HostScores] = field(default_factory=list)
    pooled: HostPooled | None = None
    beams: HostCandidates | None = None

    def logprobs(self, is_good: Bools) -> LogprobColumns | None:
        """Columns of the good rows among the rows that sampled."""
        asked = self.wanted.asked
        if asked is None or self.sampled is None:
            return None
        columns = to_columns(self.sampled.read(), asked.num_top)
        return spread(columns, asked.lines, len(is_good)).select(is_good)

    def prompt_logprobs(self) -> tuple[PromptLogprobs | None, I64]:
        """The prompt tokens of good rows, and the rows with NaN, +inf or no finite number."""
        targets = self.wanted.targets
        if targets is None:
            return None, NO_TOKENS
        parts = [part.read() for part in self.prompt]
        is_bad = np.concatenate([part.is_bad for part in parts])
        ends = np.cumsum([len(part.ranks) for part in parts])
        num_top = np.split(targets.num_top, ends[:-1])
        columns = concat_columns([to_columns(part, top) for part, top in zip(parts, num_top, strict=True)])
        bad_rows = np.unique(targets.rows[is_bad])
        is_kept = ~np.isin(targets.rows, bad_rows)
        rows, positions = targets.rows[is_kept].astype(np.uint32), targets.positions[is_kept].astype(np.uint32)
        return PromptLogprobs(rows, positions, columns.select(is_kept)), bad_rows

    def pooled_rows(self) -> tuple[PooledRows | None, list[int]]:
        """The numbers of good rows, and the rows whose numbers are not finite."""
        return (None, []) if self.pooled is None else self.pooled.read()

    def candidates(self, bad_rows: I64) -> BeamCandidates:
        """The candidates of all beams but the bad ones."""
        return NO_CANDIDATES if self.beams is None else self.beams.read().without(bad_rows)
