"""A step on its way through an engine, and what a feature may do to it.

    before     its rows are checked, nothing is computed     adds to what the forward pass gets
    computed   keys, values and logits are there             reads what belongs to computed tokens
    process    the logits of S tokens, before sampling       changes them
    sampled    the tokens are there                          reads what belongs to sampled tokens
    use        the weights of the next steps are there       takes those of the feature

The parts of a runner are called in the order of its list. A part takes no part in a step while `in_use` is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError, RowErrorCode
from worker_svc.engine.backend import Backend, ForwardBatch, SamplingColumns

if TYPE_CHECKING:
    import torch  # rows use these types even if torch is not installed


NOTHING_TO_SAMPLE = (
    "the logits contain NaN, infinity or no finite number; check that allowed_token_ids, banned_token_ids, bad_words "
    "and the grammar of the request do not exclude all token ids"
)


class RowErrors(dict[int, RowError]):
    """The first failure of each row in one step, by row."""

    def add(self, row: int, message: str, code: RowErrorCode = RowErrorCode.BAD_INPUT) -> None:
        self.setdefault(row, RowError(row, message, code))

    def add_all(self, errors: list[RowError]) -> None:
        for error in errors:
            self.setdefault(error.row, error)


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """B rows that compute T tokens; S of them or of their forks sample. All rows are valid."""

    rows: I64  # [B]
    context_lens: I64  # [B] tokens in the pool before this step
    ends: I64  # [B] sequence positions after the last token
    starts: I64  # [B + 1] first token of each row
    token_rows: I64  # [T]
    positions: I64  # [T]
    slots: I64  # [T] where keys and values go
    sampling_rows: I64  # [S] rows of the sample mask in batch order, then forks
    sources: I64  # [S] index in `rows` of the row whose last logits are sampled
    has_forks: bool  # without forks, sources ascend, without repetition if no row has drafts
    num_after: I64 | None = None  # [S] drafts of the row after the token that is sampled from. None: no row has drafts

    @property
    def sampled_positions(self) -> I64:
        """[S] sequence positions of the tokens to sample."""
        ends = self.ends[self.sources]
        return ends if self.num_after is None else ends - self.num_after

    @property
    def sampled_tokens(self) -> I64:
        """[S] the tokens of the step whose logits are sampled."""
        last = self.starts[self.sources + 1] - 1
        return last if self.num_after is None else last - self.num_after

    @property
    def nth(self) -> I64:
        """[S] numbers of the samples in their rows, above 0 behind drafts."""
        lines = np.arange(len(self.sampling_rows))
        is_first = np.append(True, self.sampling_rows[1:] != self.sampling_rows[:-1])[: len(lines)]
        return lines - np.maximum.accumulate(np.where(is_first, lines, 0))


@dataclass(slots=True)
class Step:
    """B rows, T tokens, S samples."""

    batch: StepBatch
    plan: CheckedStep
    errors: RowErrors
    output: StepOutput
    forward: ForwardBatch
    heads: I64  # tokens whose logits `computed` gets, ascending
    model: Any  # a Model
    backend: Backend
    pool: Any  # its KVCachePool
    # Reads the logits of the head tokens in slices. Returns those of `heads`. None: they are computed at once.
    read_slices: Callable[[Step, Iterator[torch.Tensor]], torch.Tensor] | None = None


@dataclass(slots=True)
class Logits:
    """The logits of S tokens that are about to be sampled, or of tokens that are scored as if they were."""

    values: torch.Tensor  # [S, vocab]
    rows: I64  # [S]
    positions: I64  # [S] sequence positions of the tokens to sample
    outputs: U32  # [S] the same, counted from the end of the prompt
    has_rules: bool = False  # all tokens may be excluded

    def as_float(self) -> torch.Tensor:
        """The values as float32, to be changed in place."""
        self.values = self.values.float()
        return self.values


@dataclass(frozen=True, slots=True)
class Sampled:
    """The S samples of a step."""

    columns: SamplingColumns
    token_ids: U32  # [S]
    is_token: Bools  # [S] false behind a wrong draft
    is_good: Bools  # [S] tokens of rows that have not failed


class StepPart:
    """What one feature does in a step. The defaults do nothing, and cost no call."""

    in_use: Any = True  # the rows that have the feature, or whether there are some

    def before(self, step: Step) -> None: ...

    def computed(self, step: Step, logits: torch.Tensor) -> None:
        """`logits`: those of the step's `heads`."""

    def process(self, step: Step, logits: Logits) -> None: ...

    def sampled(self, step: Step, logits: Logits, found: Sampled) -> None: ...

    def use(self, weights: Any) -> None:
        """`weights`: `DecoderWeights`; None while they sleep."""
