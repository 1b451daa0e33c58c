"""Cached blocks in the order in which they are evicted."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class Line:
    """Blocks that were put back together stay together, so that many go at once.

    `put_back_at` [num_blocks] is the caller's: when each block was put back last. A block for which it says something
    else than its part of the line has left, and is passed over.
    """

    def __init__(self, put_back_at: I64) -> None:
        self.size = 0  # with those that have left
        self._put_back_at = put_back_at
        self._parts: deque[tuple[int, I64]] = deque()  # (when, blocks in their order), oldest first

    @property
    def is_empty(self) -> bool:
        return not self._parts

    @property
    def head(self) -> int:
        """When the first ones were put back."""
        return self._parts[0][0]

    def append(self, when: int, blocks: I64) -> None:
        """Behind all others; `when` is later than what was said before."""
        if len(blocks):
            self._parts.append((when, blocks))
            self.size += len(blocks)

    def take(self, count: int) -> I64:
        """Up to `count` blocks of the first part, none if all of them have left."""
        when, blocks = self._parts.popleft()
        self.size -= len(blocks)
        here = self._still_here(when, blocks)
        if len(here) > count:
            self._parts.appendleft((when, here[count:]))
            self.size += len(here) - count
        return here[:count]

    def forget_who_left(self) -> None:
        parts, self._parts, self.size = self._parts, deque(), 0
        for when, blocks in parts:
            self.append(when, self._still_here(when, blocks))

    def tolist(self) -> list[int]:
        """All that are here, in order."""
        return [block for part in self._parts for block in self._still_here(*part).tolist()]

    def _still_here(self, when: int, blocks: I64) -> I64:
        here: I64 = blocks[self._put_back_at[blocks] == when]
        return here
