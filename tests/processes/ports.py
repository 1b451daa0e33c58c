"""Ports that nobody listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of the loopback that was free a moment ago; the kernel hands it out again only after all others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
