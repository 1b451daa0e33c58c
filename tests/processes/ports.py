"""Ports that nobody listens on."""

from __future__ import annotations

import random
import socket

RANGE = range(20_000, 32_000)  # below the ports that the system gives to outgoing connections


def free_port() -> int:
    """A port of the loopback on which nobody listens now."""
    for port in random.SystemRandom().sample(RANGE, 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0 and _can_bind(port):
                return port
    raise OSError(f"no free port found between {RANGE.start} and {RANGE.stop}")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
