"""Columns of numbers in messages, without numpy, which a gateway does not need otherwise."""

from __future__ import annotations

import sys
from array import array


class ProtocolError(RuntimeError):
    """The scheduler violated the protocol. The gateway closes the stream."""


def u32_to_bytes(ids: array[int]) -> bytes:
    """Ids as a little-endian uint32 column."""
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


def u32_from_bytes(data: bytes) -> array[int]:
    """The numbers of a little-endian uint32 column. Raises ProtocolError if its length is not a multiple of 4."""
    try:
        ids = array("I", data)
    except ValueError:
        raise ProtocolError(f"a uint32 column has {len(data)} bytes; expected a multiple of 4") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
