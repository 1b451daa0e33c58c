"""Cached blocks in the order in which they are evicted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

WINDOW = 64  # entries looked at together at least


class LruQueue:
    """Who is put back stands at its end, many at a time; the first ones are taken, many at a time.

    `put_back_at` [num_blocks] is the caller's: when each block was put back last. An entry of another time is of a
    block that has left, and is passed over.
    """

    def __init__(self, put_back_at: I64) -> None:
        self._put_back_at = put_back_at
        self._blocks = np.zeros(2 * len(put_back_at), dtype=np.int64)
        self._when = np.zeros(2 * len(put_back_at), dtype=np.int64)  # never falls
        self._head = self._tail = 0

    @property
    def is_empty(self) -> bool:
        return self._head == self._tail

    @property
    def head(self) -> int:
        """When the first one was put back."""
        return int(self._when[self._head])

    def append(self, when: int, blocks: I64) -> None:
        """Behind all others; `put_back_at` says `when` for them already."""
        if self._tail + len(blocks) > len(self._blocks):
            self._forget_who_left()  # no block is here twice, so half of the room is free then
        end = self._tail + len(blocks)
        self._blocks[self._tail : end] = blocks
        self._when[self._tail : end] = when
        self._tail = end

    def take(self, count: int, until: int) -> I64:
        """The first `count` of those that were put back at `until` or before; fewer where there are not as many."""
        end = self._head + int(self._when[self._head : self._tail].searchsorted(until, side="right"))
        taken: I64 = self._blocks[:0]
        size = max(WINDOW, 2 * count)
        while len(taken) < count and self._head < end:
            stop = min(end, self._head + size)
            places = self._here(self._head, stop)[: count - len(taken)]
            found = self._blocks[places]
            taken = np.concatenate((taken, found)) if len(taken) else found
            self._head = int(places[-1]) + 1 if len(taken) == count else stop
            size *= 2
        return taken

    def tolist(self) -> list[int]:
        """All that are here, in order."""
        blocks: list[int] = self._blocks[self._here(self._head, self._tail)].tolist()
        return blocks

    def _here(self, start: int, stop: int) -> I64:
        """Places of those that have not left."""
        places: I64 = np.flatnonzero(self._put_back_at[self._blocks[start:stop]] == self._when[start:stop]) + start
        return places

    def _forget_who_left(self) -> None:
        places = self._here(self._head, self._tail)
        self._head, self._tail = 0, len(places)
        self._blocks[: self._tail], self._when[: self._tail] = self._blocks[places], self._when[places]
