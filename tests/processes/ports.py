"""Free ports of the loopback interface."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 20_000, 32_000  # below the kernel's range for outgoing connections
PER_PROCESS = 400


def _lock(path: Path) -> bool:
    """Whether this process now holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    return True


def _own_slice() -> int:
    """The first port of a slice that no other test process uses: this process holds its lock until it ends."""
    count = (LAST - FIRST) // PER_PROCESS
    for number in range(os.getpid(), os.getpid() + count):
        start = FIRST + number % count * PER_PROCESS
        if _lock(Path(tempfile.gettempdir(), f"quire-test-ports-{os.getuid()}-{start}")):
            return start
    raise OSError(f"{count} test processes use all ports from {FIRST} to {LAST}")


# The cycle reuses a port as late as possible, because a service may bind it seconds later.
_start = _own_slice()
_candidates = itertools.cycle(range(_start, _start + PER_PROCESS))


def free_port() -> int:
    """A port of the loopback interface on which no process listens now."""
    for port in itertools.islice(_candidates, PER_PROCESS):
        if _can_bind(port):
            return port
    raise OSError(f"no free port found between {_start} and {_start + PER_PROCESS}")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT does not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
