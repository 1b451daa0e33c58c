"""Conversions between the worker protocol and the core's plain data, and all checks of what workers send.

Hot messages are columns: nothing per sequence in steady decode.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.v1 import scheduler_pb2, types_pb2, worker_pb2

from prefix_index.hashing import model_salt
from scheduler_svc.columns import WireError, u32_from_bytes, u32_to_bytes
from scheduler_svc.core.messages import (
    CachedBlock,
    RowFailure,
    RowOpen,
    StepBatch,
    StepOutput,
    WorkerCapacity,
)
from svc_common.errors import InvalidRequestError

DIGEST_BYTES = 16

# Columns of a step that are mostly empty, in groups of equal length.
CHANGES = (
    ("close_rows",),
    ("table_rows", "table_indices", "table_blocks"),
    ("copy_src", "copy_dst"),
    ("commit_blocks",),
    ("fork_rows", "fork_parents"),
)


def step_batch_to_proto(batch: StepBatch, fence: worker_pb2.Fence) -> worker_pb2.StepBatch:
    """One step for the worker that `fence` names."""
    message = worker_pb2.StepBatch(
        step_id=batch.step_id,
        fence=fence,
        opens=[_row_open_to_proto(row_open) for row_open in batch.opens],
        commit_hashes=b"".join(batch.commit_digests),
        rows=u32_to_bytes(batch.rows),
        context_lens=u32_to_bytes(batch.context_lens),
        slot_mapping=u32_to_bytes(batch.slot_mapping),
    )
    if not batch.is_decode and (batch.query_lens != 1).any():
        message.query_lens = u32_to_bytes(batch.query_lens)
    if not (batch.is_decode or batch.sample_mask.all()):
        message.sample_mask = batch.sample_mask.tobytes()
    for names in CHANGES:
        if len(getattr(batch, names[0])):
            for name in names:
                setattr(message, name, u32_to_bytes(getattr(batch, name)))
    return message


def _row_open_to_proto(row_open: RowOpen) -> worker_pb2.RowOpen:
    return worker_pb2.RowOpen(
        row=row_open.row,
        token_ids=u32_to_bytes(row_open.token_ids),
        prompt_len=row_open.prompt_len,
        block_table=u32_to_bytes(row_open.block_table),
        num_computed_tokens=row_open.num_computed_tokens,
        sampling=row_open.group.sampling,
        sample_index=row_open.sample_index,
        fork_of_row=row_open.fork_of_row,
        request_id=row_open.group.request_id,
        banned_ids=row_open.group.banned_ids,
        banned_before=row_open.group.banned_before,
    )


def step_output_from_proto(
    message: worker_pb2.StepOutput, *, worker_id: str, worker_epoch: int, step_id: int
) -> StepOutput:
    """The answer to step `step_id`. Raises WireError if it is malformed or of another step or epoch."""
    if message.worker_epoch != worker_epoch:
        raise WireError(f"answer of worker epoch {message.worker_epoch:#x}; the leased epoch is {worker_epoch:#x}")
    if message.step_id != step_id:
        raise WireError(f"answer to step {message.step_id}; the oldest step in flight is {step_id}")
    rows = u32_from_bytes(message.rows, "rows")
    token_ids = u32_from_bytes(message.token_ids, "token_ids")
    if len(rows) != len(token_ids):
        raise WireError(f"step {step_id}: {len(rows)} rows but {len(token_ids)} token_ids")
    failures = [RowFailure(error.row, _row_error_text(error)) for error in message.errors]
    return StepOutput(worker_id, step_id, rows, token_ids, failures)


def _row_error_text(error: worker_pb2.RowError) -> str:
    is_known = error.code in worker_pb2.RowErrorCode.values()
    code = worker_pb2.RowErrorCode.Name(error.code) if is_known else f"code {error.code}"  # a newer worker's
    code = code.removeprefix("ROW_ERROR_CODE_").lower()
    return f"{code}: {error.message}" if error.message else code


def capacity_from_proto(request: scheduler_pb2.RegisterRequest) -> WorkerCapacity:
    """The capacity of a READY worker. Raises InvalidRequestError with the invalid field."""
    if not request.HasField("capacity"):
        raise InvalidRequestError("capacity is unset; a worker that is READY must send it", field="capacity")
    capacity = request.capacity
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "pipeline_depth"):
        if getattr(capacity, name) < 1:
            raise InvalidRequestError(f"capacity.{name} is 0; must be at least 1", field=f"capacity.{name}")
    for name in ("max_model_len", "vocab_size"):
        if getattr(capacity.info, name) < 1:
            raise InvalidRequestError(f"capacity.info.{name} is 0; must be at least 1", field=f"capacity.info.{name}")
    if capacity.max_num_batched_tokens < capacity.max_num_seqs:
        raise InvalidRequestError(
            f"capacity.max_num_batched_tokens is {capacity.max_num_batched_tokens}; must be at least max_num_seqs "
            f"{capacity.max_num_seqs}, or a step could not give every running sequence one token",
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
    )


def cached_blocks_from_proto(
    messages: Iterable[worker_pb2.ListBlocksResponse], *, block_size: int, num_blocks: int
) -> list[CachedBlock]:
    """Committed blocks of an adopted pool. Raises WireError if columns disagree or a block is outside the pool."""
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
            raise WireError(f"block {int(block_ids.max())} of a pool of {num_blocks}")
        per_block = tokens.reshape(count, block_size)
        blocks.extend(
            CachedBlock(block_id, message.hashes[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES], per_block[i])
            for i, block_id in enumerate(block_ids.tolist())
        )
    return blocks


def root_salt(info: types_pb2.ModelInfo) -> bytes:
    """What KV depends on besides tokens: part of the root of every digest chain."""
    return model_salt(info.revision, info.dtype, info.determinism)
