"""Checks floating-point data for NaN and infinity without numpy, which a gateway does not need otherwise.

A number is not finite if all bits of its exponent are 1. Adding 1 to such an exponent carries into the bit above it.
One addition of large integers checks thousands of numbers, each in its own lane.
"""

from __future__ import annotations

from functools import cache

PIECE_BYTES = 1 << 17  # other threads can run between pieces
# By dtype: bytes of a number, its exponent bits, and the lowest of them.
FORMATS = {
    "float32": (4, 0x7F80_0000, 0x0080_0000),
    "bfloat16": (2, 0x7F80, 0x0080),
    "float16": (2, 0x7C00, 0x0400),
}


def is_finite(data: bytes, dtype: str) -> bool:
    """Whether all numbers of a little-endian array are finite. `dtype` is one of FORMATS."""
    exponents, lowest, carries = _lanes(dtype)
    pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
    return not any((int.from_bytes(piece, "little") & exponents) + lowest & carries for piece in pieces)


@cache
def _lanes(dtype: str) -> tuple[int, int, int]:
    """The masks of all lanes of a piece: exponent bits, the lowest exponent bit, and the bit above the exponent."""
    size, exponent, lowest = FORMATS[dtype]
    masks = exponent, lowest, exponent + lowest
    exponents, lows, carries = (mask.to_bytes(size, "little") * (PIECE_BYTES // size) for mask in masks)
    return int.from_bytes(exponents, "little"), int.from_bytes(lows, "little"), int.from_bytes(carries, "little")
