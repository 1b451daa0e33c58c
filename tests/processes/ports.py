"""Free ports of the loopback interface."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

PER_PROCESS = 400
NUM_PORTS = 10_000
# The kernel takes the ports of outgoing connections from this range, by default 32768 to 60999.
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def first_port(outgoing: str) -> int:
    """The first of NUM_PORTS ports outside the range of outgoing connections, if there are as many.

    `quire up` chooses from 20000 to 31999 at random, so a port there may be taken before a service binds it.
    """
    low, high = map(int, outgoing.split())
    for first in (10_000, 2_000, high + 1):
        if first + NUM_PORTS <= low or high < first <= 2**16 - NUM_PORTS:
            return first
    return 10_000


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
    first = first_port(OUTGOING.read_text() if OUTGOING.exists() else "32768 60999")
    count = NUM_PORTS // PER_PROCESS
    for number in range(os.getpid(), os.getpid() + count):
        start = first + number % count * PER_PROCESS
        if _lock(Path(tempfile.gettempdir(), f"quire-test-ports-{os.getuid()}-{start}")):
            return start
    raise OSError(f"{count} test processes use all ports from {first} to {first + NUM_PORTS - 1}")


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
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # gRPC does the same: TIME_WAIT does not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
