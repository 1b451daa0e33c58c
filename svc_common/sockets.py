"""Sockets that are bound before a server gets them."""

from __future__ import annotations

import socket


def bind_tcp(listen: str, *, shares_port: bool = False) -> socket.socket:
    """A TCP socket bound to host:port, not yet listening. Raises OSError.

    `shares_port`: other sockets with SO_REUSEPORT may use the port too, and the kernel spreads connections over them.
    Otherwise no other socket may use the port.
    """
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    option = socket.SO_REUSEPORT if shares_port else socket.SO_REUSEADDR
    bound = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((bare, int(port)))
    except OSError:
        bound.close()
        raise
    return bound
