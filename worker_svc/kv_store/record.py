"""A block outside the pool, in a file or on its way to another worker: its key, its tokens, its payload, a checksum.

    magic, sizes, layout, digest, origin | tokens u32[block_size] | payload | xxh3_128 of everything before

A reader says which block it wants. Whatever is not exactly that block, bit by bit, is a BadRecordError: a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from prefix_index.hashing import block_key
from step_protocol.columns import U32, u32_to_bytes
from worker_svc.seals import SEAL_BYTES

MAGIC = b"QKV1"
CHECKSUM_BYTES = 16
ORIGIN = struct.Struct(f"<QI{SEAL_BYTES}s")
HEADER = struct.Struct(f"<4sIQ32s{ORIGIN.size}s")  # magic, block size, payload bytes, key, origin


class BadRecordError(ValueError):
    """The bytes are not the record of the wanted block; the message says what differs."""


class Origin(NamedTuple):
    """Where a block was committed. With the seal, a scheduler can check that a holder of its key committed it."""

    worker_epoch: int
    block_id: int
    seal: bytes = bytes(SEAL_BYTES)

    def pack(self) -> bytes:
        """Bytes of fixed size."""
        return ORIGIN.pack(*self)


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block that a reader wants."""

    digest: bytes
    tokens: U32  # [block_size]


@dataclass(frozen=True, slots=True)
class Found:
    """The block that a record holds."""

    origin: bytes  # packed
    payload: npt.NDArray[np.uint8]


def record_bytes(block_size: int, payload_bytes: int) -> int:
    """The size of a record, which is the same for all blocks of a layout."""
    return HEADER.size + 4 * block_size + payload_bytes + CHECKSUM_BYTES


def pack_record(
    digest: bytes, layout: bytes, tokens: U32, payload: npt.NDArray[np.uint8], origin: Origin
) -> list[bytes | memoryview]:
    """The record of a block, in pieces, so that the payload is not copied."""
    head = HEADER.pack(MAGIC, len(tokens), len(payload), block_key(digest, layout), origin.pack())
    pieces: list[bytes | memoryview] = [head, u32_to_bytes(tokens), payload.data]
    return [*pieces, _checksum(pieces)]


def unpack_record(
    data: bytes | bytearray | memoryview, wanted: WantedBlock, layout: bytes, payload_bytes: int
) -> Found:
    """The wanted block. Raises BadRecordError if the record is damaged, or is that of another block or layout."""
    start = HEADER.size + 4 * len(wanted.tokens)
    end = start + payload_bytes
    view = memoryview(data)
    if len(view) != end + CHECKSUM_BYTES:
        raise BadRecordError(f"it has {len(view)} bytes, expected {end + CHECKSUM_BYTES}")
    if _checksum([view[:end]]) != view[end:]:
        raise BadRecordError("its checksum is wrong")
    magic, block_size, num_bytes, key, origin = HEADER.unpack_from(view)
    if (magic, block_size, num_bytes) != (MAGIC, len(wanted.tokens), payload_bytes):
        raise BadRecordError("its header is that of another format")
    if key != block_key(wanted.digest, layout):
        raise BadRecordError("it is the record of another block")
    if view[HEADER.size : start] != u32_to_bytes(wanted.tokens):
        raise BadRecordError("its tokens differ from those of the wanted block")
    return Found(origin, np.frombuffer(view[start:end], np.uint8))


def _checksum(pieces: Sequence[bytes | memoryview]) -> bytes:
    hasher = xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()
