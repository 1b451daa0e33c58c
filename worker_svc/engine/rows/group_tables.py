"""The block tables of open rows in the cache groups after the first one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from step_protocol.columns import I32, I64, U32, Bools
from step_protocol.messages import RowOpen
from worker_svc.engine.config import CacheGroupInfo


class GroupTables:
    """The tables of all rows, per group. Blocks are numbered from 0 in each group here, and in messages from the last
    one of the group before it.
    """

    def __init__(
        self, groups: Sequence[CacheGroupInfo], num_blocks: int, max_num_seqs: int, max_blocks: int, block_size: int
    ) -> None:
        """`num_blocks`: of the first group."""
        ends = np.cumsum([num_blocks, *(group.num_blocks for group in groups)])
        self._first_ids, self._end_ids = ends[:-1], ends[1:]
        self.end_id = int(ends[-1])
        self._block_size = block_size
        self.tables: I32 = np.zeros((len(groups), max_num_seqs, max_blocks), np.int32)
        self.lens: I64 = np.zeros((len(groups), max_num_seqs), np.int64)

    def __len__(self) -> int:
        return len(self.lens)

    def refusal(self, item: RowOpen) -> str | None:
        """The error in the tables of a row; None if there is none."""
        if len(item.group_tables) != len(self):
            return f"group_tables has {len(item.group_tables)} tables, expected {len(self)}"
        for index, table in enumerate(item.group_tables):
            if len(table) > self.tables.shape[2] or not self._are_of(index, table).all():
                return f"group_tables[{index}] is longer than max_model_len needs, or names a block of another group"
        return None

    def _are_of(self, index: int, blocks: U32) -> Bools:
        own: Bools = (blocks >= self._first_ids[index]) & (blocks < self._end_ids[index])
        return own

    def open(self, item: RowOpen) -> None:
        for index, table in enumerate(item.group_tables):
            self.tables[index, item.row, : len(table)] = table.astype(np.int64) - self._first_ids[index]
            self.lens[index, item.row] = len(table)

    def close(self, rows: U32) -> None:
        """Rows keep their tables until they open again."""

    def reset(self) -> None:
        """As `close`."""

    def change(self, rows: U32, indices: U32, blocks: U32) -> Bools:
        """Replaces or appends blocks of open rows, in order. Returns which changes are impossible."""
        is_bad: Bools = np.asarray(indices >= self.tables.shape[2])
        for index in range(len(self)):
            own = np.flatnonzero(self._are_of(index, blocks) & ~is_bad)
            for i in own.tolist():
                row, place = rows[i], int(indices[i])
                if place > self.lens[index, row]:
                    is_bad[i] = True
                    continue
                self.tables[index, row, place] = blocks[i] - self._first_ids[index]
                self.lens[index, row] = max(place + 1, int(self.lens[index, row]))
        return is_bad

    def are_short(self, rows: I64, ends: I64) -> Bools:
        """Which rows have fewer slots in some group than tokens after this step."""
        found: Bools = np.any(ends > self.lens[:, rows] * self._block_size, axis=0)
        return found

    def global_slots(self, slots: I64) -> I64:
        """These slots [groups, T] numbered as the blocks of messages are."""
        found: I64 = slots + self._first_ids[:, None] * self._block_size
        return found

    def slots(self, rows: I64, positions: I64) -> I64:
        """The slot in each group [groups, T] of each (row, position)."""
        blocks = self.tables[:, rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size
