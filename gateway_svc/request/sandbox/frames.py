"""Messages between the gateway and its sandbox processes: the length in 4 bytes, then JSON.

A message may also carry bytes, its entry `data`: they follow a line break after the JSON, which has none.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

LENGTH = struct.Struct(">I")
DATA = "data"


def to_frame(content: Mapping[str, Any], data: bytes | None = None) -> bytes:
    """A message as bytes. Raises ValueError for content that JSON cannot represent."""
    text = json.dumps(content, ensure_ascii=False).encode()
    if data is None:
        return LENGTH.pack(len(text)) + text
    return b"".join((LENGTH.pack(len(text) + 1 + len(data)), text, b"\n", data))


def parse_frame(payload: bytes) -> dict[str, Any]:
    """The content of a message, without its length."""
    text, line_break, data = payload.partition(b"\n")
    content: dict[str, Any] = json.loads(text)
    return content | {DATA: data} if line_break else content


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return parse_frame(stream.read(LENGTH.unpack(header)[0]))
