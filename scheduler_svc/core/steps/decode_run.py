"""Decoding rows: each step of the run equals its previous step, advanced by one token.

Most rows of a busy server decode. A row joins the run when its prompt is computed, and leaves it when it is closed or
reaches its limit. Other rows of the same step (prompts, beams, rows that copy a shared block) are planned one by one,
and do not end the run. The columns are indexed by row, so a change of members moves no values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.steps.rows import RowTable
from step_protocol.columns import I64, U32

NO_MEMBERS: I64 = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class DeltaColumns:
    """The columns of members that an answer needs."""

    token_starts: I64  # [N] index of position 1 of each row in the flat column of tokens
    first_offsets: U32  # [N] output position of the token at position 1, modulo 2**32
    owners: U32  # [N]
    owner: int | None  # the owner of all rows; None if they have several
    handles: U32  # [N]
    sample_indices: U32  # [N]

    @classmethod
    def of(cls, table: RowTable, rows: I64) -> DeltaColumns:
        owners = table.owner[rows]
        return cls(
            token_starts=table.row_starts[rows] + 1,
            first_offsets=(1 - table.prompt_len[rows]).astype(np.uint32),
            owners=owners,
            owner=None if np.count_nonzero(owners != owners[0]) else int(owners[0]),
            handles=table.handle[rows],
            sample_indices=table.sample_index[rows],
        )


@dataclass(slots=True)
class Members:
    """The rows of the run in some steps, in batch order. Never changes, because steps in flight refer to it."""

    rows: I64  # [N]
    sent_rows: U32  # [N] `rows` as they are sent
    in_run: I64  # [max_num_seqs] 1 for a member: adding a whole column is cheaper than indexing rows
    phases: I64  # [N] the phase of the steps that fill the row's block
    _columns: DeltaColumns | None = field(default=None)

    def columns(self, table: RowTable) -> DeltaColumns:
        """Made for the first answer: while rows join and leave in every step, no answer needs them. The caller has
        checked that no row was closed since the step.
        """
        if self._columns is None:
            self._columns = DeltaColumns.of(table, self.rows)
        return self._columns


class DecodeRun:
    """The decoding rows of one worker. In each step, each of them computes one token and samples one."""

    def __init__(self, table: RowTable) -> None:
        num_rows = len(table.in_run)
        self._table = table
        self._slots = np.zeros(num_rows, dtype=np.int64)  # of the newest step, per row
        self._phases = np.zeros(num_rows, dtype=np.int64)  # phase of the steps that fill the row's block, per row
        self._ends = np.zeros(num_rows, dtype=np.int64)  # number of the step in which the row reaches its limit
        self._num_steps = 0  # of the run; the phase of a step is its number modulo block_size
        self.steps_left = 0  # until a row reaches its limit
        self.members: Members | None = None  # None: no row decodes
        self.full: I64 = NO_MEMBERS  # indices of members that need a block in the next step

    def update(self, joining: list[int]) -> None:
        """Remove rows that were closed or have reached their limit, and add the rows of `joining`."""
        r = self._table
        if not joining and not r.has_left_run and (self.steps_left or self.members is None):
            return
        if self.members is not None and not self.steps_left:
            rows = self.members.rows
            r.in_run[rows[self._ends[rows] <= self._num_steps]] = 0
        for row in joining:
            self._join(row)
        self._renew()

    def leave(self) -> None:
        """Remove the rows that need a block, because the pool has too few. They are then planned one by one."""
        if self.members is not None:
            rows = self.members.rows[self.full]
            self._table.in_run[rows] = 0
            self._table.outside.update(dict.fromkeys(rows.tolist()))
            self._renew()

    def _join(self, row: int) -> None:
        r, bs = self._table, self._table.block_size
        end = r.num_computed_tokens.item(row)
        self._slots[row] = r.table.item(row, (end - 1) // bs) * bs + (end - 1) % bs
        self._phases[row] = (self._num_steps - end) % bs
        self._ends[row] = self._num_steps + r.limit.item(row) - r.num_planned.item(row)
        r.in_run[row] = 1
        del r.outside[row]

    def _renew(self) -> None:
        """Determine the members again."""
        r = self._table
        r.has_left_run = False
        rows = r.in_run.nonzero()[0]
        if not len(rows):
            self.members, self.full, self.steps_left = None, NO_MEMBERS, 0
            return
        self.members = Members(rows, rows.astype(np.uint32), r.in_run.copy(), self._phases[rows])
        ends = self._ends[rows]
        self.steps_left = int(ends[ends.argmin()]) - self._num_steps
        self.full = (self.members.phases == self._num_steps % r.block_size).nonzero()[0]

    def advance(self, members: Members, new_blocks: I64 | None) -> tuple[U32, U32]:
        """Advance by one step. `new_blocks` has a block for each row whose previous block is full. Returns the context
        lengths and slots of the step.
        """
        r, rows = self._table, members.rows
        context_lens = r.num_computed_tokens[rows].astype(np.uint32)
        r.progress += members.in_run
        self._slots += members.in_run
        if new_blocks is not None:
            self._slots[rows[self.full]] = new_blocks * r.block_size
        self._num_steps += 1
        self.full = (members.phases == self._num_steps % r.block_size).nonzero()[0]
        self.steps_left -= 1
        return context_lens, self._slots[rows].astype(np.uint32)
