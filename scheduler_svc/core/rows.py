"""The running sequences of one worker as columns, so that a decode step touches no Python object per row.

A *row* is a slot of the worker's persistent batch. For a row in use:

    |<------------- num_tokens (known) ------------->|
    |<------------------------ num_planned ------------------------>|
    |<----------- num_computed_tokens ---------->|    todo = min(num_planned, compute_limit) - num_computed_tokens

`num_computed_tokens` includes the tokens of steps in flight, `num_planned` their samples. In steady decode `todo` is 1:
the newest token, which the scheduler may not know yet (the worker continues with its own sample). Above 1 the row is in
prefill. At 0 nothing is left to compute, and an answer in flight ends the sequence. Both columns of a row that
speculates count the most tokens that its steps in flight may have (`speculation.py`).

The decode run
    Most rows of a busy server decode, and each step of a decoding row equals its previous step, advanced by one token.
    The `DecodeRun` advances them together. A row joins it when its prompt is computed, and leaves it when it is closed
    or reaches its limit. Other rows of the same step (prompts, beams, rows that copy a shared block) are planned one by
    one, and do not end the run. The columns are indexed by row, so a change of members moves no values.

Columns of a step
    Making the columns of a step (`RowColumns`) advances its rows by the tokens of the step. Chunks of prompts are
    handled one by one: most steps have one at most, and a numpy operation on one row costs more than a few numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.block_manager import ceil_div
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.sequence import Sequence
from step_protocol.columns import EMPTY, I64, U32, Bools

NO_ROWS: I64 = np.empty(0, dtype=np.int64)


class BlockTables:
    """The block tables of one worker's rows. With an attention window, a row frees the blocks that its next tokens do
    not attend to:

        table   | freed | freed | held | held | held |      first_block = 2, num_blocks = 5

    Entries before `first_block` keep their last value, which may be a block of another row now. Nothing reads them.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, blocks_before: int | None) -> None:
        self.block_size = block_size
        self.table = np.zeros((num_rows, max_blocks), dtype=np.uint32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)  # length of the table
        self.blocks_before = blocks_before  # blocks that a row keeps before the one it writes to; None: all
        self.first_block = np.zeros(num_rows, dtype=np.int64)  # index of the first entry of the table that is not freed

    def first_needed(self, num_computed: int) -> int:
        """Index of the first block that the tokens after so many computed tokens attend to."""
        return 0 if self.blocks_before is None else max(0, num_computed // self.block_size - self.blocks_before)

    def held_blocks(self, row: int) -> I64:
        """The blocks of the row's table that are not freed."""
        return self.table[row, self.first_block[row] : self.num_blocks[row]].astype(np.int64)

    def entries(self, rows: I64, starts: I64, ends: I64) -> I64:
        """The blocks of each row from index `starts` to before `ends`, which is above."""
        counts = ends - starts
        if counts.max() > 1:
            rows, offsets = np.repeat(rows, counts), np.repeat(np.cumsum(counts) - counts, counts)
            starts = np.repeat(starts, counts) + np.arange(len(rows)) - offsets
        return self.table[rows, starts].astype(np.int64)


class RowTable(BlockTables):
    """The columns of one worker's rows. Pages of the large columns take memory only when they are first written."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        rows, length = capacity.max_num_seqs, capacity.max_model_len
        blocks = ceil_div(length, capacity.block_size) | 1  # odd: equal positions of rows have different cache sets
        super().__init__(rows, blocks, capacity.block_size, capacity.blocks_before)
        self.sequences: list[Sequence | None] = [None] * rows
        self.digests: list[list[bytes]] = [[]] * rows  # `Sequence.digests` itself, not a copy
        self.extra_keys: dict[int, Mapping[int, bytes]] = {}  # of rows whose blocks hold more than tokens, for digests
        self.tokens = np.zeros((rows, blocks * capacity.block_size), dtype=np.uint32)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self.progress = np.zeros((2, rows), dtype=np.int64)  # one array: a step of the decode run advances both columns
        self.num_computed_tokens, self.num_planned = self.progress
        self.prompt_len = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)  # num_tokens at which the sequence ends
        self.compute_limit = np.zeros(rows, dtype=np.int64)  # limit of num_computed_tokens: the last token needs no KV
        self.owner = np.zeros(rows, dtype=np.uint32)
        self.handle = np.zeros(rows, dtype=np.uint32)
        self.sample_index = np.zeros(rows, dtype=np.uint32)
        self.tenant = np.zeros(rows, dtype=np.int64)  # tenant slots of FairShare
        self.priority = np.zeros(rows, dtype=np.int64)
        self.ignore_eos = np.zeros(rows, dtype=np.bool_)
        self.may_end_anywhere = np.zeros(rows, dtype=np.bool_)
        self.is_awaiting = np.zeros(rows, dtype=np.bool_)  # the scheduler chooses its tokens: it is not pipelined
        self.num_awaiting = 0  # rows in use that await their tokens
        self.is_private = np.zeros(rows, dtype=np.bool_)  # its blocks do not become cached prefixes
        self.num_private = 0  # rows in use that are private
        self.draft_lens = np.zeros(rows, dtype=np.int64)  # drafts that the worker wants in the row's next step
        self.num_unknown = np.zeros(rows, dtype=np.int64)  # planned tokens of steps in flight that may not exist
        self.num_ending_anywhere = 0  # rows in use whose output other tokens than EOS may end
        self.processor_us = np.zeros(rows)  # of the row's sequence since it was opened (costs.py)
        self.paying_run: Members | None = None  # its rows owe `owed_us` each, which is not in the column yet
        self.owed_us = 0.0
        self.opened_at = np.zeros(rows)
        self.opened_blocks = np.zeros(rows, dtype=np.int64)  # length of the table then
        self.now = 0.0  # time of the newest step or answer
        self.max_blocks = 0  # an upper bound of the blocks that the rows in use hold if all reach their limits
        self.ones = np.ones(rows, dtype=np.uint32)
        self.trues = np.ones(rows, dtype=np.bool_)
        self._offsets = np.arange(self.block_size, dtype=np.uint32)
        self._stride = np.uint32(self.block_size)
        self.flat_tokens = self.tokens.reshape(-1)  # a view: row_starts[row] + position
        self.row_starts = np.arange(rows, dtype=np.int64) * self.tokens.shape[1]
        self.token_blocks = self.tokens.reshape(rows, blocks, self.block_size)  # a view: row, index, offset
        self._free = list(range(rows - 1, -1, -1))
        self._order: dict[int, None] = {}  # rows in use, in order of admission
        self.outside: dict[int, None] = {}  # of these, the rows that the planner's decode run has not taken
        self.in_run = np.zeros(rows, dtype=np.int64)  # 1 for a row of the decode run
        self.has_left_run = False  # a row of the decode run was closed
        self._active: I64 | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._order)

    def active(self) -> I64:
        """Rows in use, in order of admission."""
        if self._active is None:
            self._active = np.fromiter(self._order, dtype=np.int64, count=len(self._order))
        return self._active

    def todo(self, rows: I64) -> I64:
        """Number of tokens that each row could compute now."""
        todo: I64 = np.minimum(self.num_planned[rows], self.compute_limit[rows]) - self.num_computed_tokens[rows]
        return todo

    def todo_of(self, row: int) -> int:
        """Number of tokens that this row could compute now."""
        return min(self.num_planned.item(row), self.compute_limit.item(row)) - self.num_computed_tokens.item(row)

    def num_full_blocks(self, rows: I64) -> I64:
        """For each row, the number of blocks that it will not write to after the step that is being planned."""
        is_prefill = self.todo(rows) > 1
        full: I64 = np.where(is_prefill, self.num_tokens[rows], self.num_computed_tokens[rows]) // self.block_size
        return full

    def open(self, seq: Sequence, token_ids: U32, blocks: U32, num_computed: int, limit: int) -> int:
        """Give `seq` a row. The caller has checked `num_free`."""
        row = self._free.pop()
        self._order[row] = self.outside[row] = None
        self._active = None
        group = seq.group
        self.sequences[row] = seq
        self.digests[row] = seq.digests
        if group.features.items and (keys := group.features.block_keys(self.block_size)):
            self.extra_keys[row] = keys
        num_tokens, num_blocks = len(token_ids), len(blocks)
        self.tokens[row, :num_tokens] = token_ids
        self.table[row, :num_blocks] = blocks
        self.num_blocks[row] = num_blocks
        self.first_block[row] = 0
        self.processor_us[row], self.opened_at[row], self.opened_blocks[row] = 0.0, self.now, num_blocks
        self.num_tokens[row] = self.num_planned[row] = num_tokens
        self.num_computed_tokens[row] = num_computed
        self.prompt_len[row] = len(group.prompt)
        self.limit[row] = limit
        # With max_tokens = 0 the whole prompt is computed; otherwise the last token is never computed.
        self.compute_limit[row] = limit if group.stop.max_tokens == 0 else limit - 1
        self.owner[row] = group.owner
        self.handle[row] = group.handle
        self.sample_index[row] = seq.sample_index
        self.tenant[row] = group.tenant_slot
        self.priority[row] = group.priority
        is_awaiting = group.features.chooses_tokens
        self.is_awaiting[row] = is_awaiting
        self.num_awaiting += is_awaiting
        is_private = group.features.is_private or group.keeps_kv
        self.is_private[row] = is_private
        self.num_private += is_private
        self.draft_lens[row] = self.num_unknown[row] = 0
        self.ignore_eos[row] = group.stop.ignore_eos or is_awaiting
        may_end_anywhere = group.stop.may_end_anywhere and not is_awaiting
        self.may_end_anywhere[row] = may_end_anywhere
        self.num_ending_anywhere += may_end_anywhere
        self.max_blocks += self.max_blocks_of(limit)
        return row

    def make_private(self, rows: I64) -> None:
        """The blocks of these rows become no cached prefixes from now on."""
        self.num_private += int(np.count_nonzero(~self.is_private[rows]))
        self.is_private[rows] = True

    def max_blocks_of(self, limit: int) -> int:
        """An upper bound of the blocks of a sequence with this limit, including the copy of a shared block."""
        num_blocks = limit // self.block_size + 2
        return num_blocks if self.blocks_before is None else min(num_blocks, self.blocks_before + 2)

    def opening_blocks(self, num_tokens: int, num_cached: int) -> tuple[int, int]:
        """Start and end of the table entries whose blocks a row needs when it opens with so many tokens, of which
        `num_cached` are cached. It gets the blocks after the end as it computes its prompt.
        """
        end = -(-num_tokens // self.block_size)
        if self.blocks_before is None:
            return 0, end
        first = self.first_needed(num_cached)
        return first, min(end, first + self.blocks_before + 1)

    def close(self, row: int) -> None:
        self.num_awaiting -= self.is_awaiting.item(row)
        self.num_private -= self.is_private.item(row)
        self.num_ending_anywhere -= self.may_end_anywhere.item(row)
        self.max_blocks -= self.max_blocks_of(self.limit.item(row))
        self.sequences[row] = None
        if self.extra_keys:
            self.extra_keys.pop(row, None)
        del self._order[row]
        self.outside.pop(row, None)
        if self.in_run[row]:
            self.in_run[row], self.has_left_run = 0, True
        self._active = None
        self._free.append(row)

    def open_since(self, closed: Collection[int]) -> Bools:
        """For each row, whether it is not in `closed`."""
        is_open = self.trues.copy()
        is_open[list(closed)] = False
        return is_open

    def sequence(self, row: int) -> Sequence:
        seq = self.sequences[row]
        if seq is None:
            raise RuntimeError(f"row {row} has no sequence: a bug in the scheduler")
        return seq

    def pay(self) -> None:
        """Add what the decode run owes to the column of its rows."""
        if self.paying_run is not None:
            self.processor_us += self.paying_run.in_run * self.owed_us
        self.paying_run, self.owed_us = None, 0.0

    def cost_of(self, row: int) -> tuple[float, float]:
        """Microseconds of computation and blocks x seconds of the row's sequence since it was opened."""
        if self.paying_run is not None:
            self.pay()
        num_blocks = (self.opened_blocks.item(row) + self.num_blocks.item(row) - self.first_block.item(row)) / 2
        return self.processor_us.item(row), num_blocks * max(0.0, self.now - self.opened_at.item(row))

    def num_holders(self, rows: I64, num_blocks: int) -> I64:
        """For each block of the pool, the number of these rows that hold it."""
        starts, ends = self.first_block[rows, None], self.num_blocks[rows, None]
        places = np.arange(int(ends.max(initial=0)))
        held = self.table[rows, : len(places)][(starts <= places) & (places < ends)]
        return np.bincount(held, minlength=num_blocks)

    def chunk_slots(self, row: int, start: int, count: int) -> U32:
        """Slots of `count` consecutive positions of one row."""
        bs = self.block_size
        first, end = start // bs, -(-(start + count) // bs)
        slots: U32 = (self.table[row, first:end, None] * self._stride + self._offsets).reshape(-1)
        return slots[start - first * bs : start - first * bs + count]

    def known_tokens(self, row: int) -> U32:
        """Prompt and output so far, as a view."""
        return self.tokens[row, : self.num_tokens[row]]

    def output_tokens(self, row: int) -> U32:
        """Output so far, as a view."""
        return self.tokens[row, self.prompt_len[row] : self.num_tokens[row]]

    def slots(self, rows: I64, positions: I64) -> U32:
        """Slot of each (row, position): block_id * block_size + offset."""
        indices = positions // self.block_size
        return ((self.table[rows, indices] - indices) * self.block_size + positions).astype(np.uint32)


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
        self.full: I64 = NO_ROWS  # indices of members whose block is full: the next step writes to the following one
        self.may_have_spare = False  # some members may have the following block already: it was reserved for drafts

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
        self.may_have_spare |= r.num_blocks.item(row) * bs - end >= bs
        del r.outside[row]

    def _renew(self) -> None:
        """Determine the members again."""
        r = self._table
        r.has_left_run = False
        rows = r.in_run.nonzero()[0]
        if not len(rows):
            self.members, self.full, self.steps_left = None, NO_ROWS, 0
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
            if self.may_have_spare:
                room = r.num_blocks[rows] * r.block_size - r.num_computed_tokens[rows]
                self.may_have_spare = bool(np.count_nonzero(room >= r.block_size))
        self._num_steps += 1
        self.full = (members.phases == self._num_steps % r.block_size).nonzero()[0]
        self.steps_left -= 1
        return context_lens, self._slots[rows].astype(np.uint32)


class RowColumns(NamedTuple):
    """Some rows of a step."""

    rows: U32  # [N]
    query_lens: U32  # [N]
    context_lens: U32  # [N]
    sample_mask: Bools  # [N]
    slots: U32  # [sum(query_lens)]
    full: I64 = NO_ROWS  # indices of the decoding rows that fill a block, if the number of their tokens is known
    prompt_only: tuple[int, ...] = ()  # rows with max_tokens 0 whose prompt the step completes
    may_reach_limit: bool = False
    continues: bool = True  # some row has a token to compute in the next step, even before an answer
    max_query_lens: U32 | None = None  # [N] tokens reserved for a row that speculates, else 0. None: no row does


NO_COLUMNS = RowColumns(EMPTY, EMPTY, EMPTY, np.empty(0, dtype=np.bool_), EMPTY, continues=False)


def columns_of_run(table: RowTable, run: DecodeRun, members: Members, new_blocks: I64 | None) -> RowColumns:
    """Advance the decode run. `new_blocks` has a block for each row whose previous block is full."""
    context_lens, slots = run.advance(members, new_blocks)
    ones, trues = table.ones[: len(members.rows)], table.trues[: len(members.rows)]
    return RowColumns(members.sent_rows, ones, context_lens, trues, slots, run.full, may_reach_limit=not run.steps_left)


def columns_of_decodes(table: RowTable, rows: I64) -> RowColumns:
    """Advance rows that compute their newest token, and neither are in the run nor speculate."""
    context_lens, planned = table.num_computed_tokens[rows], table.num_planned[rows]
    left, reaches_end, ends = table.limit[rows] - planned, context_lens + 1 == planned, context_lens + 1
    sample_mask = reaches_end & (left > 0)
    planned += sample_mask & ~table.is_awaiting[rows] if table.num_awaiting else sample_mask
    continues = bool(np.count_nonzero((left > 1) | ~reaches_end))
    full = (ends % table.block_size == 0).nonzero()[0]
    if table.num_private:
        full = full[~table.is_private[rows[full]]]
    table.num_computed_tokens[rows], table.num_planned[rows] = ends, planned
    return RowColumns(
        rows.astype(np.uint32),
        table.ones[: len(rows)],
        context_lens.astype(np.uint32),
        sample_mask,
        table.slots(rows, context_lens),
        full,
        () if np.count_nonzero(sample_mask) == len(rows) else tuple(rows[reaches_end & ~sample_mask].tolist()),
        may_reach_limit=bool(np.count_nonzero(left <= 1)),
        continues=continues,
    )


def columns_of_drafts(table: RowTable, rows: I64, num_drafts: I64) -> RowColumns:
    """Advance rows that speculate by the most tokens that they may have: the newest one and these drafts. Their slot is
    that of the last position that they may write. A row without drafts at a known position is sent as any other.
    """
    planned, unknown = table.num_planned[rows], table.num_unknown[rows] + num_drafts
    ends, most, full = planned + num_drafts, num_drafts + 1, NO_ROWS
    speculates, num_at_limit = unknown > 0, int(np.count_nonzero(ends + 1 >= table.limit[rows]))
    num_speculating = np.count_nonzero(speculates)
    if num_speculating < len(rows):
        most *= speculates
        full = ((ends % table.block_size == 0) & ~speculates).nonzero()[0]
    table.num_computed_tokens[rows], table.num_planned[rows], table.num_unknown[rows] = ends, ends + 1, unknown
    return RowColumns(
        rows.astype(np.uint32),
        table.ones[: len(rows)],
        (planned - 1).astype(np.uint32),
        table.trues[: len(rows)],
        table.slots(rows, ends - 1),
        full,
        may_reach_limit=num_at_limit > 0,
        continues=num_at_limit < len(rows),
        max_query_lens=most.astype(np.uint32) if num_speculating else None,
    )


def with_chunks(table: RowTable, head: RowColumns, chunks: list[tuple[int, int]]) -> RowColumns:
    """Advance rows by chunks of their prompts: pairs of a row and its number of tokens. Returns the columns of `head`,
    followed by those of these rows.
    """
    starts, samples, slots, prompt_only = [], [], [head.slots] if len(head.slots) else [], []
    may_reach_limit, continues = head.may_reach_limit, head.continues
    for row, count in chunks:
        start, planned = table.num_computed_tokens.item(row), table.num_planned.item(row)
        left, reaches_end = table.limit.item(row) - planned, start + count == planned
        starts.append(start)
        samples.append(reaches_end and left > 0)
        slots.append(table.chunk_slots(row, start, count))
        table.num_computed_tokens[row] = start + count
        if samples[-1] and not table.is_awaiting[row]:
            table.num_planned[row] = planned + 1
        elif reaches_end and left <= 0:
            prompt_only.append(row)
        may_reach_limit |= left <= 1
        continues |= left > 1 or not reaches_end
    return RowColumns(
        _extended(head.rows, [row for row, _ in chunks]),
        _extended(head.query_lens, [count for _, count in chunks]),
        _extended(head.context_lens, starts),
        _extended(head.sample_mask, samples),
        np.concatenate(slots) if len(slots) > 1 else slots[0],
        head.full,
        (*head.prompt_only, *prompt_only),
        may_reach_limit,
        continues,
        None if head.max_query_lens is None else _extended(head.max_query_lens, [0] * len(chunks)),
    )


def _extended(column: npt.NDArray[Any], values: list[int] | list[bool]) -> npt.NDArray[Any]:
    """The column with these values at its end."""
    size = len(column)
    if not size:
        return np.array(values, dtype=column.dtype)
    extended = np.empty(size + len(values), dtype=column.dtype)
    extended[:size] = column
    extended[size:] = values
    return extended


def concatenated(first: RowColumns, second: RowColumns) -> RowColumns:
    """The columns of all rows, in this order. No row of `first` speculates. `full` counts from the first row."""
    if not len(first.rows):
        return second
    return RowColumns(
        np.concatenate((first.rows, second.rows)),
        np.concatenate((first.query_lens, second.query_lens)),
        np.concatenate((first.context_lens, second.context_lens)),
        np.concatenate((first.sample_mask, second.sample_mask)),
        np.concatenate((first.slots, second.slots)),
        np.concatenate((first.full, second.full + len(first.rows))),
        first.prompt_only + second.prompt_only,
        first.may_reach_limit or second.may_reach_limit,
        first.continues or second.continues,
        None if second.max_query_lens is None else np.append(np.zeros_like(first.rows), second.max_query_lens),
    )
