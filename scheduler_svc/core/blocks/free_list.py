"""A first-in, first-out list of free blocks, from which many are taken or put back at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


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
