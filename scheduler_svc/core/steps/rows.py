"""The running sequences of one worker as columns, so that a decode step touches no Python object per row.

A *row* is a slot of the worker's persistent batch. For a row in use:

    |<------------- num_tokens (known) ------------->|
    |<------------------------ num_planned ------------------------>|
    |<----------- num_computed_tokens ---------->|    todo = min(num_planned, compute_limit) - num_computed_tokens

`num_computed_tokens` includes the tokens of steps in flight, `num_planned` their samples. In steady decode `todo` is 1:
the newest token, which the scheduler may not know yet (the worker continues with its own sample). Above 1 the row is in
prefill. At 0 nothing is left to compute, and an answer in flight ends the sequence.

If all layers of the model have attention windows, a row frees the blocks that its next tokens do not attend to:

    table   | freed | freed | held | held | held |      first_block = 2, num_blocks = 5

Entries before `first_block` keep their last value, which may be a block of another row now. Nothing reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.policy import ceil_div
from scheduler_svc.core.sequence import Sequence, SequenceStage
from step_protocol.columns import I64, U32, Bools


class RowTable:
    """The columns of one worker's rows. Pages of the large columns take memory only when they are first written."""

    def __init__(self, capacity: WorkerCapacity) -> None:
        rows, length = capacity.max_num_seqs, capacity.max_model_len
        self.block_size = capacity.block_size
        self.sequences: list[Sequence | None] = [None] * rows
        self.digests: list[list[bytes]] = [[]] * rows  # `Sequence.digests` itself, not a copy
        self.extra_keys: dict[int, Mapping[int, bytes]] = {}  # of rows whose blocks hold more than tokens, for digests
        blocks = ceil_div(length, capacity.block_size) | 1  # odd: equal positions of rows have different cache sets
        self.tokens = np.zeros((rows, blocks * capacity.block_size), dtype=np.uint32)
        self.table = np.zeros((rows, blocks), dtype=np.uint32)
        self.num_blocks = np.zeros(rows, dtype=np.int64)  # length of the table
        self.blocks_before = capacity.blocks_before  # blocks that a row keeps before the one it writes to; None: all
        self.first_block = np.zeros(rows, dtype=np.int64)  # index of the first entry of the table that is not freed
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
        self.has_stop_ids = np.zeros(rows, dtype=np.bool_)
        self.is_awaiting = np.zeros(rows, dtype=np.bool_)  # the scheduler chooses its tokens: it is not pipelined
        self.num_awaiting = 0  # rows in use that await their tokens
        self.is_private = np.zeros(rows, dtype=np.bool_)  # its blocks do not become cached prefixes
        self.num_private = 0  # rows in use that are private
        self.num_with_stop_ids = 0  # rows in use that have stop ids
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

    def pending_prefill(self) -> int:
        """Number of prompt tokens that are admitted but not in any step. Used by invariants.py."""
        if not self._order:
            return 0
        return int(np.maximum(self.todo(self.active()) - 1, 0).sum())

    def stage(self, row: int) -> SequenceStage:
        return SequenceStage.PREFILL if self.todo_of(row) > 1 else SequenceStage.DECODE

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
        is_private = group.features.is_private
        self.is_private[row] = is_private
        self.num_private += is_private
        self.ignore_eos[row] = group.stop.ignore_eos or is_awaiting
        has_stop_ids = bool(group.stop.stop_token_ids) and not is_awaiting
        self.has_stop_ids[row] = has_stop_ids
        self.num_with_stop_ids += has_stop_ids
        self.max_blocks += self.max_blocks_of(limit)
        return row

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

    def first_needed(self, num_computed: int) -> int:
        """Index of the first block that the tokens after so many computed tokens attend to."""
        return 0 if self.blocks_before is None else max(0, num_computed // self.block_size - self.blocks_before)

    def close(self, row: int) -> None:
        self.num_awaiting -= self.is_awaiting.item(row)
        self.num_private -= self.is_private.item(row)
        self.num_with_stop_ids -= self.has_stop_ids.item(row)
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

    def fills_block(self, context_lens: I64) -> I64:
        """Indices of the rows whose next token fills a block."""
        full: I64 = ((context_lens + 1) % self.block_size == 0).nonzero()[0]
        return full

    def known_tokens(self, row: int) -> U32:
        """Prompt and output so far, as a view."""
        return self.tokens[row, : self.num_tokens[row]]

    def output_tokens(self, row: int) -> U32:
        """Output so far, as a copy that outlives the row."""
        return self.tokens[row, self.prompt_len[row] : self.num_tokens[row]].copy()

    def slots(self, rows: I64, positions: I64) -> U32:
        """Slot of each (row, position): block_id * block_size + offset."""
        blocks = self.table[rows, positions // self.block_size]
        return (blocks * np.uint32(self.block_size) + (positions % self.block_size)).astype(np.uint32)
