"""Which adapter each open row uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from step_protocol.columns import I64, U32
from step_protocol.messages import RowOpen
from worker_svc.engine.row_part import RowPart

A = TypeVar("A")
Find = Callable[[bytes], A | None]


class RowAdapters(RowPart, Generic[A]):
    """The adapters of rows, as a column of numbers. A row keeps its adapter until it closes, even if the adapter is
    swapped out meanwhile."""

    def __init__(self, max_num_seqs: int, find: Find[A], max_in_use: int | None = None) -> None:
        """`find` returns the resident adapter with a digest. `max_in_use`: adapters that open rows may have; None: any
        number."""
        self._find = find
        self._max_in_use = max_in_use
        self.numbers: I64 = np.zeros(max_num_seqs, np.int64)  # 0: none
        self.in_use: dict[int, A] = {}  # by number
        self._number_of: dict[bytes, int] = {}
        self._last_number = 0

    def refusal(self, item: RowOpen) -> str | None:
        if item.adapter in self._number_of:
            return None
        if self._find(item.adapter) is None:
            return f"adapter {item.adapter.hex()} is not in use by this worker; place it first"
        if self._max_in_use is not None and len(self.in_use) >= self._max_in_use:
            return (
                f"adapter {item.adapter.hex()}: open rows already use {len(self.in_use)} adapters, the limit of "
                "--max-adapters; close their rows first"
            )
        return None

    def open(self, item: RowOpen) -> None:
        number = self._number_of.get(item.adapter) or self._start(item.adapter)
        self.numbers[item.row] = number

    def _start(self, digest: bytes) -> int:
        adapter = self._find(digest)
        if adapter is None:
            raise LookupError(f"adapter {digest.hex()} was not checked")
        self._last_number += 1
        self._number_of[digest], self.in_use[self._last_number] = self._last_number, adapter
        return self._last_number

    def close(self, rows: U32) -> None:
        self.numbers[rows[rows < len(self.numbers)]] = 0
        self._forget_unused()

    def reset(self) -> None:
        self.numbers[:] = 0
        self._forget_unused()

    def _forget_unused(self) -> None:
        used = set(self.numbers.tolist())
        for number in self.in_use.keys() - used:
            del self.in_use[number]
        self._number_of = {digest: number for digest, number in self._number_of.items() if number in used}
