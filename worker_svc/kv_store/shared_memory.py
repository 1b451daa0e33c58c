"""Memory that two workers of one host share while one reads blocks of the other.

The reader makes it and tells its name; it ends with the processes that have it open, so nothing is left behind. The
other worker finds it through /proc, where it must have exactly this name, which is random. A process on another host,
or in another container without a common view of processes, does not find it and sends the bytes instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets

PREFIX = "quire-blocks-"
NAME_BYTES = 16
SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: a mapping of it never ends at a hole
F_ADD_SEALS, F_GET_SEALS = 1033, 1034


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
