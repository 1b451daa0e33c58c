"""The block tables of open rows in the cache groups after the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from step_protocol.columns import I32, I64, U32, Bools
from step_protocol.messages import BadBatchError, RowOpen, StepBatch
from step_protocol.types import CacheGroup
from worker_svc.engine.backend import GroupColumns
from worker_svc.engine.row_part import BlockPart, Changes
from worker_svc.engine.step import Step, StepPart

if TYPE_CHECKING:
    from worker_svc.engine.rows.open_rows import OpenRows


class GroupTables(BlockPart, StepPart):
    """The tables of all rows, per group. Blocks are numbered from 0 in each group here, and in messages from the last
    one of the group before it.
    """

    why_bad = "{end} tokens do not fit the slots of the row's table in a cache group"

    def __init__(self, groups: Sequence[CacheGroup], rows: OpenRows) -> None:
        self._ends = np.cumsum([rows.num_blocks, *(group.num_blocks for group in groups)])
        self._first_ids, self._end_ids = self._ends[:-1], self._ends[1:]
        self._block_size = rows.block_size
        self.tables: I32 = np.zeros((len(groups), *rows.tables.shape), np.int32)
        self.lens: I64 = np.zeros((len(groups), rows.max_num_seqs), np.int64)

    def __len__(self) -> int:
        return len(self.lens)

    def check(self, batch: StepBatch) -> None:
        sources, targets = (np.searchsorted(self._ends, ids, "right") for ids in (batch.copy_src, batch.copy_dst))
        if not np.array_equal(sources, targets):
            raise BadBatchError("copy_src and copy_dst name blocks of different cache groups")

    def refusal(self, item: RowOpen) -> str | None:
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

    def change_tables(self, changes: Changes, is_open: Bools, fail: Callable[[int, str], None]) -> Changes:
        rows, indices, blocks = changes
        own = (blocks >= self._first_ids[0]) & (blocks < self._end_ids[-1]) & (rows < len(is_open))
        own &= is_open[np.minimum(rows, len(is_open) - 1)]
        is_bad = self._change(rows[own], indices[own], blocks[own])
        for row in np.unique(rows[own][is_bad]).tolist():
            fail(row, "a table change of a cache group is out of range or left a gap")
        return rows[~own], indices[~own], blocks[~own]

    def _change(self, rows: U32, indices: U32, blocks: U32) -> Bools:
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

    def are_bad(self, rows: I64, context_lens: I64, ends: I64, num_computed: I64) -> Bools:
        """Which rows have fewer slots in some group than tokens after this step."""
        found: Bools = np.any(ends > self.lens[:, rows] * self._block_size, axis=0)
        return found

    def before(self, step: Step) -> None:
        """The blocks of the groups get their tokens too."""
        slots = self._own_slots(step.plan.token_rows, step.plan.positions)
        for of_group in self._numbered(slots):
            step.pool.write_tokens(of_group, step.forward.token_ids)
        step.forward.groups = GroupColumns(slots, self.tables)

    def slots(self, rows: I64, positions: I64) -> I64:
        return self._numbered(self._own_slots(rows, positions))

    def _numbered(self, slots: I64) -> I64:
        """These slots [groups, T] numbered as the blocks of messages are."""
        found: I64 = slots + self._first_ids[:, None] * self._block_size
        return found

    def _own_slots(self, rows: I64, positions: I64) -> I64:
        """The slot in each group [groups, T] of each (row, position)."""
        blocks = self.tables[:, rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size
