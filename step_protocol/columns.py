"""Columns, their packed little-endian form (one call per column, nothing per element), and the parts of messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

EMPTY: U32 = np.empty(0, dtype=np.uint32)
NO_FLOATS: F32 = np.empty(0, dtype=np.float32)
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


class Part:
    """The columns of one feature in a step, a row that opens or an answer. A message without it has no bytes of it."""

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]]  # fields of the message; it has the part if one of them is set

    def write(self, message: Any) -> None:
        """Sets the fields of the part."""
        raise NotImplementedError

    @classmethod
    def read(cls, message: Any) -> Self:
        """The part of a message that has it. Raises WireError."""
        raise NotImplementedError


P = TypeVar("P", bound=Part)


class AnswerPart(Part):
    """A part of an answer."""

    __slots__ = ()
    WHAT: ClassVar[str] = ""  # the noun for its values, if all its rows must be rows that the step computes
    ENDS_PROMPT: ClassVar[bool] = False  # its rows must be rows whose prompt the step completes
    rows: U32

    def checked(self, vocab_size: int) -> Part:
        """The part without values that fail their row. Raises WireError for values that no worker sends."""
        return self


class HasParts:
    """A message with parts."""

    __slots__ = ()
    parts: tuple[Part, ...]

    def part(self, kind: type[P]) -> P | None:
        """The part of this kind, if there is one."""
        for found in self.parts:
            if type(found) is kind:
                return found
        return None

    def add(self, part: Part | None) -> None:
        """Adds a part, if there is one."""
        if part is not None:
            self.parts = (*self.parts, part)  # type: ignore[misc]  # a slot of the dataclass


class Columns(Part):
    """A part that consists of columns of equal length, in the order of `FIELDS`: u32, or f32 for those in `FLOATS`."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]
    FLOATS: ClassVar[frozenset[str]] = frozenset()

    def write(self, message: Any) -> None:
        for field, name in zip(self.FIELDS, self.__match_args__, strict=True):
            setattr(message, field, u32_to_bytes(getattr(self, name).view(np.uint32)))

    @classmethod
    def read(cls, message: Any) -> Self:
        length, length_of = len(getattr(message, cls.FIELDS[0])) // 4, f"one per item of {cls.FIELDS[0]}"
        columns = {field: u32_column(field, getattr(message, field), length, length_of) for field in cls.FIELDS}
        return cls(*(found.view(np.float32) if name in cls.FLOATS else found for name, found in columns.items()))


def u32_column(field: str, data: bytes, length: int, length_of: str) -> U32:
    """Packed u32 as a column of this length. `length_of` says in errors why it has this length."""
    column = u32_from_bytes(data, field)
    if len(column) != length:
        raise WireError(f"{field} has {len(column)} items, expected {length} ({length_of})", field)
    return column


def by_field(kinds: Iterable[type[Part]]) -> dict[str, type[Part]]:
    """The kinds of parts by the fields of their message."""
    return {field: kind for kind in kinds for field in kind.FIELDS}


def parts_of(message: Any, kinds: dict[str, type[Part]]) -> tuple[Part, ...]:
    """The parts that a message has. `kinds`: see `by_field`."""
    found: dict[type[Part], None] = {}
    for field, _ in message.ListFields():
        if (kind := kinds.get(field.name)) is not None:
            found[kind] = None
    return tuple([kind.read(message) for kind in found]) if found else ()
