"""A step and its answer, as the scheduler sends them and the worker computes them: plain data, no protobuf.

Arrays are numpy columns. A *row* is a place in the worker's persistent batch: opened once, then updated by deltas.
A slot of the KV pool is block_id * block_size + offset. These numbers are only meaningful for one worker in one epoch.
Messages are not changed once they are made. Those of each step are not frozen, because `__init__` of a frozen class
takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from request_fields.fields import SamplingParams
from request_fields.grammar import Grammar
from step_protocol.columns import F32, I64, U32, U64, Bools

EMPTY: U32 = np.empty(0, dtype=np.uint32)
NO_FLOATS: F32 = np.empty(0, dtype=np.float32)


def _empty() -> U32:
    return EMPTY


def _no_floats() -> F32:
    return NO_FLOATS


class BadBatchError(ValueError):
    """The columns contradict each other or the pool. The whole step is refused and nothing is applied."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of a row for single token ids; processors.py defines their effect. Empty: no rule."""

    allowed_ids: U32 = field(default_factory=_empty)
    banned_ids: U32 = field(default_factory=_empty)
    bad_words: tuple[U32, ...] = ()  # sequences of token ids
    bias_ids: U32 = field(default_factory=_empty)
    biases: F32 = field(default_factory=_no_floats)  # one per item of bias_ids


NO_RULES = TokenRules()


class PoolingTask(Enum):
    """Result of a pooled row."""

    VECTOR = "vector"  # an embedding
    LOGITS = "logits"  # the logits of some token ids after the last token
    CLASSES = "classes"  # the outputs of the classification head


class PoolingKind(Enum):
    """How the hidden states of a text become one vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"  # the first token


@dataclass(frozen=True, slots=True)
class Pooling:
    """The numbers that a row returns when its prompt is complete, instead of tokens."""

    task: PoolingTask
    kind: PoolingKind = PoolingKind.LAST  # token that gives a vector
    normalize: bool = False
    dimensions: int = 0  # length of the vector; 0: all
    token_ids: U32 = field(default_factory=_empty)  # ids of LOGITS
    second_text: int = 0  # position of the first token of the second text; 0: there is one text


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The numbers of the pooled rows that a step completes."""

    rows: U32  # [P]
    lens: U32  # [P]
    values: F32  # [sum(lens)]

    def of_row(self) -> dict[int, F32]:
        """The numbers by row."""
        parts = np.split(self.values, np.cumsum(self.lens)[:-1]) if len(self.lens) else []
        return dict(zip(self.rows.tolist(), parts, strict=True))


@dataclass(frozen=True, slots=True)
class CarriedInput:
    """An input that takes positions of a prompt in place of vocabulary tokens. inputs.py checks it."""

    kind: str  # embeddings: [length, hidden size]; image: [height, width, channels * patch_size^2], see inputs.proto
    digest: bytes
    start: int  # first position
    length: int  # number of positions
    dtype: str
    shape: tuple[int, ...]
    data: bytes  # little-endian


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of one image in a sequence."""

    start: int  # index of its first token
    height: int  # in tokens
    width: int

    @property
    def length(self) -> int:
        return self.height * self.width

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The encoder positions at the head of a row's tokens, and rules for the ids of its output."""

    num_tokens: int  # without padding to a whole block
    allowed: dict[int, U32] = field(default_factory=dict)  # output position -> the only ids that can be sampled there
    banned_ids: U32 = field(default_factory=_empty)  # at all other positions
    first_banned_ids: U32 = field(default_factory=_empty)  # at output position `first_banned_at`
    first_banned_at: int = 0


@dataclass(frozen=True, slots=True)
class RowOpen:
    """Opens a row for a sequence, with everything that the engine needs to know about it."""

    row: int
    token_ids: U32  # [num_tokens] prompt (content ids at positions of inputs), then output; empty for a fork
    prompt_len: int
    block_table: U32
    num_computed_tokens: int
    sampling: SamplingParams
    sample_index: int
    fork_of_row: int | None = None
    banned_ids: U32 = field(default_factory=_empty)  # not sampled at output positions below `banned_before`
    banned_before: int = 0
    rules: TokenRules = NO_RULES
    grammar: Grammar | None = None
    logprobs: int | None = None  # number of most likely tokens to return with each sampled token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens that follow computed tokens
    processed_logprobs: bool = False  # log probabilities of the distribution that output tokens are drawn from
    logits_digests: bool = False  # with each log probability
    num_forced: int = 0  # output tokens from the first on that `prompt_logprobs` covers too
    num_candidates: int = 0  # above 0: the row is a beam; number of most likely tokens in each answer
    pooling: Pooling | None = None  # None: the row samples
    inputs: tuple[CarriedInput, ...] = ()  # inputs whose positions are not all computed
    images: tuple[ImageSpan, ...] = ()  # all images of the prompt; those at computed positions too
    adapter: bytes = b""  # digest of the row's adapter; empty: none
    encoder: EncoderInput | None = None  # set if the model has an encoder
    snapshot: int | None = None  # slot of a state after the computed tokens, of a model with recurrent layers
    group_tables: tuple[U32, ...] = ()  # block tables in the cache groups after the first one
    speculates: bool = True  # the worker may compute drafts of the row

    @property
    def computes_encoder(self) -> bool:
        """Whether the row computes its encoder input, in the step that opens it."""
        return self.encoder is not None and self.fork_of_row is None and not self.num_computed_tokens


class ImageWork(NamedTuple):
    """A part of the work on one image of a row."""

    row: int
    start: int  # first position of the image
    done: int  # after this step
    total: int


@dataclass(slots=True)
class StepBatch:
    """One step of one worker: columns of length B over rows, and the changes since the previous step.

    The worker applies, in this order: close_rows, opens, table changes, copies, commits, beams, forward, sampling.
    """

    step_id: int
    rows: U32  # [B]
    query_lens: U32  # [B]
    context_lens: U32  # [B] tokens in KV before this step
    sample_mask: Bools  # [B]
    slot_mapping: U32  # [sum(query_lens)]
    close_rows: U32 = field(default_factory=_empty)
    opens: list[Any] = field(default_factory=list)  # RowOpen; in the scheduler RowAssignment, from which it follows
    table_rows: U32 = field(default_factory=_empty)  # [T]
    table_indices: U32 = field(default_factory=_empty)  # [T] an index equal to the table's length appends
    table_blocks: U32 = field(default_factory=_empty)  # [T] blocks of the cache group whose table changes
    copy_src: U32 = field(default_factory=_empty)  # [C] blocks, copied in order
    copy_dst: U32 = field(default_factory=_empty)  # [C]
    commit_blocks: U32 = field(default_factory=_empty)  # [K]
    commit_digests: list[bytes] = field(default_factory=list)  # [K] 16 bytes each
    fork_rows: U32 = field(default_factory=_empty)  # [F] rows that sample from the logits of fork_parents
    fork_parents: U32 = field(default_factory=_empty)  # [F]
    beam_rows: U32 = field(default_factory=_empty)  # [M] beams that get new tokens, all at once
    beam_parents: U32 = field(default_factory=_empty)  # [M] rows whose computed tokens they take
    beam_tokens: U32 = field(default_factory=_empty)  # [M] tokens to append
    images: Sequence[ImageWork] = ()  # work on images, before the forward pass
    max_query_lens: U32 | None = None  # [B] above 0: the row speculates. None: no row does
    snapshot_rows: U32 = field(default_factory=_empty)  # [N] rows whose states are kept
    snapshot_positions: U32 = field(default_factory=_empty)  # [N] after so many tokens of the row, in this step
    snapshot_slots: U32 = field(default_factory=_empty)  # [N] where; rows opened in later steps may start from there
    # Known to the scheduler only:
    worker_id: str = ""
    is_decode: bool = False  # every row computes one token and samples it, so query_lens and sample_mask are all ones
    then: list[StepBatch] = field(default_factory=list)  # further steps of the same message, answered together
    # Known to the worker only:
    draft_lens: U32 | None = None  # [B] drafts at the end of each row's tokens. None: no row has any


class RowErrorCode(Enum):
    """Why one row failed in one step."""

    NAN = "nan"  # its logits hold NaN, +inf or no finite number
    BAD_INPUT = "bad_input"  # the batch contradicts the row's table, its history or the pool
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class RowError:
    """One row that failed in one step. The other rows are not affected."""

    row: int
    message: str
    code: RowErrorCode = RowErrorCode.INTERNAL


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log probabilities of N tokens. A token has 0 or 1 + k entries: itself, then the k most likely tokens."""

    lens: U32  # [N] entries per token
    logprobs: F32  # [sum(lens)]
    token_ids: U32  # [sum(lens)]
    ranks: U32  # [tokens with entries] 1 + number of tokens with a greater value
    # [tokens with entries] of rows that ask for them, 0 for others; None if no row asks:
    raw_logprobs: F32 | None = None  # log probabilities of the tokens themselves, if `logprobs` are processed
    num_kept: U32 | None = None  # token ids that the filters keep
    logits_digests: U64 | None = None

    def select(self, mask: Bools) -> LogprobColumns:
        """The tokens where `mask` [N] is true."""
        if mask.all():
            return self
        entries, has_entries = np.repeat(mask, self.lens), mask[self.lens > 0]
        extras = {name: column[has_entries] for name, column in self.extras().items()}
        return LogprobColumns(
            self.lens[mask], self.logprobs[entries], self.token_ids[entries], self.ranks[has_entries], **extras
        )

    def extras(self) -> dict[str, Any]:
        """The columns that some row asks for, by name."""
        found = {name: getattr(self, name) for name in LOGPROB_EXTRAS}
        return {name: column for name, column in found.items() if column is not None}


LOGPROB_EXTRAS: dict[str, np.dtype[Any]] = {  # the optional columns and their numbers
    "raw_logprobs": np.dtype(np.float32),
    "num_kept": np.dtype(np.uint32),
    "logits_digests": np.dtype(np.uint64),
}


def concat_columns(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """The tokens of all parts in order."""
    names = dict.fromkeys(name for part in parts for name in part.extras())
    extras = {name: np.concatenate([_extra(part, name) for part in parts]) for name in names}
    return LogprobColumns(
        np.concatenate([part.lens for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        **extras,
    )


def _extra(part: LogprobColumns, name: str) -> Any:
    found = getattr(part, name)
    return np.zeros(len(part.ranks), LOGPROB_EXTRAS[name]) if found is None else found


def no_logprobs(num_tokens: int) -> LogprobColumns:
    """Columns of tokens without entries."""
    return LogprobColumns(np.zeros(num_tokens, dtype=np.uint32), NO_FLOATS, EMPTY, EMPTY)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens. The positions of a row ascend."""

    rows: U32  # [N]
    positions: U32  # [N] in the prompt, from 1
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """Candidates of several rows. Those of one row are adjacent, in descending order; ties by lowest id."""

    rows: U32 = field(default_factory=_empty)  # [C]
    token_ids: U32 = field(default_factory=_empty)  # [C]
    logprobs: F32 = field(default_factory=_no_floats)  # [C]

    def without(self, rows: I64) -> BeamCandidates:
        """The candidates of all other rows."""
        kept = ~np.isin(self.rows, rows)
        return BeamCandidates(self.rows[kept], self.token_ids[kept], self.logprobs[kept])


NO_CANDIDATES = BeamCandidates()


@dataclass(slots=True)
class StepOutput:
    """A worker's answer to one StepBatch."""

    step_id: int
    rows: U32  # [S] rows that sampled: of sample_mask in batch order, then of fork_rows; no failed rows
    token_ids: U32  # [sum(token_lens)]
    errors: list[RowError] = field(default_factory=list)
    forward_us: int = 0  # microseconds from batch to tokens
    logprobs: LogprobColumns | None = None  # log probabilities of `token_ids`; None: no row requests them
    prompt_logprobs: PromptLogprobs | None = None
    candidates: BeamCandidates = NO_CANDIDATES  # candidates of each beam among `rows`
    pooled: PooledRows | None = None
    token_lens: U32 | None = None  # [S] tokens of each row. None: all 1
    draft_lens: U32 | None = None  # [S] drafts wanted for the next step of each row. None: no row wants any
    worker_id: str = ""  # known to the scheduler only
