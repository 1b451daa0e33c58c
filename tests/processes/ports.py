"""Ports that nobody listens on."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, LAST = 20_000, 32_000  # below the ports that the system gives to outgoing connections
PER_PROCESS = 400

# No port is given out twice soon, because a service binds it seconds later; and test processes that run at the same
# time take theirs from different slices.
_start = FIRST + os.getpid() % ((LAST - FIRST) // PER_PROCESS) * PER_PROCESS
_candidates = itertools.cycle(range(_start, _start + PER_PROCESS))


def free_port() -> int:
    """A port of the loopback on which nobody listens now."""
    for port in itertools.islice(_candidates, PER_PROCESS):
        if _can_bind(port):
            return port
    raise OSError(f"no free port found between {_start} and {_start + PER_PROCESS}")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: waiting remains do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
