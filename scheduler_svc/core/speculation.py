"""Rows that speculate: a step computes their newest token and drafts after it, and its answer has one token or more.

The worker proposes the drafts: it has the newest token of a row before the scheduler has. Its answers say how many
drafts it wants in the next step of a row (`draft_lens`). From then on the row is out of the decode run, and one of
`Speculation.rows`, which are planned together. Each of its steps reserves positions and blocks for its newest token and
these drafts. How many of them become tokens is known when the step is answered, so the columns of such a row count the
most that is possible:

    |<----- num_tokens ------>|<- one per step in flight ->|<- num_unknown ->|
    |<------------------------- num_planned -------------------------------->|

The worker begins each step where its previous one has left the row, and never beyond `num_computed_tokens`. An answer
takes back what did not become a token. Blocks that were reserved stay with the row: it writes to them a few tokens
later, in the run too. Rows whose drafts come and go stay: one with nothing unknown and no drafts is sent as any other
decoding row. Once that is so of all of them, they join the run again, and bursts continue.

Drafts never cost another row its blocks: they take blocks only while each running row can still take one, else no row
has any. A row that needs a block for tokens that may not exist waits for its answer in place of preempting others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from request_fields.sizes import MAX_BURST
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.rows import NO_ROWS, RowTable
from step_protocol.columns import I64, Bools
from step_protocol.messages import StepOutput

MAX_DRAFTS = MAX_BURST - 1  # of one row in one step, at most: it has no more tokens than a burst


class Accepted(NamedTuple):
    """The speculating rows with new tokens in an answer, and their numbers of known tokens before and after it."""

    rows: I64
    starts: I64
    ends: I64

    @property
    def num_drafts(self) -> int:
        """Known tokens that were drafts: each row has sampled one more."""
        return int((self.ends - self.starts).sum()) - len(self.rows)


class Speculation:
    """The rows of one worker that speculate, the drafts that it wants, and the positions that are reserved for them."""

    def __init__(self, table: RowTable, pool: BlockManager, *, is_possible: bool) -> None:
        self._table = table
        self._pool = pool
        self._is_possible = is_possible  # not if rows free blocks: they do so at known positions
        self.is_on = False  # some row speculates
        self.rows = NO_ROWS

    def _set_rows(self, rows: I64) -> None:
        self.rows, self.is_on = rows, len(rows) > 0

    @property
    def _is_short_of_blocks(self) -> bool:
        return self._pool.num_free < self._table.num_used

    def note(self, output: StepOutput, is_open: Bools | None) -> None:
        """Record the drafts that an answer asks for. Rows of the decode run that want some leave it."""
        if not self._is_possible:
            return
        r, rows = self._table, output.rows.astype(np.int64)
        wanted = np.zeros_like(rows) if output.draft_lens is None else np.minimum(output.draft_lens, MAX_DRAFTS)
        if is_open is not None:
            rows, wanted = rows[is_open[rows]], wanted[is_open[rows]]
        r.draft_lens[rows] = wanted
        joining = rows[wanted * r.in_run[rows] > 0]
        if len(joining) and not self._is_short_of_blocks:
            r.in_run[joining], r.has_left_run = 0, True
            self._set_rows(np.append(self.rows, joining))

    def update(self) -> None:
        """Once no row has drafts or unknown tokens, all leave, and may join the run."""
        r, rows = self._table, self.rows
        if self._is_short_of_blocks:
            r.draft_lens[rows] = 0
        if np.count_nonzero(r.draft_lens[rows]) or np.count_nonzero(r.num_unknown[rows]):
            return
        r.outside.update(dict.fromkeys(rows.tolist()))
        self._set_rows(NO_ROWS)

    def close(self, row: int) -> None:
        """The row ends."""
        self._set_rows(self.rows[self.rows != row])

    def reserve(self, budget: int, append_blocks: Callable[[I64], I64]) -> tuple[I64, I64]:
        """The rows that compute their newest token in this step, and the drafts of each: `budget` tokens at most."""
        r, rows = self._table, self.rows
        left = r.limit[rows] - r.num_planned[rows] - 1
        if np.count_nonzero(left < 0):
            rows, left = rows[left >= 0], left[left >= 0]
        num_drafts = np.minimum(r.draft_lens[rows], left)
        if len(rows) * (1 + MAX_DRAFTS) > budget and len(rows) + int(num_drafts.sum()) > budget:
            num_drafts[:] = 0
        # A worker that computes the next drafts with a model stores their keys and values before it answers.
        if not self._make_room(rows, np.minimum(2 * num_drafts, left + 1), r.num_used, append_blocks):
            self._make_room(rows, np.zeros_like(rows), 0, append_blocks)
            room = self._room(rows)
            rows, num_drafts = rows[room >= 0], np.minimum(num_drafts, room)[room >= 0]
        return rows, num_drafts

    def _room(self, rows: I64) -> I64:
        """Number of positions after the newest token of each row for which it has blocks; -1: it has none for this."""
        r = self._table
        room: I64 = r.num_blocks[rows] * r.block_size - r.num_planned[rows]
        return room

    def _make_room(self, rows: I64, wanted: I64, num_kept: int, append_blocks: Callable[[I64], I64]) -> bool:
        """Take blocks for so many positions after the newest token of each row. False if the pool would then have less
        than `num_kept` blocks free.
        """
        num_missing = wanted - self._room(rows)
        num_growing = np.count_nonzero(num_missing > 0)
        if not num_growing:
            return True
        bs = self._table.block_size
        most = -(-num_missing.item(num_missing.argmax()) // bs)  # blocks of a row; faster than max()
        if self._pool.num_free - most * num_growing < num_kept:
            return False
        for nth in range(most):
            append_blocks(rows[num_missing > nth * bs])
        return True


def take_back(table: RowTable, rows: I64, reserved: I64, lens: I64) -> None:
    """Of the tokens reserved for each of these rows in an answered step, `lens` exist."""
    rejected = reserved - lens
    table.num_planned[rows] -= rejected
    table.num_computed_tokens[rows] -= rejected
    table.num_unknown[rows] -= reserved - 1
