"""Log probabilities as columns. The core does not read them. Steps without them have no extra cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log probabilities of N tokens. A token has 0 or 1 + k entries: itself, then the k most likely tokens."""

    lens: U32  # [N] entries per token
    logprobs: F32  # [sum(lens)]
    token_ids: U32  # [sum(lens)]
    ranks: U32  # [tokens with entries] 1 + number of tokens with a greater logit

    def select(self, mask: Bools) -> LogprobColumns:
        """The tokens where `mask` [N] is true."""
        if mask.all():
            return self
        entries = np.repeat(mask, self.lens)
        return LogprobColumns(
            self.lens[mask], self.logprobs[entries], self.token_ids[entries], self.ranks[mask[self.lens > 0]]
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens in a worker's answer. The positions of a row ascend."""

    rows: U32  # [N]
    positions: U32  # [N] in the prompt, from 1
    columns: LogprobColumns


def concat_columns(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """The tokens of all parts in order."""
    return LogprobColumns(
        np.concatenate([part.lens for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def no_logprobs(num_tokens: int) -> LogprobColumns:
    """Columns of tokens without entries."""
    nothing = np.empty(0, dtype=np.uint32)
    return LogprobColumns(np.zeros(num_tokens, dtype=np.uint32), np.empty(0, dtype=np.float32), nothing, nothing)
