"""Cache groups: the layers of a model that attend to a window have blocks and block tables of their own.

In a model where some layers attend to all tokens and others to a window, a block of the pool would hold all layers, so
that no row could free any. So the layers form groups by what they keep. The first group keeps all tokens: its blocks
are `WorkerState.pool`, its tables `WorkerState.rows`, and everything that is decided about sequences is decided there.
Each other group is a `WindowGroup`: its blocks and tables follow those of the first group.

    first group     | 7 | 3 | 9 | 4 | 1 | 6 |      a row of 6 blocks
    window of 2     | . | . | . | 52| 50| 57|      ids of the group follow those of the groups before it

Room
    A row holds at most the window in a group, whatever its length, and a little more while steps are in flight. So the
    group counts `max_held` blocks for each row, as if rows shared none, and limits the number of rows: that is all
    that admission and preemption see of it. Beyond these, chunks of prompts take free blocks, or are shortened.

Hits
    A row starts from the cached blocks of the first group, as far as the window before its first token is cached in
    each other group. A group's blocks can be hit once the step that fills them is answered: rows that a failed row
    affects are closed before, so nothing that they wrote is ever shared.

Drafts
    Where a row that speculates really is, is known when its steps are answered. So it takes blocks up to the largest
    position that it may write to, and frees those behind the window of the smallest.

Moves
    A block of a group is committed, stored and sent under a digest that says the group (`group_digest`). A sequence
    that moves, or is read from a tier, brings the window before its first token in each group, as extras of the blocks
    of the first group (block_moves.py). Blocks that arrive, or are read by another worker, count as if rows held them.

When
    Blocks for a chunk are taken when it is planned; those of decodes, and copies of shared blocks, when the message of
    the step is made, at the same block boundaries and for the same rows as in the first group.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from prefix_index.hashing import group_digest
from request_fields.sizes import blocks_before, blocks_of_row
from scheduler_svc.core.block_manager import BlockManager, ceil_div
from scheduler_svc.core.features.beams import newest_of_each, take_tables
from scheduler_svc.core.messages import CachedBlock, MovedExtra, RowAssignment
from scheduler_svc.core.rows import BlockTables
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.windows import free_behind
from scheduler_svc.core.worker_state import (
    Advance,
    InFlightStep,
    StepPlan,
    WorkerPart,
    WorkerState,
    adopt_listed,
)
from step_protocol.columns import I64, U32, Bools
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import CacheGroup


def add_groups(worker: WorkerState, *, prefix_caching: bool, reuse_bonus: float) -> None:
    """Add the cache groups of a worker after its first one."""
    first_id = worker.capacity.num_blocks
    for number, group in enumerate(worker.capacity.groups, 1):
        pool = BlockManager(
            group.num_blocks,
            worker.capacity.block_size,
            prefix_caching=prefix_caching,
            reuse_bonus=reuse_bonus,
            keeps_events=False,
        )
        worker.add_part(WindowGroup(worker, group, pool, number, first_id))
        first_id += group.num_blocks


class WindowGroup(WorkerPart):
    """The blocks and tables of one worker's rows in layers that attend to a window."""

    def __init__(self, worker: WorkerState, group: CacheGroup, pool: BlockManager, number: int, first_id: int) -> None:
        super().__init__(worker)
        capacity, block_size = worker.capacity, worker.capacity.block_size
        num_rows, max_blocks = worker.rows.table.shape
        self.pool = pool
        self.tables = BlockTables(num_rows, max_blocks, block_size, blocks_before(group.attention_window, block_size))
        self.max_held = blocks_of_row(group.attention_window, block_size, capacity.pipeline_depth)
        self._before = blocks_before(group.attention_window, block_size)
        self._number = number
        self._first_id = first_id
        self._block_bytes = group.block_bytes
        self._block_size = block_size
        self._releases: dict[int, list[I64]] = {}  # by step id: blocks that are freed when the step is answered
        self._num_pending = 0  # blocks in `_releases`
        self._num_moving = 0  # blocks that arrive, or that another worker reads
        self._ahead: set[int] = set()  # rows that hold more than the window, since a chunk of a planned step
        self._planned: set[int] = set()  # the same, of the step that is being planned
        self._moved: dict[int, tuple[I64, I64]] = {}  # beams: changed indices of their tables, blocks
        self._forks: list[RowAssignment] = []  # rows that begin with the blocks of their parents
        self._changes: list[tuple[I64, I64, I64]] = []  # columns: row, index, block
        self._copies: list[tuple[int, int]] = []  # (from, to)

    # -- room ---------------------------------------------------------------------------------------------------------

    def adopt(self, blocks: list[CachedBlock]) -> None:
        of_first = {self.name_in_tier(one.digest): one.digest for one in blocks if one.block_id < self._first_id}
        own = [replace(one, digest=of_first[one.digest]) for one in blocks if one.digest in of_first]
        adopt_listed(self.pool, own, self._first_id)

    def could_run(self, group: SequenceGroup) -> bool:
        return self.max_rows >= (group.num_sequences if group.features.is_gang else 1)

    @property
    def max_rows(self) -> int:
        return self.pool.num_blocks // self.max_held

    def num_free_rows(self, *, when_answered: bool = False) -> int:
        spare = self._num_spare() + (self._num_pending if when_answered else 0)
        return max(0, spare // self.max_held)

    def _num_spare(self) -> int:
        """Number of blocks that no row needs while it decodes, open or reserved. Below 0 while more are pending."""
        rows = self.worker.rows.active()
        held = np.maximum(self.tables.num_blocks[rows] - self.tables.first_block[rows], self._before + 1)
        in_flight = len(rows) * (self.max_held - self._before - 1)
        reserved = self.worker.num_reserved_rows * self.max_held
        num_others = self._num_pending + self._num_moving
        return self.pool.num_blocks - int(held.sum()) - in_flight - reserved - num_others

    def usable_hits(self, digests: Seq[bytes], num_blocks: int, token_ids: U32 | None = None) -> int:
        held = self.pool.held
        while num_blocks:
            first = max(0, num_blocks - self._before)
            window = range(num_blocks - 1, first - 1, -1)
            missing = next((index for index in window if digests[index] not in held), None)
            if missing is None and token_ids is not None and self._match(digests, token_ids, num_blocks) is None:
                missing = num_blocks - 1
            if missing is None:
                return num_blocks
            num_blocks = missing
        return 0

    def _match(self, digests: Seq[bytes], token_ids: U32, end: int) -> I64 | None:
        """The cached blocks of the window before block `end` of a sequence; None if one has other tokens."""
        first = max(0, end - self._before)
        blocks = self.pool.match(digests[first:end], token_ids[first * self._block_size :], end - first)
        return blocks if len(blocks) == end - first else None

    # -- planning -----------------------------------------------------------------------------------------------------

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        row, tables = opened.row, self.tables
        tables.first_block[row] = tables.num_blocks[row] = 0
        if opened.fork_of_row is not None:
            self._forks.append(opened)  # its parent writes to its last block once more, in this step
            return
        end = opened.num_computed_tokens // self._block_size
        first = tables.first_needed(opened.num_computed_tokens)
        hits = self._match(seq.digests, seq.data.token_ids(), end)
        if hits is None:
            raise RuntimeError(f"row {row} starts from blocks that a cache group lost: a bug in the scheduler")
        self.pool.hit(hits)
        tables.table[row, :first], tables.table[row, first:end] = 0, hits
        tables.first_block[row], tables.num_blocks[row] = first, end
        self._add_table(opened)

    def _fork(self, opened: RowAssignment, parent: int) -> None:
        row, tables = opened.row, self.tables
        self.pool.share(tables.held_blocks(parent))
        tables.table[row] = tables.table[parent]
        tables.first_block[row], tables.num_blocks[row] = tables.first_block[parent], tables.num_blocks[parent]
        self._ahead.add(row)
        self._add_table(opened)

    def _add_table(self, opened: RowAssignment) -> None:
        table = self.tables.table[opened.row, : self.tables.num_blocks[opened.row]]
        opened.group_tables = (*opened.group_tables, self._sent(table))

    def plan_chunk(self, row: int, count: int, plan: StepPlan) -> int:
        """Give the row blocks for its next `count` tokens, or for as many as the other rows leave."""
        tables, bs = self.tables, self._block_size
        self._leave_windows(self.worker.rows.num_computed_tokens - self.worker.rows.num_unknown)
        start, num_blocks = self.worker.rows.num_computed_tokens.item(row), tables.num_blocks.item(row)
        num_missing = ceil_div(start + count, bs) - num_blocks
        if num_missing < 1:
            return count
        self._free_behind(np.array([row]), np.array([start]))
        num_reserved = max(0, self._before + 1 - num_blocks + tables.first_block.item(row))
        num_new = min(num_missing, num_reserved + max(0, self._num_spare()))
        if num_new:
            self._append(np.full(num_new, row), np.arange(num_blocks, num_blocks + num_new))
            tables.num_blocks[row] += num_new
            self._planned.add(row)
        return min(count, (num_blocks + num_new) * bs - start)

    def _append(self, rows: I64, indices: I64) -> None:
        blocks = self.pool.allocate(len(rows))
        self.tables.table[rows, indices] = blocks
        self._changes.append((rows, indices, blocks))

    def _leave_windows(self, num_computed: I64) -> None:
        """Free what rows hold before their windows since earlier chunks. `num_computed`: of each row."""
        if self._ahead:
            rows = np.array(sorted(self._ahead), dtype=np.int64)
            self._ahead.clear()
            self._free_behind(rows, num_computed[rows])

    def _free_behind(self, rows: I64, num_computed: I64) -> None:
        count = free_behind(self.tables, self.pool, rows, num_computed, self._release)
        if count > len(rows):  # else the rows take as many blocks as they free
            self.worker.room_version += 1

    def _release(self, blocks: I64) -> None:
        if not self.worker.in_flight:
            self.pool.free(blocks)
            return
        self._num_pending += len(blocks)
        self._releases.setdefault(self.worker.in_flight[-1].step_id, []).append(blocks)

    # -- messages -----------------------------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        return bool(self._moved or self.pool.commits)

    def fill(self, batch: StepBatch) -> None:
        rows, (least, lasts) = batch.rows.astype(np.int64), self.worker.context_bounds(batch)
        if self._ahead:
            num_computed = self.worker.rows.num_computed_tokens - self.worker.rows.num_unknown
            num_computed[rows] = least
            self._leave_windows(num_computed)
        self._ahead, self._planned = self._planned, set()
        if len(rows):
            self._give_blocks(rows, least, lasts)
        for opened in self._forks:
            self._fork(opened, opened.fork_of_row or 0)
        self._forks = []
        self._send(batch)

    def _give_blocks(self, rows: I64, least: I64, lasts: I64) -> None:
        """Append a block to the tables of decoding rows that need one, and replace shared blocks by copies. The newest
        token of a row is at one of the positions from `least` on, and it may have drafts up to `lasts`."""
        tables, indices = self.tables, least // self._block_size
        missing = lasts // self._block_size + 1 - tables.num_blocks[rows]
        while np.count_nonzero(opens := missing > 0):
            taking = rows[opens]
            self._free_behind(taking, least[opens])
            self._append(taking, tables.num_blocks[taking])
            tables.num_blocks[taking] += 1
            missing -= 1
        is_shared = self.pool.refs[tables.table[rows, indices]] > 1
        for row, index in zip(rows[is_shared].tolist(), indices[is_shared].tolist(), strict=True):
            self._copy(row, index)

    def _copy(self, row: int, index: int) -> None:
        shared = self.tables.table.item(row, index)
        if self.pool.refs[shared] == 1:
            return  # all other rows have taken copies
        place = np.array([row]), np.array([index])
        self._append(*place)
        self._copies.append((shared, self.tables.table.item(row, index)))
        self.pool.free(np.array([shared]))  # it stays in use: other rows hold it

    def _send(self, batch: StepBatch) -> None:
        """Add what has changed since the last message, with the ids of this group's blocks."""
        moves = [(np.full(len(indices), row), indices, blocks) for row, (indices, blocks) in self._moved.items()]
        changes, commits = moves + self._changes, self.pool.take_commits() if self.pool.commits else []
        self._moved, self._changes = {}, []
        if changes:
            columns = [np.concatenate(column).astype(np.uint32) for column in zip(*changes, strict=True)]
            rows, indices, blocks = newest_of_each(*columns) if moves else columns
            batch.table_rows = np.concatenate((batch.table_rows, rows))
            batch.table_indices = np.concatenate((batch.table_indices, indices))
            batch.table_blocks = np.concatenate((batch.table_blocks, self._sent(blocks)))
        if self._copies:
            sources, targets = np.array(self._copies, dtype=np.uint32).T
            batch.copy_src = np.concatenate((batch.copy_src, self._sent(sources)))
            batch.copy_dst = np.concatenate((batch.copy_dst, self._sent(targets)))
            self._copies = []
        if commits:
            blocks = np.array([block for block, _ in commits], dtype=np.uint32)
            batch.commit_blocks = np.concatenate((batch.commit_blocks, self._sent(blocks)))
            batch.commit_digests = batch.commit_digests + [self.name_in_tier(digest) for _, digest in commits]

    def _sent(self, blocks: U32) -> U32:
        return blocks + np.uint32(self._first_id)

    # -- answers ------------------------------------------------------------------------------------------------------

    def commit(self, step: InFlightStep, is_open: Bools | None) -> None:
        r, bs, rows = self.worker.rows, self._block_size, step.rows.astype(np.int64)
        firsts, ends = step.context_lens // bs, (step.context_lens + step.query_lens) // bs
        fills = (ends > firsts) & ~r.is_private[rows]
        if step.max_query_lens is not None:
            fills &= step.max_query_lens == 0
        if is_open is not None:
            fills &= is_open[rows]
        places: list[tuple[int, int]] = []
        for i in np.flatnonzero(fills).tolist():
            row = rows.item(i)
            places += [(row, index) for index in range(firsts[i], min(ends[i], len(r.digests[row])))]
        for row, start, end in zip(*(column.tolist() for column in step.accepted or ()), strict=True):
            if not r.is_private[row]:
                places += [(row, index) for index in range((start - 1) // bs, (end - 1) // bs)]
        if places:
            filled, indices = np.array(places).T
            digests = [r.digests[row][index] for row, index in places]
            self.pool.cache(self.tables.table[filled, indices], digests, r.token_blocks[filled, indices])

    def keep_cached(self, row: int) -> None:
        self.pool.mark_hit(self.tables.held_blocks(row))

    def forget_all(self) -> None:
        self.pool.forget_all()

    # -- moves --------------------------------------------------------------------------------------------------------

    def extras_at(self, num_blocks: int) -> range:
        return range(max(0, num_blocks - self._before), num_blocks)

    def holds(self, digest: bytes) -> bool:
        return digest in self.pool.held

    def name_in_tier(self, digest: bytes) -> bytes:
        return group_digest(digest, self._number)

    def name_extra(self, seq: Sequence, token_ids: U32, digest: bytes) -> tuple[bytes, U32]:
        return self.name_in_tier(digest), token_ids[-self._block_size :]

    def blocks_worth(self, num_extras: int) -> float:
        movement = self.worker.capacity.movement
        return num_extras * self._block_bytes / (1 if movement is None else movement.block_bytes)

    def reserve(self, num_extras: int, num_tokens: int) -> list[int]:
        if num_extras > self._num_spare():
            return []
        self._num_moving += num_extras
        return [self._first_id + block for block in self.pool.allocate(num_extras).tolist()]

    def receive(self, extras: Seq[MovedExtra], num_arrived: int) -> None:
        blocks = self._own([extra.block_id for extra in extras])
        arrived = extras[:num_arrived]
        if arrived:
            tokens = np.stack([extra.words for extra in arrived])
            self.pool.cache(blocks[:num_arrived], [extra.block_digest for extra in arrived], tokens)
        self.pool.free(blocks[::-1])
        self._num_moving -= len(extras)

    def lend(self, digests: Seq[bytes]) -> list[int]:
        if len(digests) > self._num_spare():
            return []
        blocks = np.array([self.pool.held[digest] for digest in digests], dtype=np.int64)
        self.pool.share(blocks)
        self._num_moving += len(blocks)
        return [self._first_id + block for block in blocks.tolist()]

    def take_back(self, ids: Seq[int]) -> None:
        self.pool.free(self._own(ids)[::-1])
        self._num_moving -= len(ids)

    def _own(self, ids: Seq[int]) -> I64:
        return np.array(ids, dtype=np.int64) - self._first_id

    def take_over(self, rows: I64, parents: I64) -> None:
        self._moved |= take_tables(self.tables, self.pool, rows, parents)

    def advance(self, step: InFlightStep, output: StepOutput) -> Advance | None:
        for blocks in self._releases.pop(step.step_id, ()):
            self._num_pending -= len(blocks)
            self.pool.free(blocks)
            self.worker.room_version += 1
        return None

    def close(self, row: int) -> None:
        self._ahead.discard(row)
        self._planned.discard(row)
        self._moved.pop(row, None)
        self._changes = [change for change in self._changes if change[0][0] != row]  # of a chunk that was not planned
        self._release(self.tables.held_blocks(row)[::-1])
