"""Where the records of a ReadBlocks call go: into memory of the caller, or into messages.

Two workers of one host share memory. The reader makes it and tells its name; it ends with the processes that have it
open, so nothing is left behind. The other worker finds it through /proc, where it must have exactly this name, which
is random. A process on another host, or in another container without a common view of processes, does not find it and
sends the bytes instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from quire.internal.v1.worker_pb2 import NixlMemory, ReadBlocksResponse

from worker_svc.kv_store.nixl_memory import NixlAgent
from worker_svc.wire import records_to_wire

MESSAGE_BYTES = 2 << 20  # a few records, or a piece of one: gRPC copies it several times, in the cache of a core
PART_BYTES = 8 << 20  # of records that are written to memory of the caller before an answer names them
PREFIX = "quire-blocks-"
NAME_BYTES = 16
SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: a mapping of it never ends at a hole
F_ADD_SEALS, F_GET_SEALS = 1033, 1034


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


class SharedMemory:
    """Memory for the records of one call. `view` stays valid after `close`, which ends the access of others."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if this system has no such memory."""
        self.name = secrets.token_hex(NAME_BYTES)
        self.pid = os.getpid()
        self.descriptor = os.memfd_create(PREFIX + self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, SEALS)
            self.view = memoryview(mmap.mmap(self.descriptor, num_bytes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def find_shared_memory(pid: int, descriptor: int, name: str, num_bytes: int) -> memoryview | None:
    """The memory that another process has made; None if it is not on this host, or is not what it should be."""
    path = f"/proc/{pid}/fd/{descriptor}"
    with contextlib.suppress(OSError, ValueError):
        if len(name) != 2 * NAME_BYTES or os.readlink(path) != f"/memfd:{PREFIX}{name} (deleted)":
            return None
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(opened, F_GET_SEALS) & SEALS == SEALS and os.fstat(opened).st_size >= num_bytes:
                return memoryview(mmap.mmap(opened, num_bytes))
        finally:
            os.close(opened)
    return None
