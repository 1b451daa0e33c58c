"""The state of open rows, in parts: each feature of a row keeps its own."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from step_protocol.columns import U32
from step_protocol.messages import RowOpen

T = TypeVar("T")


class RowPart(Protocol):
    """One kind of state of all rows. All of it comes from RowOpen and the row's tokens."""

    def open(self, item: RowOpen, /) -> None:
        """Sets the state of an opened row, in place of what the row had before."""

    def close(self, rows: U32, /) -> None:
        """Rows that are not open are ignored."""

    def reset(self) -> None:
        """Closes all rows."""


class SomeRows(Generic[T]):
    """A RowPart that few rows have: the state of each of them. Costs nothing for other rows."""

    def __init__(self) -> None:
        self._rows: dict[int, T] = {}

    def _state_of(self, item: RowOpen) -> T | None:
        """The state of an opened row; None if it has none."""
        raise NotImplementedError

    def open(self, item: RowOpen) -> None:
        self._rows.pop(item.row, None)
        state = self._state_of(item)
        if state is not None:
            self._rows[item.row] = state

    def close(self, rows: U32) -> None:
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def reset(self) -> None:
        self._rows.clear()
