"""Pooled requests: they return numbers instead of tokens when their whole prompt is computed.

Nothing of them stays in a pool: their blocks are never registered, and are free when the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a pooled request returns. `message` is opaque and reaches the worker in RowOpen.

    `may_hit`: the numbers depend on the state of the last token only. Others need the states of all tokens, which a
    cached prefix does not have.
    """

    message: Any
    may_hit: bool


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The numbers of pooled rows in a worker's answer."""

    rows: U32  # [P]
    lens: U32  # [P]
    values: F32  # [sum(lens)]

    def of_row(self) -> dict[int, F32]:
        """The numbers by row."""
        parts = np.split(self.values, np.cumsum(self.lens)[:-1]) if len(self.lens) else []
        return dict(zip(self.rows.tolist(), parts, strict=True))


@dataclass(frozen=True, slots=True)
class PooledDeltas:
    """The numbers of requests that have ended."""

    owners: U32  # [P]
    handles: U32  # [P]
    lens: U32  # [P]
    values: F32  # [sum(lens)]

    def select(self, mask: Bools) -> PooledDeltas:
        """The requests where `mask` [P] is true."""
        kept = np.repeat(mask, self.lens)
        return PooledDeltas(self.owners[mask], self.handles[mask], self.lens[mask], self.values[kept])


def pooled_deltas(found: Sequence[tuple[int, int, F32]]) -> PooledDeltas | None:
    """Columns of (owner, handle, numbers); None if there are none."""
    if not found:
        return None
    owners, handles, values = zip(*found, strict=True)
    lens = np.array([len(numbers) for numbers in values], np.uint32)
    return PooledDeltas(np.array(owners, np.uint32), np.array(handles, np.uint32), lens, np.concatenate(values))


def concat_pooled(parts: Sequence[PooledDeltas]) -> PooledDeltas | None:
    """The requests of all parts in order; None if there are no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return PooledDeltas(
        np.concatenate([part.owners for part in parts]),
        np.concatenate([part.handles for part in parts]),
        np.concatenate([part.lens for part in parts]),
        np.concatenate([part.values for part in parts]),
    )
