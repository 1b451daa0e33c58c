"""Pooled requests: they return numbers instead of tokens when their whole prompt is computed.

Nothing of them stays in a pool: their blocks are never registered, and are free when the request ends.
"""

from __future__ import annotations

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
