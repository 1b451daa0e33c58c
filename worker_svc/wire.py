"""Conversions between the protocol and the engine's data; step_protocol/proto.py converts steps and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import types_pb2

from request_fields import checks
from step_protocol.columns import U32, WireError, u32_to_bytes
from step_protocol.messages import StepBatch
from step_protocol.proto import batch_from_proto
from step_protocol.types import POOLING_KINDS, AnnouncedModel, WorkerAdapter
from svc_common.errors import InvalidRequestError
from worker_svc.engine.config import EngineInfo
from worker_svc.seals import TAG_BYTES, Seals

KIND_NUMBERS = {kind: types_pb2.PoolingKind.ValueType(number) for number, kind in POOLING_KINDS.items()}
DATA_TAG = worker_pb2.ReadBlocksResponse.DATA_FIELD_NUMBER << 3 | 2  # a field of bytes
DATA_HEAD_BYTES = 5
MAX_REASON = 500  # characters of a degradation
CAPACITY_FIELDS = (  # fields of EngineInfo that are sent as they are
    *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"),
    *("max_adapters", "num_snapshots", "snapshot_tokens"),
)
DETERMINISM = {"exact": types_pb2.DETERMINISM_EXACT, "best_effort": types_pb2.DETERMINISM_BEST_EFFORT}


# -- steps -----------------------------------------------------------------------------------------------------------


def step_batch_from_proto(message: worker_pb2.StepBatch) -> StepBatch:
    """One step for the engine. InvalidRequestError names the column, its value and the expected one."""
    try:
        return batch_from_proto(message)
    except WireError as error:
        raise InvalidRequestError(f"batch.{error}", field=f"batch.{error.field}") from None


def commit_tags(message: worker_pb2.StepBatch) -> bytes:
    """The tags of the committed blocks, 16 bytes each; empty if there are none."""
    expected = TAG_BYTES * (len(message.commit_blocks) // 4)
    if message.commit_tags and len(message.commit_tags) != expected:
        raise InvalidRequestError(
            f"batch.commit_tags has {len(message.commit_tags)} bytes, expected {expected} ({TAG_BYTES} per item of "
            "commit_blocks) or none",
            field="batch.commit_tags",
        )
    return message.commit_tags


def blocks_to_proto(block_ids: U32, hashes: list[bytes], token_ids: U32, seals: Seals) -> worker_pb2.ListBlocksResponse:
    """Committed blocks. block_ids [N], N digests of 16 bytes, token_ids [N, block_size]."""
    return worker_pb2.ListBlocksResponse(
        block_ids=u32_to_bytes(block_ids),
        hashes=b"".join(hashes),
        token_ids=u32_to_bytes(token_ids),
        seals=seals.of(block_ids),
    )


# -- model info out --------------------------------------------------------------------------------------------------


def model_info_to_proto(info: EngineInfo, bundle_digest: bytes) -> types_pb2.ModelInfo:
    """The facts about the model that a gateway needs. `bundle_digest` is empty if the folder has no bundle."""
    return types_pb2.ModelInfo(
        default_sampling=types_pb2.SamplingParams(**checks.defaults_of_model(info.default_sampling)),
        bundle_digest=bundle_digest,
        max_num_blocks=info.num_blocks,
        dtype=info.dtype,
        determinism=DETERMINISM[info.determinism],
        quantization=info.quantize or "",
        kv_cache_dtype="" if info.kv_cache_dtype == "auto" else info.kv_cache_dtype,
        pooling=None
        if info.pooling is None
        else types_pb2.PoolingInfo(**asdict(info.pooling) | {"kind": KIND_NUMBERS[info.pooling.kind]}),
        attention_window=info.attention_window or 0,
        encoder=None if info.encoder is None else types_pb2.EncoderInfo(**asdict(info.encoder)),
        images=None if info.images is None else types_pb2.ImageInfo(**asdict(info.images)),
        **{name: getattr(info, name) for name in AnnouncedModel.__match_args__},
    )


def capacity_to_proto(
    info: EngineInfo,
    *,
    bundle_digest: bytes,
    pipeline_depth: int,
    blocks: scheduler_pb2.BlockMovement | None = None,
) -> scheduler_pb2.WorkerCapacity:
    """The capacity of this worker, for its registration."""
    return scheduler_pb2.WorkerCapacity(
        info=model_info_to_proto(info, bundle_digest),
        pipeline_depth=pipeline_depth,
        blocks=blocks,
        groups=[scheduler_pb2.CacheGroup(**asdict(group)) for group in info.groups],
        degradations=[reason[:MAX_REASON] for reason in info.degradations],
        **{name: getattr(info, name) for name in CAPACITY_FIELDS},
    )


def adapters_to_proto(entries: Sequence[WorkerAdapter]) -> list[worker_pb2.WorkerAdapter]:
    """The adapters of this worker, for its registration."""
    return [worker_pb2.WorkerAdapter(**asdict(entry)) for entry in entries]


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """`data` in pieces of at most `size` bytes; one empty piece if there is none."""
    yield from (data[start : start + size] for start in range(0, max(len(data), 1), size))


# -- records of blocks -----------------------------------------------------------------------------------------------


class SentRecords(NamedTuple):
    """A ReadBlocksResponse."""

    data: memoryview
    num_shared: int = 0


def records_to_wire(data: memoryview) -> bytes:
    """A ReadBlocksResponse with this data, with one copy of it: protobuf makes two, and two where it is read."""
    return b"".join((_data_head(len(data)), data))


def records_from_wire(message: bytes) -> SentRecords:
    """Raises DecodeError."""
    if message[:DATA_HEAD_BYTES] == _data_head(len(message) - DATA_HEAD_BYTES):
        return SentRecords(memoryview(message)[DATA_HEAD_BYTES:])
    found = worker_pb2.ReadBlocksResponse.FromString(message)
    return SentRecords(memoryview(found.data), found.num_shared)


def _data_head(num_bytes: int) -> bytes:
    """What stands before the bytes of `data`: its tag, and its length as a number of four bytes."""
    return bytes([DATA_TAG, *(num_bytes >> shift & 0x7F | 0x80 for shift in (0, 7, 14)), num_bytes >> 21 & 0x7F])
