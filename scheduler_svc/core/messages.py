"""The inputs and outputs of the core: plain data, no protobuf.

Arrays are numpy columns. Row, block and slot numbers are only meaningful for one worker in one epoch. Messages are not
changed once they are made. Steps and their answers are in step_protocol.messages.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Any

from request_fields.sizes import SizeLimits, blocks_before
from scheduler_svc.core.sequence import SequenceGroup
from step_protocol.columns import U32


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
class RowAssignment:
    """Gives a sequence a row of a worker, which gets it as a RowAssignment with the parameters of `group`."""

    row: int
    group: SequenceGroup
    sample_index: int
    token_ids: U32  # [num_tokens] prompt then output; empty when forked
    prompt_len: int
    block_table: U32
    num_computed_tokens: int
    fork_of_row: int | None = None
    num_candidates: int = 0  # above 0: the row is a beam; number of best continuations to return
    prompt_logprobs: int | None = None  # number of most likely tokens to return with each prompt token
    inputs: Seq[Any] = ()  # those whose positions are not all computed


class MigrationReason(Enum):
    """Why a sequence was taken off its worker, to continue on another worker if there is one."""

    DRAIN = "drain"
    LOST = "lost"
    FAILED = "failed"  # its row failed, or a row whose blocks it read
