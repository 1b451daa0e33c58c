"""The inputs and outputs of the core: plain data, no protobuf.

Arrays are numpy columns. Row, block and slot numbers are only meaningful for one worker in one epoch. Messages are not
changed once they are made, except that finishes are added to `Deltas`. Those of each step and request are not frozen,
because `__init__` of a frozen class takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from request_fields.sizes import SizeLimits, blocks_before
from scheduler_svc.core.logprobs import LogprobColumns, PromptLogprobs
from scheduler_svc.core.pooled import PooledRows
from scheduler_svc.core.sequence import SequenceGroup

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

EMPTY: U32 = np.empty(0, dtype=np.uint32)
NO_LOGPROBS: F32 = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """The sizes of one worker. They never change within a `worker_epoch`: a restarted worker joins as a new worker."""

    worker_id: str
    worker_epoch: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pipeline_depth: int = 2
    vocab_size: int = 1 << 32  # its token ids are below
    attention_window: int | None = None  # tokens that a token attends to, itself included; None: all
    max_adapters: int = 0  # adapters that its rows may use at the same time

    @property
    def size_limits(self) -> SizeLimits:
        """The largest sequence that an idle worker could run."""
        return SizeLimits.of_pool(self.max_model_len, self.num_blocks, self.block_size, self.attention_window)

    @property
    def blocks_before(self) -> int | None:
        """The most blocks before the block of a token that the token attends to; None: all."""
        return None if self.attention_window is None else blocks_before(self.attention_window, self.block_size)

    @property
    def max_encoder_tokens(self) -> int:
        """The most encoder positions of a sequence: they fit in one step beside a decode of every other row. 0 with an
        attention window, because a row would free them.
        """
        return 0 if self.attention_window is not None else self.max_num_batched_tokens - self.max_num_seqs + 1


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached block that a worker lists when it joins (ListBlocks)."""

    block_id: int
    digest: bytes  # 16 bytes
    token_ids: U32  # [block_size]


@dataclass(slots=True)
class RowOpen:
    """Gives a sequence a row of a worker. `group` has the sampling parameters, which the core does not read."""

    row: int
    group: SequenceGroup
    sample_index: int
    token_ids: U32  # [num_tokens] prompt then output; empty when forked
    prompt_len: int
    block_table: U32
    num_computed_tokens: int
    fork_of_row: int | None = None
    num_candidates: int = 0  # above 0: the row is a beam; number of best continuations to return
    prompt_logprobs: int | None = None  # as in SequenceGroup, while prompt positions remain to be delivered
    inputs: Seq[Any] = ()  # those whose positions are not all computed


class ImageWork(NamedTuple):
    """A part of the work on one image of a row, as a number of tokens."""

    row: int
    start: int  # first position of the image
    done: int  # after this step
    total: int


@dataclass(slots=True)
class StepBatch:
    """One step of one worker: columns of length B over rows, and the changes since the previous step.

    The worker applies, in this order: close_rows, opens, table changes, copies, commits, beams, forward, sampling.
    """

    worker_id: str
    step_id: int
    rows: U32  # [B]
    query_lens: U32  # [B]
    context_lens: U32  # [B] tokens in KV before this step
    sample_mask: Bools  # [B]
    slot_mapping: U32  # [sum(query_lens)]
    is_decode: bool = False  # every row computes one token and samples it, so query_lens and sample_mask are all ones
    fork_rows: U32 = field(default_factory=lambda: EMPTY)  # [F] rows that sample from the logits of fork_parents
    fork_parents: U32 = field(default_factory=lambda: EMPTY)  # [F]
    close_rows: U32 = field(default_factory=lambda: EMPTY)
    opens: list[RowOpen] = field(default_factory=list)
    table_rows: U32 = field(default_factory=lambda: EMPTY)  # [T]
    table_indices: U32 = field(default_factory=lambda: EMPTY)  # [T] an index equal to the table's length appends
    table_blocks: U32 = field(default_factory=lambda: EMPTY)  # [T]
    copy_src: U32 = field(default_factory=lambda: EMPTY)  # [C]
    copy_dst: U32 = field(default_factory=lambda: EMPTY)  # [C]
    commit_blocks: U32 = field(default_factory=lambda: EMPTY)  # [K]
    commit_digests: list[bytes] = field(default_factory=list)  # [K] 16 bytes each
    beam_rows: U32 = field(default_factory=lambda: EMPTY)  # [M] beams that get new tokens, all at once
    beam_parents: U32 = field(default_factory=lambda: EMPTY)  # [M] rows whose computed tokens they take
    beam_tokens: U32 = field(default_factory=lambda: EMPTY)  # [M] tokens to append, chosen by the search
    images: Seq[ImageWork] = ()  # work on images, before the forward pass
    then: list[StepBatch] = field(default_factory=list)  # further steps of the same message, answered together


@dataclass(frozen=True, slots=True)
class RowFailure:
    """One row that failed in a step (NaN, bad input). The other rows are not affected."""

    row: int
    message: str


@dataclass(slots=True)
class StepOutput:
    """A worker's answer to one StepBatch."""

    worker_id: str
    step_id: int
    rows: U32  # [S] rows that sampled: the rows of sample_mask in batch order, then fork_rows
    token_ids: U32  # [S]
    failures: list[RowFailure] = field(default_factory=list)
    # The best continuations of each beam among `rows`: those of one row are adjacent, in descending order.
    candidate_rows: U32 = field(default_factory=lambda: EMPTY)  # [C]
    candidate_ids: U32 = field(default_factory=lambda: EMPTY)  # [C]
    candidate_logprobs: F32 = field(default_factory=lambda: NO_LOGPROBS)  # [C]
    logprobs: LogprobColumns | None = None  # of `token_ids`; None: no row requests them
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledRows | None = None


class MigrationReason(Enum):
    """Why a sequence was taken off its worker, to continue on another worker if there is one."""

    DRAIN = "drain"
    LOST = "lost"
    FAILED = "failed"  # its row failed, or a row whose blocks it read
