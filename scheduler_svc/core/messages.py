"""The inputs and outputs of the core: plain data, no protobuf.

Arrays are numpy columns. Row, block and slot numbers are only meaningful for one worker in one epoch. Steps and their
answers are in step_protocol.messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from request_fields.sizes import SizeLimits, blocks_before
from scheduler_svc.core.sequence import Completion, FinishReason, SequenceGroup
from step_protocol.columns import F32, U32, Bools
from step_protocol.features import LogprobColumns, concat_columns, no_logprobs
from step_protocol.types import BlockMovement, CacheGroup, WorkerRole


@dataclass(frozen=True, slots=True)
class MovedExtra:
    """What a part of a worker holds of a prefix besides its blocks, on its way to another worker or from a tier."""

    block_digest: bytes  # of the block at whose end it is
    digest: bytes  # that names it where it comes from
    words: U32  # what it is, in place of the tokens of a block
    block_id: int  # where it goes; ids follow those of the blocks
    source_id: int | None  # where it comes from; None: the worker's tier


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
    num_snapshots: int | None = None  # of states of recurrent layers; None: the model has no recurrent layers
    snapshot_tokens: int = 1  # tokens whose keys and values have as many bytes as a snapshot
    movement: BlockMovement | None = None  # None: its blocks do not move
    groups: tuple[CacheGroup, ...] = ()  # beside the layers whose blocks `num_blocks` counts

    @property
    def role(self) -> WorkerRole:
        """Workers whose blocks do not move have no other role than both."""
        return WorkerRole.BOTH if self.movement is None else self.movement.role

    @property
    def size_limits(self) -> SizeLimits:
        """The largest sequence that an idle worker could run."""
        return SizeLimits.of_pool(self.max_model_len, self.num_blocks, self.block_size, self.attention_window)

    @property
    def num_all_blocks(self) -> int:
        """Of all groups. The block ids of a group follow those of the groups before it."""
        return self.num_blocks + sum(group.num_blocks for group in self.groups)

    @property
    def frees_blocks(self) -> bool:
        """Whether rows free blocks behind attention windows."""
        return self.attention_window is not None or bool(self.groups)

    @property
    def blocks_before(self) -> int | None:
        """The most blocks before the block of a token that the token attends to; None: all."""
        return None if self.attention_window is None else blocks_before(self.attention_window, self.block_size)

    @property
    def max_encoder_tokens(self) -> int:
        """The most encoder positions of a sequence: they fit in one step beside a decode of every other row. 0 with an
        attention window, because a row would free them.
        """
        return 0 if self.frees_blocks else self.max_num_batched_tokens - self.max_num_seqs + 1


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached block that a worker lists when it joins (ListBlocks)."""

    block_id: int
    digest: bytes  # 16 bytes
    token_ids: U32  # [block_size]


@dataclass(slots=True)
class RowAssignment:
    """Gives a sequence a row of a worker, which gets it as a RowOpen with the options of `group`."""

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
    snapshot: int | None = None  # slot of the state after the computed tokens, if the model has recurrent layers
    group_tables: tuple[U32, ...] = ()  # block tables in the cache groups after the first one


class MigrationReason(Enum):
    """Why a sequence was taken off its worker, to continue on another worker if there is one."""

    DRAIN = "drain"
    HANDOVER = "handover"  # from a prefill worker
    LOST = "lost"
    FAILED = "failed"  # its row failed, or a row whose blocks it read
    UPDATE = "update"  # the weights have changed
    PAUSE = "pause"


def counted(meaning: str, unit: str = "") -> Any:
    """A counter that is also the metric quire_<name of the field>_total, with this help text."""
    return field(default=0, metadata={"meaning": meaning, "unit": unit})


@dataclass(slots=True)
class Counts:
    """The counters of one core. Its components share the object and increment it."""

    steps: int = counted("steps sent to workers")
    prefix_cache_queries: int = counted("prompt tokens of admitted sequences", "tokens")
    prefix_cache_hits: int = counted("prompt tokens of admitted sequences that were cached", "tokens")
    num_preemptions: int = counted("sequences requeued because blocks ran out or a more urgent sequence needed them")
    accepted_draft_tokens: int = counted("output tokens that were drafts", "tokens")
    block_moves: int = counted("moves of cached blocks into a worker's pool, from its tier or from another worker")
    failed_block_moves: int = counted("moves of which not all blocks arrived; the others were computed")
    tier_hit_tokens: int = counted("tokens whose KV was read from a tier", "tokens")
    transferred_tokens: int = counted("tokens whose KV came from another worker", "tokens")
    borrowed_tokens: int = counted("tokens whose KV came from a worker of another scheduler", "tokens")
    prefix_searches: int = counted("prefixes that were looked for on workers of other schedulers")
    lent_blocks: int = counted("blocks that were kept for workers of other schedulers", "blocks")
    moved_bytes: int = counted("bytes of KV that moves brought", "bytes")
    snapshots_taken: int = counted("snapshots of recurrent states from which rows could start")
    snapshot_hits: int = counted("rows that started from a snapshot of a recurrent state")
    snapshots_evicted: int = counted("snapshots of recurrent states that made room for others")
    snapshot_misses: int = counted("cached prompt tokens that were computed again for lack of a snapshot", "tokens")
    refused_deadline: int = 0  # requests whose first token would come too late
    migrations: Counter[MigrationReason] = field(default_factory=Counter)  # sequences requeued for another worker

    @property
    def num_requeued(self) -> int:
        """Number of times that a sequence lost its row and was queued again."""
        return self.num_preemptions + self.migrations.total()


@dataclass(frozen=True, slots=True)
class PromptDeltas:
    """Log probabilities of prompt tokens that the gateways do not have yet. The positions of a request ascend."""

    owners: U32  # [N]
    handles: U32  # [N]
    positions: U32  # [N]
    columns: LogprobColumns

    def select(self, mask: Bools) -> PromptDeltas:
        """The prompt tokens where `mask` [N] is true."""
        return PromptDeltas(self.owners[mask], self.handles[mask], self.positions[mask], self.columns.select(mask))


@dataclass(frozen=True, slots=True)
class PooledDeltas:
    """The numbers of requests that have ended."""

    owners: U32  # [P]
    handles: U32  # [P]
    lens: U32  # [P]
    values: F32  # [sum(lens)]

    def select(self, mask: Bools) -> PooledDeltas:
        """The requests where `mask` [P] is true."""
        kept = np.repeat(mask, self.lens)
        return PooledDeltas(self.owners[mask], self.handles[mask], self.lens[mask], self.values[kept])


@dataclass(slots=True)
class Finished:
    """The end of a sample. The counters have the meaning of Usage in the protocol."""

    group: SequenceGroup
    sample_index: int
    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    processor_us: float = 0.0
    block_s: float = 0.0
    stop_token_id: int | None = None
    message: str = ""
    logprob: float | None = None  # of a sequence from beam search: sum over its tokens
    score: float | None = None  # of a sequence from beam search


@dataclass(slots=True)
class Deltas:
    """The result of an `update` or an abort: columns of length N with one new token each, and the samples that ended.

    `owners` and `handles` are the caller's numbers from SequenceGroup; the core does not interpret them.
    The finishes apply after the tokens of the same message.
    """

    owners: U32  # [N] the gateway
    handles: U32  # [N] the gateway's request
    sample_indices: U32  # [N]
    offsets: U32  # [N] output position
    token_ids: U32  # [N]
    finished: list[Finished] = field(default_factory=list)
    owner: int | None = None  # the owner of all tokens; None if unknown or if there are several
    logprobs: LogprobColumns | None = None  # of `token_ids`; None: no request sets `logprobs`
    prompt: PromptDeltas | None = None  # the gateway handles them before `token_ids`
    pooled: PooledDeltas | None = None  # of requests that end with this message

    @property
    def size(self) -> int:
        """Size of the columns, in units of 16 bytes (one token)."""
        num_entries = 0 if self.logprobs is None else len(self.logprobs.logprobs)
        num_entries += 0 if self.prompt is None else len(self.prompt.columns.logprobs)
        num_numbers = 0 if self.pooled is None else len(self.pooled.values)
        return len(self.token_ids) + num_entries // 2 + num_numbers // 4


def with_outputs(deltas: Deltas, group: SequenceGroup, outputs: Sequence[Completion], ends: list[Finished]) -> Deltas:
    """`deltas`, with the best outputs of a request that has ended as its samples."""
    found = outputs[: group.n]
    lengths = [len(best.token_ids) for best in found]
    count = sum(lengths)
    columns = {
        "owners": np.full(count, group.owner),
        "handles": np.full(count, group.handle),
        "sample_indices": np.repeat(np.arange(len(found)), lengths),
        "offsets": np.concatenate([np.arange(length) for length in (0, *lengths)]),
        "token_ids": np.concatenate([deltas.token_ids[:0], *(best.token_ids for best in found)]),
    }
    if deltas.logprobs is not None:
        deltas = replace(deltas, logprobs=concat_columns([deltas.logprobs, no_logprobs(count)]))
    joined: dict[str, Any] = {
        name: np.append(getattr(deltas, name), column).astype(np.uint32) for name, column in columns.items()
    }
    return replace(deltas, **joined, finished=deltas.finished + ends, owner=None)


def merge_deltas(parts: Sequence[Deltas]) -> Deltas:
    """Concatenates columns. A finish stays behind its tokens, because finishes apply after all tokens of a message."""
    return Deltas(
        owners=np.concatenate([part.owners for part in parts]),
        handles=np.concatenate([part.handles for part in parts]),
        sample_indices=np.concatenate([part.sample_indices for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        finished=[finished for part in parts for finished in part.finished],
        logprobs=_merge_logprobs(parts),
        prompt=concat_parts([part.prompt for part in parts]),
        pooled=concat_parts([part.pooled for part in parts]),
    )


def _merge_logprobs(parts: Sequence[Deltas]) -> LogprobColumns | None:
    if all(part.logprobs is None for part in parts):
        return None
    return concat_columns([part.logprobs or no_logprobs(len(part.token_ids)) for part in parts])


def split_deltas(deltas: Deltas) -> dict[int, Deltas]:
    """Splits deltas by owner. With one owner, the usual case, nothing is copied."""
    if deltas.owner is not None and not deltas.finished and deltas.prompt is None:
        return {deltas.owner: deltas}
    columns = deltas.owners
    is_uniform = len(columns) > 0 and not np.count_nonzero(columns != columns[0])
    owners = {int(columns[0])} if is_uniform else set(np.unique(columns).tolist())
    if deltas.finished:
        owners |= {finished.group.owner for finished in deltas.finished}
    if deltas.prompt is not None:
        owners |= set(np.unique(deltas.prompt.owners).tolist())
    if len(owners) == 1:
        return {owners.pop(): deltas}
    return {owner: _of_owner(deltas, owner) for owner in owners}


def _of_owner(deltas: Deltas, owner: int) -> Deltas:
    mine, prompt, pooled = deltas.owners == owner, deltas.prompt, deltas.pooled
    return Deltas(
        owners=deltas.owners[mine],
        handles=deltas.handles[mine],
        sample_indices=deltas.sample_indices[mine],
        offsets=deltas.offsets[mine],
        token_ids=deltas.token_ids[mine],
        finished=[finished for finished in deltas.finished if finished.group.owner == owner],
        logprobs=None if deltas.logprobs is None else deltas.logprobs.select(mine),
        prompt=None if prompt is None or owner not in prompt.owners else prompt.select(prompt.owners == owner),
        pooled=None if pooled is None or owner not in pooled.owners else pooled.select(pooled.owners == owner),
    )


def pooled_deltas(found: Sequence[tuple[int, int, F32]]) -> PooledDeltas | None:
    """Columns of (owner, handle, numbers); None if there are none."""
    if not found:
        return None
    owners, handles, values = zip(*found, strict=True)
    lens = np.array([len(numbers) for numbers in values], np.uint32)
    return PooledDeltas(np.array(owners, np.uint32), np.array(handles, np.uint32), lens, np.concatenate(values))


Parts = TypeVar("Parts", PromptDeltas, PooledDeltas)


def concat_parts(parts: Sequence[Parts | None]) -> Parts | None:
    """The columns of all parts in order; None if there are no parts."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    columns = ([getattr(part, column.name) for part in present] for column in fields(present[0]))
    joined: list[Any] = [
        concat_columns(found) if isinstance(found[0], LogprobColumns) else np.concatenate(found) for found in columns
    ]
    return type(present[0])(*joined)
