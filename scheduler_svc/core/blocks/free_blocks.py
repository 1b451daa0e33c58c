"""The free blocks of a pool: empty blocks in a ring, cached blocks in the order in which they are evicted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from step_protocol.columns import I64


class FreeList:
    """First in, first out. Never holds more numbers than at the start."""

    def __init__(self, count: int) -> None:
        self._slots = np.arange(count, dtype=np.int64)
        self._head = 0
        self.size = count

    def take(self, count: int) -> I64:
        """Remove the first `count` numbers. The caller has checked `size`."""
        end = self._head + count
        self.size -= count
        if end <= len(self._slots):
            taken = self._slots[self._head : end].copy()
            self._head = end
            return taken
        taken = np.concatenate((self._slots[self._head :], self._slots[: end - len(self._slots)]))
        self._head = end - len(self._slots)
        return taken

    def put(self, numbers: I64 | list[int]) -> None:
        """Append numbers at the end."""
        start = (self._head + self.size) % len(self._slots)
        room = len(self._slots) - start
        self.size += len(numbers)
        self._slots[start : start + len(numbers)] = numbers[:room]
        if len(numbers) > room:
            self._slots[: len(numbers) - room] = numbers[room:]

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove these numbers from any position."""
        gone = set(numbers)
        others = [other for other in self.tolist() if other not in gone]
        self._head = self.size = 0
        self.put(others)

    def tolist(self) -> list[int]:
        """All numbers, in order."""
        order = np.arange(self._head, self._head + self.size) % len(self._slots)
        numbers: list[int] = self._slots[order].tolist()
        return numbers


WINDOW = 64  # minimum number of entries that are read at once


class LruQueue:
    """Blocks are appended at the end and taken from the front, many at a time.

    `put_back_at` [num_blocks] belongs to the caller: the time at which each block was last put back. An entry with
    another time is stale and is skipped: its block was used again or taken.
    """

    def __init__(self, put_back_at: I64) -> None:
        self._put_back_at = put_back_at
        self._blocks = np.zeros(2 * len(put_back_at), dtype=np.int64)
        self._when = np.zeros(2 * len(put_back_at), dtype=np.int64)  # non-decreasing
        self._head = self._tail = 0

    @property
    def is_empty(self) -> bool:
        return self._head == self._tail

    @property
    def head(self) -> int:
        """The time at which the first block was put back."""
        return int(self._when[self._head])

    def append(self, when: int, blocks: I64) -> None:
        """Append these blocks; the caller has set their `put_back_at` to `when`."""
        if self._tail + len(blocks) > len(self._blocks):
            self._remove_stale()  # frees half of the space, because each block has at most one live entry
        end = self._tail + len(blocks)
        self._blocks[self._tail : end] = blocks
        self._when[self._tail : end] = when
        self._tail = end

    def take(self, count: int, until: int) -> I64:
        """Remove up to `count` blocks from the front that were put back at `until` or earlier."""
        end = self._head + int(self._when[self._head : self._tail].searchsorted(until, side="right"))
        taken: I64 = self._blocks[:0]
        size = max(WINDOW, 2 * count)
        while len(taken) < count and self._head < end:
            stop = min(end, self._head + size)
            places = self._live(self._head, stop)[: count - len(taken)]
            found = self._blocks[places]
            taken = np.concatenate((taken, found)) if len(taken) else found
            self._head = int(places[-1]) + 1 if len(taken) == count else stop
            size *= 2
        return taken

    def tolist(self) -> list[int]:
        """All live blocks, in order."""
        blocks: list[int] = self._blocks[self._live(self._head, self._tail)].tolist()
        return blocks

    def _live(self, start: int, stop: int) -> I64:
        """Indices of the live entries."""
        places: I64 = (self._put_back_at[self._blocks[start:stop]] == self._when[start:stop]).nonzero()[0]
        return places + start

    def _remove_stale(self) -> None:
        places = self._live(self._head, self._tail)
        self._head, self._tail = 0, len(places)
        self._blocks[: self._tail], self._when[: self._tail] = self._blocks[places], self._when[places]
