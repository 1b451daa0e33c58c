"""A step and its answer, as the scheduler sends them and the worker computes them: plain data, no protobuf.

Arrays are numpy columns. A *row* is a place in the worker's persistent batch: opened once, then updated by deltas.
A slot of the KV pool is block_id * block_size + offset. These numbers are only meaningful for one worker in one epoch.
Messages are not changed once they are made. Those of each step are not frozen, because `__init__` of a frozen class
takes three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from request_fields.fields import SamplingParams
from request_fields.parameters import Grammar
from step_protocol.columns import EMPTY, F32, NO_FLOATS, U32, Bools, HasParts, Part
from step_protocol.features import LogprobColumns, ThinkingBudget
from step_protocol.types import CarriedInput, EncoderInput, Pooling, RowError


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
    thinking: ThinkingBudget | None = None
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
    draft_token_ids: U32 = field(default_factory=_empty)  # an old answer, which the output may repeat; empty for a fork

    @property
    def computes_encoder(self) -> bool:
        """Whether the row computes its encoder input, in the step that opens it."""
        return self.encoder is not None and self.fork_of_row is None and not self.num_computed_tokens


@dataclass(slots=True)
class StepBatch(HasParts):
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
    max_query_lens: U32 | None = None  # [B] above 0: the row speculates. None: no row does
    parts: tuple[Part, ...] = ()  # features that rows use in this step
    # Known to the scheduler only:
    worker_id: str = ""
    is_decode: bool = False  # every row computes one token and samples it, so query_lens and sample_mask are all ones
    then: list[StepBatch] = field(default_factory=list)  # further steps of the same message, answered together
    # Known to the worker only:
    draft_lens: U32 | None = None  # [B] drafts at the end of each row's tokens. None: no row has any


@dataclass(slots=True)
class StepOutput(HasParts):
    """A worker's answer to one StepBatch."""

    step_id: int
    rows: U32  # [S] rows that sampled: of sample_mask in batch order, then of fork_rows; no failed rows
    token_ids: U32  # [sum(token_lens)]
    errors: list[RowError] = field(default_factory=list)
    forward_us: int = 0  # microseconds from batch to tokens
    logprobs: LogprobColumns | None = None  # log probabilities of `token_ids`; None: no row requests them
    parts: tuple[Any, ...] = ()  # AnswerPart; features that rows use
    token_lens: U32 | None = None  # [S] tokens of each row. None: all 1
    draft_lens: U32 | None = None  # [S] drafts wanted for the next step of each row. None: no row wants any
    worker_id: str = ""  # known to the scheduler only
