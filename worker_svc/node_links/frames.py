"""Frames on a connection: a length of four bytes, little-endian, then the content. Texts are JSON objects.

Every read has a limit, and reads of a process that is not known yet have a deadline.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("<I")
MAX_TEXT = 64 << 10
MAX_MESSAGE = 512 << 20  # 256 rows of 131,072 tokens that start in one step have 128 MiB
PIECE = 1 << 20  # memory is taken as bytes arrive, not by the announced length
# A host that is lost without a FIN is noticed after about 20 s.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class LinkError(OSError):
    """The other end is lost, or does not follow the protocol."""


def prepare(connection: socket.socket) -> None:
    """Sends small frames at once and notices a lost host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if option := getattr(socket, name, None):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def set_deadline(connection: socket.socket, deadline: float | None) -> None:
    """Bounds the next call on the connection. Raises LinkError if the deadline has passed."""
    if deadline is None:
        connection.settimeout(None)
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise LinkError("the handshake took too long")
    connection.settimeout(remaining)


def read(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly `size` bytes."""
    parts = bytearray()
    while len(parts) < size:
        set_deadline(connection, deadline)
        part = connection.recv(min(size - len(parts), PIECE))
        if not part:
            raise LinkError("the connection was closed")
        parts += part
    return bytes(parts)


def send_frame(connection: socket.socket, content: bytes) -> None:
    connection.sendall(LENGTH.pack(len(content)) + content)


def receive_frame(connection: socket.socket, limit: int, deadline: float | None = None) -> bytes:
    """The content of the next frame. Raises LinkError if it is longer than `limit`."""
    (length,) = LENGTH.unpack(read(connection, LENGTH.size, deadline))
    if length > limit:
        raise LinkError(f"a frame has {length} bytes; the limit is {limit}")
    return read(connection, length, deadline)


def send_text(connection: socket.socket, text: dict[str, Any]) -> None:
    send_frame(connection, json.dumps(text).encode())


def receive_text(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    content = receive_frame(connection, MAX_TEXT, deadline)
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(content)
    if not isinstance(found, dict):
        raise LinkError("a frame is not a JSON object")
    return found
