"""Messages between the gateway and its sandbox processes: the length in 4 bytes, then JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

LENGTH = struct.Struct(">I")


def to_frame(content: Mapping[str, Any]) -> bytes:
    """A message as bytes. Raises ValueError for content that JSON cannot represent."""
    data = json.dumps(content, ensure_ascii=False).encode()
    return LENGTH.pack(len(data)) + data


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    content: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(header)[0]))
    return content
