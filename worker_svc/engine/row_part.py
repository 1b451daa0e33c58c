"""Features of open rows, as objects with hooks. An engine calls the hooks and knows no feature by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import RowOpen, StepBatch

T = TypeVar("T")
P = TypeVar("P")
Changes = tuple[U32, U32, U32]  # rows, indices in their block tables, blocks


class RowPart:
    """The state that one feature keeps of open rows. All of it comes from RowOpen and the row's tokens.

    The hooks in the order of a row's life: `check` (a batch arrives), `refusal`, `open` (rows open), `are_bad` (a step
    is checked), `move` (beams), `close` and `reset` (rows close). The defaults do nothing, and cost no call.
    """

    why_bad: ClassVar[str] = ""  # the error of a row that `are_bad` finds; with {context_len}, {end} and {last}
    in_use: Any = True  # the rows that have the feature, or whether there are some; nothing else is closed
    # Whether a row asks for the feature; others are neither refused nor opened
    asks: Callable[[RowOpen], Any] = staticmethod(lambda item: True)

    def check(self, batch: StepBatch) -> None:
        """Raises BadBatchError for columns that contradict the part."""

    def refusal(self, item: RowOpen, /) -> str | None:
        """Why this row cannot be opened; None if it can."""
        return None

    def open(self, item: RowOpen, /) -> None:
        """Sets the state of an opened row, in place of what the row had before."""

    def are_bad(self, rows: I64, context_lens: I64, ends: I64, num_computed: I64) -> Bools:
        """Which rows cannot compute their positions from `context_lens` to `ends`."""
        return np.zeros(len(rows), np.bool_)

    def move(self, sources: I64, targets: I64) -> None:
        """Rows continue from the computed tokens of other rows, all at once."""

    def close(self, rows: U32, /) -> None:
        """Rows that are not open are ignored."""

    def reset(self) -> None:
        """Closes all rows."""


class BlockPart(RowPart):
    """A part with blocks of its own. Their ids follow those of the pool."""

    def change_tables(self, changes: Changes, is_open: Bools, fail: Callable[[int, str], None]) -> Changes:
        """Applies the changes that name blocks of the part. Returns the others, and those of rows that are not open."""
        return changes

    def slots(self, rows: I64, positions: I64) -> I64:
        """The slots [n, T] of the part's blocks that each (row, position) is written to, numbered as the blocks are."""
        return np.empty((0, len(rows)), np.int64)

    def commit(self, blocks: I64, digests: list[bytes]) -> tuple[I64, list[bytes]]:
        """Commits the blocks of the part. Returns the others."""
        return blocks, digests

    def movable(self) -> list[Any]:
        """The blocks of the part as `Movable`, if they can leave it."""
        return []


def having(parts: Iterable[P], hook: Callable[..., Any]) -> list[P]:
    """The parts that override this hook, in their order."""
    return [part for part in parts if getattr(type(part), hook.__name__, hook) is not hook]


def hooks(parts: Iterable[Any], hook: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The methods of the parts that override this hook, in their order."""
    return [getattr(part, hook.__name__) for part in having(parts, hook)]


class SomeRows(RowPart, Generic[T]):
    """A part that few rows have: the state of each of them."""

    def __init__(self) -> None:
        self.in_use: dict[int, T] = {}  # by row

    def _state_of(self, item: RowOpen) -> T | None:
        """The state of an opened row; None if it has none."""
        raise NotImplementedError

    def open(self, item: RowOpen) -> None:
        self.in_use.pop(item.row, None)
        state = self._state_of(item)
        if state is not None:
            self.in_use[item.row] = state

    def close(self, rows: U32) -> None:
        if self.in_use:
            for row in rows.tolist():
                self.in_use.pop(row, None)

    def reset(self) -> None:
        self.in_use.clear()
