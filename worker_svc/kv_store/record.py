"""A block outside the pool, in a file or on its way to another worker: its key, its tokens, its payload, a checksum.
A snapshot is the same, with the words of its `state_id` in place of tokens.

    magic, sizes, layout, digest, origin | tokens u32[block_size] | payload | xxh3_128 of everything before

A reader says which block it wants. Whatever is not exactly that block, bit by bit, is a BadRecordError: a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from xxhash import xxh3_128_digest

from prefix_index.hashing import block_key
from step_protocol.columns import U32, u32_to_bytes
from worker_svc.engine.decoder.pool.block_payload import Bytes, Movable, Reader
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
    block_id: int = 0  # where it goes


@dataclass(frozen=True, slots=True)
class Found:
    """The block that a record holds."""

    origin: bytes  # packed
    payload: Bytes


class RecordFormat:
    """Makes and checks the records of the blocks of a pool, which all have the same size. Those of other cache groups,
    and of snapshots, have other ones, and ids that follow those of the blocks: see `of`.
    """

    def __init__(self, layout: bytes, blocks: Movable, first_id: int = 0) -> None:
        self.layout = layout
        self.blocks = blocks
        self._reader: Reader = blocks
        self.first_id = first_id
        self.end_id = first_id + blocks.num_blocks
        self.others: list[RecordFormat] = []
        for other in blocks.others:
            self.others.append(RecordFormat(layout, other, self.end_id))
            self.end_id = self.others[-1].end_id
        self._payload_at = HEADER.size + 4 * blocks.block_size
        self._end = self._payload_at + blocks.payload_bytes
        self.num_bytes = self._end + CHECKSUM_BYTES

    def of(self, block_id: int) -> RecordFormat:
        """The format of what has this id."""
        return next((one for one in reversed(self.others) if one.first_id <= block_id), self)

    def parts(self, ids: Sequence[int], max_bytes: int) -> Iterator[tuple[RecordFormat, slice]]:
        """What has these ids, in parts of one format, of at most `max_bytes` each if one record is not larger."""
        start = 0
        for end in range(1, len(ids) + 1):
            part = self.of(ids[start])
            is_full = (end + 1 - start) * part.num_bytes > max_bytes
            if end == len(ids) or is_full or self.of(ids[end]) is not part:
                yield part, slice(start, end)
                start = end

    @contextmanager
    def reading(self, wanted: Sequence[tuple[int, bytes]]) -> Iterator[Self]:
        """The same format, to pack these blocks: their ids and digests. It is faster for many blocks on a device."""
        with self.blocks.reading([(block - self.first_id, digest) for block, digest in wanted]) as reader:
            found = copy(self)
            found._reader = reader
            yield found

    def pack(self, digest: bytes, origin: Origin, into: Bytes) -> bool:
        """Write the record of a block to `into`. False if the pool does not hold the block; `into` has any content."""
        found = self._reader.read(origin.block_id - self.first_id, digest, into[self._payload_at : self._end])
        if found is None:
            return False
        tokens, payload = found
        view, key = into.data, block_key(digest, self.layout)
        HEADER.pack_into(view, 0, MAGIC, len(tokens), len(payload), key, origin.pack())
        view[HEADER.size : self._payload_at] = u32_to_bytes(tokens)
        view[self._end :] = xxh3_128_digest(view[: self._end])
        return True

    def unpack(self, data: bytes | bytearray | memoryview, wanted: WantedBlock) -> Found:
        """The wanted block. Raises BadRecordError if the record is damaged, or is that of another block or layout."""
        view, end = memoryview(data), self._end
        if len(view) != self.num_bytes:
            raise BadRecordError(f"it has {len(view)} bytes, expected {self.num_bytes}")
        if xxh3_128_digest(view[:end]) != view[end:]:
            raise BadRecordError("its checksum is wrong")
        magic, block_size, num_bytes, key, origin = HEADER.unpack_from(view)
        if (magic, block_size, num_bytes) != (MAGIC, len(wanted.tokens), self.blocks.payload_bytes):
            raise BadRecordError("its header is that of another format")
        if key != block_key(wanted.digest, self.layout):
            raise BadRecordError("it is the record of another block")
        if view[HEADER.size : self._payload_at] != u32_to_bytes(wanted.tokens):
            raise BadRecordError("its tokens differ from those of the wanted block")
        return Found(origin, np.frombuffer(view[self._payload_at : end], np.uint8))
