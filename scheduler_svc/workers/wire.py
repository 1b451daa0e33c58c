"""Conversions between the worker protocol and the core's plain data, and all checks of worker messages.

Frequent messages are columns, so steady decode does no work per sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from prefix_index.hashing import model_salt
from request_fields.sizes import MAX_POOL_BLOCKS, MAX_POOL_TOKENS, blocks_of_row
from scheduler_svc.core.features.block_moves import BlockMove
from scheduler_svc.core.messages import CachedBlock, RowAssignment, WorkerCapacity
from scheduler_svc.workers.seals import SEAL_BYTES, BlockKeys, LeaseIds
from step_protocol.columns import I64, WireError, u32_from_bytes, u32_to_bytes
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.proto import batch_to_proto, output_from_proto
from step_protocol.types import BlockMovement, CacheGroup, RowError
from svc_common.errors import InvalidRequestError

DIGEST_BYTES = 16
MAX_BLOCK_BYTES = 1 << 30
ORIGIN = struct.Struct(f"<QI{SEAL_BYTES}s")  # worker_epoch, block id, seal
MAX_ROW_ERROR_CHARS = 500  # the message goes to the client and to the log


def step_batch_to_proto(
    batch: StepBatch,
    fence: worker_pb2.Fence,
    keys: BlockKeys | None = None,
    message: worker_pb2.StepBatch | None = None,
) -> worker_pb2.StepBatch:
    """Converts one step to a message for the worker of `fence`. With `keys`, commits carry tags.

    Fills `message` if it is given: a part of a larger message is filled in place, because adding it later copies it.
    """
    message = worker_pb2.StepBatch() if message is None else message
    batch_to_proto(batch, message)
    message.fence.CopyFrom(fence)
    for assignment in batch.opens:
        _open_row(assignment, message)
    if keys is not None and batch.commit_digests:
        lease = LeaseIds(fence.worker_epoch, fence.scheduler_epoch)
        message.commit_tags = keys.tags(lease, batch.commit_blocks, batch.commit_digests)
    return message


def _open_row(assignment: RowAssignment, batch: worker_pb2.StepBatch) -> None:
    """Adds the row to the opens of a step: the options of its request, and what only this row has."""
    group = assignment.group
    batch.opens.append(group.options)  # a copy
    message = batch.opens[-1]
    message.row, message.sample_index = assignment.row, assignment.sample_index
    message.token_ids, message.prompt_len = u32_to_bytes(assignment.token_ids), assignment.prompt_len
    message.block_table = u32_to_bytes(assignment.block_table)
    message.num_computed_tokens = assignment.num_computed_tokens
    message.num_candidates = assignment.num_candidates
    if assignment.fork_of_row is not None:
        message.fork_of_row = assignment.fork_of_row
        message.ClearField("draft_token_ids")  # the worker has those of the parent
    if assignment.prompt_logprobs is not None:
        message.prompt_logprobs = assignment.prompt_logprobs
    if assignment.snapshot is not None:
        message.snapshot = assignment.snapshot
    if assignment.group_tables:
        message.group_tables.extend(map(u32_to_bytes, assignment.group_tables))
    if assignment.inputs:
        message.inputs.extend(assignment.inputs)
    if group.traceparent:
        batch.traces.add(row=assignment.row, traceparent=group.traceparent)


def step_output_from_proto(
    message: worker_pb2.StepOutput, *, worker_id: str, worker_epoch: int, step_id: int, vocab_size: int
) -> StepOutput:
    """Converts the answer to step `step_id`. A row whose token is not below `vocab_size` has failed.

    Raises WireError if the answer is malformed or has another step or epoch.
    """
    if message.worker_epoch != worker_epoch:
        raise WireError(f"worker_epoch is {message.worker_epoch:#x}, but the leased epoch is {worker_epoch:#x}")
    if message.step_id != step_id:
        raise WireError(f"worker answered step {message.step_id}, but step {step_id} is the oldest in flight")
    output = output_from_proto(message)
    output.worker_id = worker_id
    if output.errors:
        output.errors = [RowError(error.row, _row_error_text(error), error.code) for error in output.errors]
    if len(output.token_ids) and int(output.token_ids[output.token_ids.argmax()]) >= vocab_size:  # faster than max()
        _fail_invalid_tokens(output, vocab_size)
    if output.parts:
        output.parts = tuple(part.checked(vocab_size) for part in output.parts)
    return output


def _fail_invalid_tokens(output: StepOutput, vocab_size: int) -> None:
    lens = np.ones_like(output.rows) if output.token_lens is None else output.token_lens
    rows, token_ids = np.repeat(output.rows, lens), output.token_ids
    is_bad = token_ids >= vocab_size
    bad = dict(zip(rows[is_bad].tolist(), token_ids[is_bad].tolist(), strict=True))
    output.errors += [RowError(row, f"token id {id_} is not below vocab_size {vocab_size}") for row, id_ in bad.items()]
    is_valid, stays = ~np.isin(rows, rows[is_bad]), ~np.isin(output.rows, rows[is_bad])
    output.rows, output.token_ids = output.rows[stays], token_ids[is_valid]
    output.token_lens, output.draft_lens = lens[stays], None
    output.logprobs = None if output.logprobs is None else output.logprobs.select(is_valid)


def _row_error_text(error: RowError) -> str:
    text = error.message[:MAX_ROW_ERROR_CHARS]
    return f"{error.code.value}: {text}" if text else error.code.value


@dataclass(frozen=True, slots=True)
class CapacityLimit:
    """A field of WorkerCapacity that must be from 1 to `most`. `remedy` is the advice if it is not."""

    field: str
    most: int
    remedy: str


# The scheduler allocates memory by these sizes, so the limits keep one Register message from exhausting it. The largest
# accepted pool costs the scheduler about 0.5 GB.
CAPACITY_LIMITS = (
    CapacityLimit("num_blocks", MAX_POOL_BLOCKS, "start the worker with a lower --num-blocks or --kv-cache-memory"),
    CapacityLimit("block_size", 256, "start the worker with another --block-size"),
    CapacityLimit("max_num_seqs", 1 << 16, "start the worker with another --max-num-seqs"),
    CapacityLimit("max_num_batched_tokens", 1 << 22, "start the worker with another --max-num-batched-tokens"),
    CapacityLimit("pipeline_depth", 64, "start the worker with another --pipeline-depth"),
    CapacityLimit("info.max_model_len", 1 << 25, "start the worker with another --max-model-len"),
    CapacityLimit("info.vocab_size", 1 << 24, "check vocab_size in the model's config.json"),
)
MAX_EOS_TOKEN_IDS = 1024
MAX_GROUPS = 8


def _check_limits(capacity: scheduler_pb2.WorkerCapacity) -> None:
    """Raise InvalidRequestError with field, value and limit if a size is outside CAPACITY_LIMITS."""
    for limit in CAPACITY_LIMITS:
        value = attrgetter(limit.field)(capacity)
        if not 1 <= value <= limit.most:
            raise _bad_capacity(limit.field, f"is {value}; must be from 1 to {limit.most}; {limit.remedy}")
    if capacity.block_size & (capacity.block_size - 1):
        raise _bad_capacity("block_size", f"is {capacity.block_size}; must be a power of two from 1 to 256")
    if (num_tokens := capacity.num_blocks * capacity.block_size) > MAX_POOL_TOKENS:
        raise _bad_capacity(
            "num_blocks",
            f"is {capacity.num_blocks}: with block_size {capacity.block_size} the pool holds {num_tokens} tokens; must "
            f"be at most {MAX_POOL_TOKENS}; {CAPACITY_LIMITS[0].remedy}",
        )
    _check_groups(capacity)
    if (num_ids := len(capacity.info.eos_token_ids)) > MAX_EOS_TOKEN_IDS:
        raise _bad_capacity("info.eos_token_ids", f"has {num_ids} ids; must have at most {MAX_EOS_TOKEN_IDS}")


def _check_groups(capacity: scheduler_pb2.WorkerCapacity) -> None:
    """Each group has room for a row at least, so that a sequence that fits the pool can run."""
    if len(capacity.groups) > MAX_GROUPS:
        raise _bad_capacity("groups", f"has {len(capacity.groups)} groups; must have at most {MAX_GROUPS}")
    for index, group in enumerate(capacity.groups):
        field = f"groups[{index}]"
        if not 1 <= group.attention_window <= capacity.info.max_model_len:
            what = f"is {group.attention_window}; must be from 1 to max_model_len {capacity.info.max_model_len}"
            raise _bad_capacity(f"{field}.attention_window", what)
        least = blocks_of_row(group.attention_window, capacity.block_size, capacity.pipeline_depth)
        if not least <= group.num_blocks <= capacity.num_blocks:
            what = f"is {group.num_blocks}; must be from {least}, which one row needs, to {capacity.num_blocks}"
            raise _bad_capacity(f"{field}.num_blocks", what)


def _bad_capacity(field: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"capacity.{field} {what}", field=f"capacity.{field}")


def capacity_from_proto(request: scheduler_pb2.RegisterRequest) -> WorkerCapacity:
    """The capacity of a READY worker. Raises InvalidRequestError with the invalid field."""
    if not request.HasField("capacity"):
        raise InvalidRequestError("capacity is unset; a READY worker must send its capacity", field="capacity")
    capacity = request.capacity
    _check_limits(capacity)
    if capacity.max_num_batched_tokens < capacity.max_num_seqs:
        raise InvalidRequestError(
            f"capacity.max_num_batched_tokens is {capacity.max_num_batched_tokens}; must be at least max_num_seqs "
            f"{capacity.max_num_seqs}, so that a step has a token for every running sequence",
            field="capacity.max_num_batched_tokens",
        )
    return WorkerCapacity(
        worker_id=request.worker_id,
        worker_epoch=request.worker_epoch,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=capacity.info.max_model_len,
        pipeline_depth=capacity.pipeline_depth,
        vocab_size=capacity.info.vocab_size,
        attention_window=capacity.info.attention_window or None,
        max_adapters=capacity.max_adapters,
        snapshot_tokens=capacity.snapshot_tokens or 1,
        num_snapshots=capacity.num_snapshots if capacity.HasField("num_snapshots") else None,
        movement=_movement_from_proto(capacity.blocks) if capacity.HasField("blocks") else None,
        groups=tuple(map(CacheGroup.read, capacity.groups)),
    )


def _movement_from_proto(blocks: scheduler_pb2.BlockMovement) -> BlockMovement:
    if len(blocks.layout) != DIGEST_BYTES:
        raise _bad_capacity("blocks.layout", f"has {len(blocks.layout)} bytes; must have {DIGEST_BYTES}")
    if not 1 <= blocks.block_bytes <= MAX_BLOCK_BYTES:
        raise _bad_capacity("blocks.block_bytes", f"is {blocks.block_bytes}; must be from 1 to {MAX_BLOCK_BYTES}")
    return BlockMovement.read(blocks)


def fetch_to_proto(move: BlockMove, fence: worker_pb2.Fence, source_address: str) -> worker_pb2.FetchBlocksRequest:
    """The order to fill blocks of a worker's pool."""
    extras = move.extras
    request = worker_pb2.FetchBlocksRequest(
        fence=fence,
        after_step_id=move.after_step_id,
        block_ids=_ids_to_bytes(move.block_ids, [extra.block_id for extra in extras]),
        hashes=b"".join((*move.digests, *(extra.digest for extra in extras))),
        token_ids=u32_to_bytes(np.concatenate((move.token_blocks.reshape(-1), *(extra.words for extra in extras)))),
    )
    if move.source is not None:
        request.source.worker_id, request.source.address = move.source.worker_id, source_address
        request.source.worker_epoch = move.source.worker_epoch
        ids = [extra.source_id for extra in extras if extra.source_id is not None]
        request.source.block_ids = _ids_to_bytes(move.source.block_ids, ids)
    return request


def _ids_to_bytes(blocks: I64, more: Sequence[int]) -> bytes:
    return u32_to_bytes(np.array([*blocks.tolist(), *more], np.uint32))


def num_fetched(response: worker_pb2.FetchBlocksResponse, move: BlockMove, keys: BlockKeys | None) -> int:
    """The number of leading blocks and extras of a move that may be committed. With `keys`, one from a tier counts only
    if a scheduler with one of the keys committed it.
    """
    count, digests = response.num_fetched, [*move.digests, *(extra.digest for extra in move.extras)]
    if count > len(digests):
        raise WireError(f"num_fetched is {count}, but the move has {len(digests)} blocks and extras")
    if keys is None or move.source is not None:
        return count
    if len(response.origins) != count * ORIGIN.size:
        raise WireError(f"{len(response.origins)} bytes of origins for {count} blocks")
    for index, (epoch, block_id, seal) in enumerate(ORIGIN.iter_unpack(response.origins)):
        if not keys.is_valid(epoch, block_id, digests[index], seal):
            return index
    return count


def cached_blocks_from_proto(
    messages: Iterable[worker_pb2.ListBlocksResponse],
    *,
    block_size: int,
    num_blocks: int,
    worker_epoch: int = 0,
    keys: BlockKeys | None = None,
) -> list[CachedBlock]:
    """The cached blocks that a worker lists; with `keys`, only those that a scheduler with one of the keys committed.

    Raises WireError if columns disagree or a block is outside the pool.
    """
    blocks: list[CachedBlock] = []
    for message in messages:
        block_ids = u32_from_bytes(message.block_ids, "block_ids")
        tokens = u32_from_bytes(message.token_ids, "token_ids")
        count = len(block_ids)
        if len(message.hashes) != count * DIGEST_BYTES or len(tokens) != count * block_size:
            raise WireError(
                f"{count} block_ids with {len(message.hashes)} bytes of hashes and {len(tokens)} token_ids; "
                f"a block has {DIGEST_BYTES} bytes and {block_size} tokens"
            )
        if count and int(block_ids.max()) >= num_blocks:
            raise WireError(f"block_ids contains {int(block_ids.max())}, but the pool has {num_blocks} blocks")
        if message.seals and len(message.seals) != count * SEAL_BYTES:
            raise WireError(f"{len(message.seals)} bytes of seals; expected {SEAL_BYTES} for each of {count} block_ids")
        per_block = tokens.reshape(count, block_size)
        listed = [
            CachedBlock(block_id, message.hashes[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES], per_block[i])
            for i, block_id in enumerate(block_ids.tolist())
        ]
        if keys is not None:
            listed = _sealed(listed, message.seals or bytes(count * SEAL_BYTES), worker_epoch, keys)
        blocks.extend(listed)
    return blocks


def _sealed(blocks: list[CachedBlock], seals: bytes, worker_epoch: int, keys: BlockKeys) -> list[CachedBlock]:
    """The blocks with a valid seal. `seals`: 24 bytes per block."""
    return [
        block
        for i, block in enumerate(blocks)
        if keys.is_valid(worker_epoch, block.block_id, block.digest, seals[i * SEAL_BYTES : (i + 1) * SEAL_BYTES])
    ]


def root_salt(info: types_pb2.ModelInfo) -> bytes:
    """The properties of the model on which KV depends; part of the root of every digest chain."""
    return model_salt(info.revision, info.dtype, info.determinism, info.weights_revision)
