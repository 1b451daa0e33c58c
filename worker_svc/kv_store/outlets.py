"""Where the records of a ReadBlocks call go: into memory of the caller, or into messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from quire.internal.v1.worker_pb2 import NixlMemory, ReadBlocksResponse

from worker_svc.kv_store.nixl_memory import NixlAgent
from worker_svc.wire import records_to_wire

MESSAGE_BYTES = 2 << 20  # a few records, or a piece of one: gRPC copies it several times, in the cache of a core
PART_BYTES = 8 << 20  # of records that are written to memory of the caller before an answer names them

Pack = Callable[[memoryview], int]  # writes records, and returns how many
Answer: TypeAlias = "ReadBlocksResponse | bytes"  # bytes: serialized


class Outlet(Protocol):
    """For one call."""

    part_bytes: ClassVar[int]  # of records, for one `send`
    has_ended: bool  # a wanted block was not there

    def send(self, pack: Pack, most: int, size: int) -> tuple[int, list[Answer]]:
        """Take what `pack` writes: at most `most` records of `size` bytes. Returns how many, and the answer for them.
        Called by one thread.
        """


@dataclass(slots=True)
class Messages:
    """For a caller whose memory this process cannot write to."""

    part_bytes: ClassVar[int] = MESSAGE_BYTES
    has_ended: bool = False

    def send(self, pack: Pack, most: int, size: int) -> tuple[int, list[Answer]]:
        place = np.empty(most * size, np.uint8).data
        count = pack(place)
        starts = range(0, count * size, MESSAGE_BYTES)
        return count, [records_to_wire(place[start : min(start + MESSAGE_BYTES, count * size)]) for start in starts]


@dataclass(slots=True)
class Shared:
    """For a caller on this host."""

    part_bytes: ClassVar[int] = PART_BYTES
    memory: memoryview  # what is left of it
    has_ended: bool = False

    def send(self, pack: Pack, most: int, size: int) -> tuple[int, list[Answer]]:
        count = pack(self.memory)
        self.memory = self.memory[count * size :]
        return count, [ReadBlocksResponse(num_shared=count)]


@dataclass(slots=True)
class OverNixl:
    """For a caller on another host that NIXL reaches. Raises NixlError."""

    part_bytes: ClassVar[int] = PART_BYTES
    agent: NixlAgent
    memory: NixlMemory
    num_written: int = 0  # bytes
    has_ended: bool = False

    def send(self, pack: Pack, most: int, size: int) -> tuple[int, list[Answer]]:
        place = self.agent.staging(most * size)
        count = pack(place)
        if count:
            self.agent.write(self.memory, self.num_written, place[: count * size])
        self.num_written += count * size
        return count, [ReadBlocksResponse(num_shared=count)]
