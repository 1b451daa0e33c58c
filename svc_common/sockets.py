"""Sockets that are bound before a server gets them."""

from __future__ import annotations

import socket


def bind_tcp(listen: str) -> socket.socket:
    """A TCP socket bound to host:port, not yet listening. No other socket may use the port. Raises OSError."""
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((bare, int(port)))
    except OSError:
        bound.close()
        raise
    return bound
