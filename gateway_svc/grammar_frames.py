"""Messages between the gateway and the processes that compile grammars: the length in 4 bytes, then JSON."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

LENGTH = struct.Struct(">I")
GRAMMAR_CPU_S = 0.3  # a worker compiles the grammar again, in a step, so a grammar that takes longer is refused


def to_frame(content: dict[str, Any]) -> bytes:
    """A message as bytes."""
    data = json.dumps(content).encode()
    return LENGTH.pack(len(data)) + data


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    content: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(header)[0]))
    return content
