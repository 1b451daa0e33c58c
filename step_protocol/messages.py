"""Input and output of a step: plain data, no protobuf.

Arrays are numpy columns. A *row* is a place in the worker's persistent batch: opened once, then updated by deltas.
A slot of the KV pool is block_id * block_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from request_fields.fields import SamplingParams
from request_fields.grammar import Grammar

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

EMPTY: U32 = np.empty(0, dtype=np.uint32)
NO_FLOATS: F32 = np.empty(0, dtype=np.float32)


class BadBatchError(ValueError):
    """The columns contradict each other or the pool. The whole step is refused and nothing is applied."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of a row for single token ids; processors.py defines their effect. Empty: no rule."""

    allowed_ids: U32 = field(default_factory=lambda: EMPTY)
    banned_ids: U32 = field(default_factory=lambda: EMPTY)
    bad_words: tuple[U32, ...] = ()  # sequences of token ids
    bias_ids: U32 = field(default_factory=lambda: EMPTY)
    biases: F32 = field(default_factory=lambda: NO_FLOATS)  # one per item of bias_ids


NO_RULES = TokenRules()


class PoolingTask(Enum):
    """What a pooled row returns."""

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
    kind: PoolingKind = PoolingKind.LAST  # of a vector
    normalize: bool = False
    dimensions: int = 0  # of the vector; 0: all
    token_ids: U32 = field(default_factory=lambda: EMPTY)  # of LOGITS
    second_text: int = 0  # position of the first token of the second text; 0: there is one text


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The numbers of the pooled rows that a step completes."""

    rows: U32  # [P]
    lens: U32  # [P]
    values: F32  # [sum(lens)]


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
    banned_ids: U32 = field(default_factory=lambda: EMPTY)  # at all other positions
    first_banned_ids: U32 = field(default_factory=lambda: EMPTY)  # at output position `first_banned_at`
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
    banned_ids: U32 = field(default_factory=lambda: EMPTY)  # not sampled at output positions below `banned_before`
    banned_before: int = 0
    rules: TokenRules = NO_RULES
    grammar: Grammar | None = None
    logprobs: int | None = None  # number of most likely tokens to return with each sampled token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens that follow computed tokens
    num_candidates: int = 0  # above 0: the row is a beam; number of most likely tokens in each answer
    pooling: Pooling | None = None  # None: the row samples
    inputs: tuple[CarriedInput, ...] = ()  # those whose positions are not all computed
    images: tuple[ImageSpan, ...] = ()  # all images of the prompt; those at computed positions too
    adapter: bytes = b""  # digest of the row's adapter; empty: none
    encoder: EncoderInput | None = None  # set if the model has an encoder

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


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: columns of length B over rows, and the changes since the previous step.

    Applied in this order: close_rows, opens, table changes, copies, commits, beams, forward, sampling.
    """

    step_id: int
    rows: U32  # [B]
    query_lens: U32  # [B]
    context_lens: U32  # [B] tokens in KV before this step
    sample_mask: Bools  # [B]
    slot_mapping: U32  # [sum(query_lens)]
    close_rows: U32 = field(default_factory=lambda: EMPTY)
    opens: list[RowOpen] = field(default_factory=list)
    table_rows: U32 = field(default_factory=lambda: EMPTY)  # [T]
    table_indices: U32 = field(default_factory=lambda: EMPTY)  # [T] an index equal to the table's length appends
    table_blocks: U32 = field(default_factory=lambda: EMPTY)  # [T]
    copy_src: U32 = field(default_factory=lambda: EMPTY)  # [C] blocks, copied in order
    copy_dst: U32 = field(default_factory=lambda: EMPTY)  # [C]
    commit_blocks: U32 = field(default_factory=lambda: EMPTY)  # [K]
    commit_hashes: list[bytes] = field(default_factory=list)  # [K] 16 bytes each
    fork_rows: U32 = field(default_factory=lambda: EMPTY)  # [F] sample from the logits of fork_parents
    fork_parents: U32 = field(default_factory=lambda: EMPTY)  # [F]
    beam_rows: U32 = field(default_factory=lambda: EMPTY)  # [M] beams that get new tokens, all at once
    beam_parents: U32 = field(default_factory=lambda: EMPTY)  # [M] rows whose computed tokens they take
    beam_tokens: U32 = field(default_factory=lambda: EMPTY)  # [M] tokens to append
    images: tuple[ImageWork, ...] = ()  # before the forward pass


class RowErrorCode(Enum):
    """Why one row failed in one step."""

    NAN = "nan"  # its logits hold NaN, +inf or no finite number
    BAD_INPUT = "bad_input"  # the batch contradicts the row's table, its history or the pool
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class RowError:
    """One row failed in one step; the others are not affected."""

    row: int
    code: RowErrorCode
    message: str


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
        ranks = self.ranks[mask[self.lens > 0]]
        return LogprobColumns(self.lens[mask], self.logprobs[entries], self.token_ids[entries], ranks)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens. The positions of a row ascend."""

    rows: U32  # [N]
    positions: U32  # [N] in the prompt, from 1
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of several rows. Those of one row are adjacent, in descending order; ties by lowest id."""

    rows: U32 = field(default_factory=lambda: EMPTY)  # [C]
    token_ids: U32 = field(default_factory=lambda: EMPTY)  # [C]
    logprobs: F32 = field(default_factory=lambda: NO_FLOATS)  # [C]

    def without(self, rows: npt.NDArray[np.int64]) -> Candidates:
        """The candidates of all other rows."""
        kept = ~np.isin(self.rows, rows)
        return Candidates(self.rows[kept], self.token_ids[kept], self.logprobs[kept])


NO_CANDIDATES = Candidates()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a step."""

    step_id: int
    rows: U32  # [S] rows that sampled: of sample_mask in batch order, then of fork_rows; no failed rows
    token_ids: U32  # [S]
    errors: list[RowError]
    forward_us: int  # microseconds from batch to tokens
    logprobs: LogprobColumns | None = None  # of `token_ids`; None: no row requests them
    prompt_logprobs: PromptLogprobs | None = None
    candidates: Candidates = NO_CANDIDATES
    pooled: PooledRows | None = None
