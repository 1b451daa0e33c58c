"""Columns: their types, and their packed little-endian form: one call per column, nothing per element."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

LITTLE_U32 = np.dtype("<u4")
LITTLE_F32 = np.dtype("<f4")


class WireError(Exception):
    """A message of another service has a wrong form. `field` is the column that is wrong, if it is known."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def _swapped_bytes(column: U32) -> bytes:
    return column.astype(LITTLE_U32).tobytes()


# A column as packed little-endian u32. On little-endian machines this is `tobytes` itself, without a Python call.
u32_to_bytes: Callable[[U32], bytes] = np.ndarray.tobytes if sys.byteorder == "little" else _swapped_bytes


def u32_from_bytes(data: bytes, name: str) -> U32:
    """Packed little-endian u32 as a read-only column. Raises WireError if the length is not a multiple of 4."""
    if len(data) % 4:
        raise WireError(f"{name} has {len(data)} bytes; the length must be a multiple of 4", name)
    return np.frombuffer(data, dtype=LITTLE_U32).astype(np.uint32, copy=False)


def f32_to_bytes(column: F32) -> bytes:
    """A column as packed little-endian f32."""
    return column.astype(LITTLE_F32, copy=False).tobytes()


def f32_from_bytes(data: bytes, name: str) -> F32:
    """Packed little-endian f32 as a read-only column. Raises WireError if the length is not a multiple of 4."""
    return u32_from_bytes(data, name).view(np.float32)
