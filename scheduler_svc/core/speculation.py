"""Rows that speculate: a step computes their newest token and drafts after it, and its answer has one token or more.

The worker proposes the drafts: it has the newest token of a row before the scheduler has. Its answers say how many
drafts it wants in the next step of a row (`draft_lens`). From then on the row is out of the decode run, and each of its
steps reserves positions and blocks for its newest token and these drafts. How many of them become tokens is known when
the step is answered, so the columns of such a row count the most that is possible:

    |<----- num_tokens ------>|<- one per step in flight ->|<- num_unknown ->|
    |<------------------------- num_planned -------------------------------->|

The worker begins each step where its previous one has left the row, and never beyond `num_computed_tokens`. An answer
takes back what did not become a token. Blocks that were reserved stay with the row: it writes to them a few tokens
later. A row with nothing unknown and no more drafts joins the run again.

Drafts never cost another row its blocks: they take blocks only while each running row can still take one, and a row
that needs a block for tokens that may not exist waits for its answer in place of preempting others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from request_fields.sizes import MAX_BURST
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.rows import RowTable
from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import StepOutput

MAX_DRAFTS = MAX_BURST - 1  # of one row in one step, at most: it has no more tokens than a burst


class Accepted(NamedTuple):
    """The speculating rows of an answer, with their numbers of known tokens before and after it."""

    rows: I64
    starts: I64
    ends: I64

    @property
    def num_drafts(self) -> int:
        """Known tokens that were drafts: each row has sampled one more."""
        return int((self.ends - self.starts).sum()) - int(np.count_nonzero(self.ends > self.starts))


class Speculation:
    """The drafts that one worker wants, and the positions that are reserved for them."""

    def __init__(self, rows: RowTable, pool: BlockManager, *, is_possible: bool) -> None:
        self._rows = rows
        self._pool = pool
        self.is_on = False  # some row speculates
        self._is_possible = is_possible  # not if rows free blocks: they do so at known positions

    def note(self, output: StepOutput, is_open: Bools | None) -> None:
        """Record the drafts that an answer asks for. Rows that speculate leave the decode run."""
        if not self._is_possible:
            return
        r, rows = self._rows, output.rows.astype(np.int64)
        wanted = np.zeros_like(rows) if output.draft_lens is None else np.minimum(output.draft_lens, MAX_DRAFTS)
        if is_open is not None or r.num_awaiting:
            stays = ~r.is_awaiting[rows] if is_open is None else is_open[rows] & ~r.is_awaiting[rows]
            rows, wanted = rows[stays], wanted[stays]
        r.draft_lens[rows] = wanted
        leaving = rows[wanted * r.in_run[rows] > 0]
        if len(leaving):
            r.in_run[leaving], r.has_left_run = 0, True
            r.outside.update(dict.fromkeys(leaving.tolist()))
        self.is_on = bool(np.count_nonzero(r.draft_lens) or np.count_nonzero(r.num_unknown))

    def may_join_run(self, outside: Collection[int]) -> list[int]:
        """Those of these rows that decode one token per step from a known position."""
        rows = np.fromiter(outside, np.int64, len(outside))
        joins: list[int] = rows[(self._rows.draft_lens[rows] + self._rows.num_unknown[rows]) == 0].tolist()
        return joins

    def without_waiting(self, decode: I64, needy: I64) -> tuple[I64, I64]:
        """The decoding rows and those of them that need a block, without rows that need it for tokens that may not
        exist.
        """
        waits = self._rows.num_unknown[needy] > 0
        return decode[~np.isin(decode, needy[waits])], needy[~waits]

    def reserve(self, rows: I64, budget: int, append_blocks: Callable[[I64], None]) -> U32 | None:
        """For decoding rows, the most tokens that this step computes of each; 0 for a row that does not speculate.
        None if none does. Drafts use at most `budget` tokens of the step.
        """
        r = self._rows
        wanted, limits = r.draft_lens[rows], r.limit[rows]
        speculates = wanted + r.num_unknown[rows] > 0
        if not np.count_nonzero(speculates):
            return None
        wanted = np.minimum(wanted, limits - r.num_planned[rows] - 1)
        np.maximum(wanted, 0, out=wanted)
        if len(rows) * MAX_DRAFTS > budget and int(wanted.sum()) > budget:
            wanted[:] = 0
        starts = r.num_computed_tokens[rows] + 1
        if not self._extend_tables(rows, np.minimum(starts + 2 * wanted, limits), append_blocks):
            wanted = np.minimum(wanted, r.num_blocks[rows] * r.block_size - starts)
        return np.where(speculates, 1 + wanted, 0).astype(np.uint32)

    def _extend_tables(self, rows: I64, ends: I64, append_blocks: Callable[[I64], None]) -> bool:
        """Take the blocks of this step's drafts, and of as many after them: a worker that computes the next drafts with
        a model stores their keys and values before it answers. False if the pool has too few.
        """
        r = self._rows
        missing = (ends - 1) // r.block_size + 1 - r.num_blocks[rows]
        growing = (missing > 0).nonzero()[0]
        total = int(missing[growing].sum()) if len(growing) else 0
        if total and self._pool.num_free - total < r.num_used:
            return False
        while len(growing):
            append_blocks(rows[growing])
            missing[growing] -= 1
            growing = growing[missing[growing] > 0]
        return True


def take_back(table: RowTable, rows: I64, reserved: I64, lens: I64) -> None:
    """Of the tokens reserved for each of these rows in an answered step, `lens` exist."""
    rejected = reserved - lens
    table.num_planned[rows] -= rejected
    table.num_computed_tokens[rows] -= rejected
    table.num_unknown[rows] -= reserved - 1
