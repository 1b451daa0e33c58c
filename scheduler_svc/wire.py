"""Conversions between the protocol and the core's plain data, and all checks of what other processes send.

Hot messages are columns: one `tobytes` or `frombuffer` per column, nothing per sequence in steady decode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from quire.v1 import scheduler_pb2, types_pb2, worker_pb2

from prefix_index.hashing import model_salt
from request_fields import checks
from request_fields.fields import MAX_BANNED_IDS, FieldError, StopCondition, stop_condition
from request_fields.sizes import SizeLimits
from scheduler_svc.core.messages import (
    CachedBlock,
    Deltas,
    Finished,
    RowFailure,
    RowOpen,
    StepBatch,
    StepOutput,
    WorkerCapacity,
)
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from svc_common.errors import InvalidRequestError, QuireError, UnimplementedError

U32 = npt.NDArray[np.uint32]

LITTLE_U32 = np.dtype("<u4")
DIGEST_BYTES = 16
MAX_REQUEST_ID_CHARS = 256
MAX_TENANT_ID_CHARS = 256
MAX_CACHE_SALT_BYTES = 4096

REASON_TO_PROTO = {
    FinishReason.EOS: types_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}
REASON_FROM_PROTO = {number: reason for reason, number in REASON_TO_PROTO.items()}


class WireError(Exception):
    """Another service broke the protocol. Its stream ends."""


# -- columns ---------------------------------------------------------------------------------------------------------


def _swapped_bytes(column: U32) -> bytes:
    return column.astype(LITTLE_U32).tobytes()


# A column as packed little-endian u32. On little-endian machines this is the array's memory, without a Python call.
u32_to_bytes: Callable[[U32], bytes] = np.ndarray.tobytes if sys.byteorder == "little" else _swapped_bytes


def u32_from_bytes(data: bytes, name: str) -> U32:
    """Packed little-endian u32 as a read-only column; raises WireError when the length is not a multiple of 4."""
    if len(data) % 4:
        raise WireError(f"{name} has {len(data)} bytes; the length must be a multiple of 4")
    return np.frombuffer(data, dtype=LITTLE_U32).astype(np.uint32, copy=False)


# Columns of a step that are mostly empty, in groups of equal length.
CHANGES = (
    ("close_rows",),
    ("table_rows", "table_indices", "table_blocks"),
    ("copy_src", "copy_dst"),
    ("commit_blocks",),
    ("fork_rows", "fork_parents"),
)

# -- steps -----------------------------------------------------------------------------------------------------------


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


# -- requests --------------------------------------------------------------------------------------------------------


def group_from_proto(
    submit: scheduler_pb2.Submit, info: types_pb2.ModelInfo, *, owner: int, origin: str = ""
) -> SequenceGroup:
    """A request as the core's group. Raises InvalidRequestError or UnimplementedError with the field's name.

    The core checks whether the request fits a pool and whether its id is free, and sets `arrival`.
    """
    if not 0 < len(submit.request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id has {len(submit.request_id)} characters; use 1 to {MAX_REQUEST_ID_CHARS}", field="request_id"
        )
    _check_fields(submit)
    prompt = _prompt(submit.prompt_token_ids, info.vocab_size)
    stop = _stop_condition(submit.stop, info.vocab_size)
    n = submit.sampling.n if submit.sampling.HasField("n") else 1
    _check_sizes(n, len(prompt), stop.max_tokens, info)
    outputs, finished = _continuation(submit.continuation, n, stop.max_tokens, info.vocab_size)
    return SequenceGroup(
        request_id=submit.request_id,
        prompt=prompt,
        stop=stop,
        owner=owner,
        handle=submit.handle,
        n=n,
        priority=submit.priority,
        root_key=_root_key(submit.cache_salt),
        sampling=submit.sampling,
        banned_ids=_banned_ids(stop, info),
        banned_before=stop.min_tokens,
        outputs=outputs,
        finished_samples=finished,
        takes_over=submit.takes_over,
        origin=origin,
        tenant_id=_tenant_id(submit.tenant_id),
        timeout_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
    )


@contextmanager
def _field_errors() -> Iterator[None]:
    """Turns a FieldError into the refusal that a gateway gets."""
    try:
        yield
    except FieldError as error:
        kind = UnimplementedError if error.is_unserved else InvalidRequestError
        raise kind(str(error), field=error.field) from None


def _prompt(data: bytes, vocab_size: int) -> U32:
    if not data:
        raise InvalidRequestError(
            "prompt_token_ids is empty; a prompt needs at least 1 token", field="prompt_token_ids"
        )
    try:
        prompt = u32_from_bytes(data, "prompt_token_ids")
    except WireError as error:
        raise InvalidRequestError(str(error), field="prompt_token_ids") from None
    _check_vocab(prompt, vocab_size, "prompt_token_ids")
    return prompt


def _check_vocab(token_ids: U32, vocab_size: int, field: str) -> None:
    highest = int(token_ids.max(initial=0))
    if highest >= vocab_size:
        raise InvalidRequestError(f"{field} holds {highest}; ids must be below vocab_size {vocab_size}", field=field)


def _root_key(cache_salt: str) -> bytes:
    key = cache_salt.encode()
    if len(key) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            f"cache_salt has {len(key)} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed", field="cache_salt"
        )
    return key


def _tenant_id(tenant_id: str) -> str:
    if len(tenant_id) > MAX_TENANT_ID_CHARS:
        raise InvalidRequestError(
            f"tenant_id has {len(tenant_id)} characters; at most {MAX_TENANT_ID_CHARS} are allowed", field="tenant_id"
        )
    return tenant_id


def _check_fields(submit: scheduler_pb2.Submit) -> None:
    with _field_errors():
        checks.check_fields(submit)
    if not submit.sampling.HasField("seed"):
        raise InvalidRequestError("sampling.seed is unset; the gateway draws one", field="sampling.seed")


def _stop_condition(stop: types_pb2.StopParams, vocab_size: int) -> StopCondition:
    if not stop.HasField("max_tokens"):
        raise InvalidRequestError("stop.max_tokens is unset; the gateway fills it in", field="stop.max_tokens")
    if any(token_id >= vocab_size for token_id in stop.stop_token_ids):
        raise InvalidRequestError(
            f"stop.stop_token_ids holds {max(stop.stop_token_ids)}; ids must be below vocab_size {vocab_size}",
            field="stop.stop_token_ids",
        )
    with _field_errors():
        return stop_condition(checks.values_set(stop))


def _banned_ids(stop: StopCondition, info: types_pb2.ModelInfo) -> bytes:
    ids = [token_id for token_id in stop.banned_ids(info.eos_token_ids) if token_id < info.vocab_size]
    most = min(MAX_BANNED_IDS, info.vocab_size - 1)
    if len(ids) > most:
        raise InvalidRequestError(
            f"stop.min_tokens is {stop.min_tokens}, which bans {len(ids)} ids (EOS and stop_token_ids); "
            f"at most {most} can be banned: list fewer stop_token_ids",
            field="stop.min_tokens",
        )
    return u32_to_bytes(np.array(ids, dtype=np.uint32))


def _check_sizes(n: int, num_prompt: int, max_tokens: int, info: types_pb2.ModelInfo) -> None:
    if not 1 <= n <= info.max_num_seqs:
        raise InvalidRequestError(f"sampling.n is {n}; must be from 1 to {info.max_num_seqs}", field="sampling.n")
    with _field_errors():
        SizeLimits(info.max_model_len, info.max_num_blocks * info.block_size).resolve(num_prompt, max_tokens)


def _continuation(
    continuation: types_pb2.Continuation, n: int, max_tokens: int, vocab_size: int
) -> tuple[Sequence[U32], frozenset[int]]:
    if not continuation.samples:
        return (), frozenset()
    outputs: list[U32] = [np.empty(0, dtype=np.uint32) for _ in range(n)]
    seen: set[int] = set()
    for sample in continuation.samples:
        _check_sample(sample, n, max_tokens, seen)
        seen.add(sample.index)
        outputs[sample.index] = np.array(sample.output_token_ids, dtype=np.uint32)
        _check_vocab(outputs[sample.index], vocab_size, "continuation.samples.output_token_ids")
    finished = frozenset(sample.index for sample in continuation.samples if sample.finished)
    if len(finished) == n:
        raise InvalidRequestError(
            "continuation says that every sample has finished; nothing is left to do", field="continuation"
        )
    return outputs, finished


def _check_sample(sample: types_pb2.SampleState, n: int, max_tokens: int, seen: set[int]) -> None:
    if sample.index >= n:
        raise InvalidRequestError(
            f"continuation names sample {sample.index}; the request has n = {n}", field="continuation.samples.index"
        )
    if sample.index in seen:
        raise InvalidRequestError(f"continuation names sample {sample.index} twice", field="continuation.samples.index")
    if len(sample.output_token_ids) > max_tokens:
        raise InvalidRequestError(
            f"continuation holds {len(sample.output_token_ids)} tokens of sample {sample.index}; "
            f"max_tokens is {max_tokens}",
            field="continuation.samples.output_token_ids",
        )


def cancel_reason(cancel: scheduler_pb2.Cancel) -> FinishReason:
    """Why a gateway ends a request: STOP if a stop string matched, else ABORTED."""
    reason = REASON_FROM_PROTO.get(cancel.reason, FinishReason.ABORTED)
    return FinishReason.STOP if reason is FinishReason.STOP else FinishReason.ABORTED


def refusal_to_proto(error: QuireError) -> scheduler_pb2.Refusal:
    """An error as the answer to one Submit."""
    return scheduler_pb2.Refusal(
        code=error.code.value[0],
        message=error.message,
        field=error.field,
        retry_after_ms=0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000)),
    )


# -- results ---------------------------------------------------------------------------------------------------------


def deltas_to_proto(parts: Sequence[Deltas]) -> scheduler_pb2.Deltas:
    """The deltas of one or several updates for one gateway, in order, as one message."""
    deltas = parts[0] if len(parts) == 1 else merge_deltas(parts)
    return scheduler_pb2.Deltas(
        handles=u32_to_bytes(deltas.handles),
        sample_indices=u32_to_bytes(deltas.sample_indices) if np.count_nonzero(deltas.sample_indices) else b"",
        offsets=u32_to_bytes(deltas.offsets),
        token_ids=u32_to_bytes(deltas.token_ids),
        finished=[_finished_to_proto(finished) for finished in deltas.finished],
    )


def merge_deltas(parts: Sequence[Deltas]) -> Deltas:
    """Concatenates columns. A finish stays behind its tokens, because all finishes come last."""
    return Deltas(
        owners=np.concatenate([part.owners for part in parts]),
        handles=np.concatenate([part.handles for part in parts]),
        sample_indices=np.concatenate([part.sample_indices for part in parts]),
        offsets=np.concatenate([part.offsets for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        finished=[finished for part in parts for finished in part.finished],
    )


def split_deltas(deltas: Deltas) -> dict[int, Deltas]:
    """Deltas per owner. With one owner, the usual case, nothing is copied."""
    if deltas.owner is not None and not deltas.finished:
        return {deltas.owner: deltas}
    columns = deltas.owners
    is_uniform = len(columns) > 0 and not np.count_nonzero(columns != columns[0])
    owners = {int(columns[0])} if is_uniform else set(np.unique(columns).tolist())
    if deltas.finished:
        owners |= {finished.group.owner for finished in deltas.finished}
    if len(owners) == 1:
        return {owners.pop(): deltas}
    return {owner: _of_owner(deltas, owner) for owner in owners}


def _of_owner(deltas: Deltas, owner: int) -> Deltas:
    mine = deltas.owners == owner
    return Deltas(
        owners=deltas.owners[mine],
        handles=deltas.handles[mine],
        sample_indices=deltas.sample_indices[mine],
        offsets=deltas.offsets[mine],
        token_ids=deltas.token_ids[mine],
        finished=[finished for finished in deltas.finished if finished.group.owner == owner],
    )


def _finished_to_proto(finished: Finished) -> scheduler_pb2.SampleFinished:
    return scheduler_pb2.SampleFinished(
        handle=finished.group.handle,
        sample_index=finished.sample_index,
        reason=REASON_TO_PROTO[finished.reason],
        stop_token_id=finished.stop_token_id,
        usage=types_pb2.Usage(
            prompt_tokens=len(finished.group.prompt),
            cached_tokens=finished.num_cached_tokens,
            output_tokens=finished.num_output_tokens,
            recomputed_tokens=finished.num_recomputed_tokens,
        ),
        message=finished.message,
        preemptions=finished.num_preemptions,
    )


# -- workers ---------------------------------------------------------------------------------------------------------


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
