"""The symbolic KV cache of a cache group: the blocks of the layers that attend to a window.

It follows the tables that the core sends for the group, and trusts none of them either: see symbolic_worker.py. What a
step writes into a slot follows from what it writes for the same token into the first group, and differs in each group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from prefix_index.hashing import group_digest
from scheduler_svc.core.messages import CachedBlock, RowAssignment
from step_protocol.features import BeamMoves
from step_protocol.messages import StepBatch
from step_protocol.types import CacheGroup
from tests.sim.violation import POISON, Violation

if TYPE_CHECKING:
    from tests.sim.symbolic_worker import SymbolicWorker


class SymbolicGroup:
    """Blocks and tables of one group of a worker, whose block ids begin at `first_id`."""

    def __init__(self, worker: SymbolicWorker, group: CacheGroup, first_id: int, number: int) -> None:
        self.worker, self.name, self.first_id, self.number = worker, f"group {number}", first_id, number
        self.window, self.num_blocks, self.block_size = (
            group.attention_window,
            group.num_blocks,
            worker.capacity.block_size,
        )
        self.kv = np.zeros(self.num_blocks * self.block_size, dtype=np.uint64)
        self.kv_token = np.zeros(self.num_blocks * self.block_size, dtype=np.uint32)
        self.content: list[bytes | None] = [None] * self.num_blocks
        self.committed: dict[int, bytes] = {}
        self.fill_step = np.zeros(self.num_blocks, dtype=np.int64)
        self.most_held = 0  # most blocks of one row between two steps
        self.reset()

    def reset(self) -> None:
        """A new lease: all rows are closed."""
        shape = self.worker.capacity.max_num_seqs, -(-self.worker.capacity.max_model_len // self.block_size)
        self.table = np.zeros(shape, dtype=np.int64)
        self.table_len = np.zeros(shape[0], dtype=np.int64)
        self.num_dead = np.zeros(shape[0], dtype=np.int64)  # leading entries that no later token attends to
        self.refs = np.zeros(self.num_blocks, dtype=np.int64)

    def list_blocks(self) -> list[CachedBlock]:
        tokens = self.kv_token.reshape(-1, self.block_size)
        return [CachedBlock(self.first_id + b, d, tokens[b].copy()) for b, d in self.committed.items()]

    def part_of(self, batch: StepBatch) -> StepBatch:
        """The changes of this group's blocks, with their numbers in the group."""
        changed, copied, committed = map(self._are_own, (batch.table_blocks, batch.copy_dst, batch.commit_blocks))
        if not np.array_equal(copied, self._are_own(batch.copy_src)):
            raise Violation(f"{self.name}: copies blocks of another group")
        return replace(
            batch,
            table_rows=batch.table_rows[changed],
            table_indices=batch.table_indices[changed],
            table_blocks=batch.table_blocks[changed] - self.first_id,
            copy_src=batch.copy_src[copied] - self.first_id,
            copy_dst=batch.copy_dst[copied] - self.first_id,
            commit_blocks=batch.commit_blocks[committed] - self.first_id,
            commit_digests=[d for d, own in zip(batch.commit_digests, committed, strict=True) if own],
        )

    def digest_of(self, block: int) -> bytes | None:
        """The digest of a full block."""
        content = self.content[block]
        return None if content is None else group_digest(content, self.number)

    def _of_group(self, kv: np.ndarray) -> np.ndarray:
        """The content of slots whose tokens have this one in the first group."""
        return np.where(kv == POISON, POISON, kv ^ np.uint64(self.number << 32))

    def _are_own(self, blocks: np.ndarray) -> np.ndarray:
        return (blocks >= self.first_id) & (blocks < self.first_id + self.num_blocks)

    def _first_seen(self, positions: np.ndarray) -> np.ndarray:
        return np.maximum(positions - self.window + 1, 0)

    # -- changes ------------------------------------------------------------------------------------------------------

    def leave_dead_blocks(self) -> None:
        worker = self.worker
        dead = np.minimum(self._first_seen(worker.num_computed_tokens) // self.block_size, self.table_len)
        for row in np.flatnonzero(worker.is_open & (dead > self.num_dead)).tolist():
            self.refs[self.table[row, self.num_dead[row] : dead[row]]] -= 1
            self.num_dead[row] = dead[row]

    def close(self, rows: list[int]) -> None:
        for row in rows:
            self.refs[self.table[row, self.num_dead[row] : self.table_len[row]]] -= 1

    def apply(self, batch: StepBatch, tables: list[tuple[RowAssignment, np.ndarray]], num_acked: int) -> None:
        """Opens, table changes, copies and commits of a step."""
        fresh: list[tuple[int, int]] = []
        self._claims = np.zeros(self.num_blocks, dtype=np.int64)  # sharing that begins in this step
        for opened, table in tables:
            self._open(opened, table.astype(np.int64) - self.first_id, fresh, num_acked)
        self._change_tables(batch, fresh)
        for row, block in fresh:
            if self.refs[block] - self._claims[block] != 1:
                raise Violation(f"{self.name}: row {row} gets new block {block}, which another open row has")
            self.content[block] = None
            self.committed.pop(block, None)
        self._copy(batch, {block for _, block in fresh})
        self._commit(batch, num_acked)

    def _open(self, opened: RowAssignment, blocks: np.ndarray, fresh: list[tuple[int, int]], num_acked: int) -> None:
        row, computed = opened.row, opened.num_computed_tokens
        num_dead, num_shared = (
            int(self._first_seen(np.array(computed))) // self.block_size,
            -(-computed // self.block_size),
        )
        held = blocks[num_dead:]
        if (blocks < 0).any() or (blocks >= self.num_blocks).any() or len(set(held.tolist())) != len(held):
            raise Violation(f"{self.name}: row {row} opens with a bad table {blocks.tolist()}")
        if num_shared > len(blocks):
            raise Violation(f"{self.name}: row {row} has {computed} computed tokens in {len(blocks)} blocks")
        if opened.fork_of_row is None:
            for block in blocks[num_dead:num_shared].tolist():
                if self.content[block] is None or self.fill_step[block] > num_acked:
                    raise Violation(f"{self.name}: row {row} starts from block {block}, whose step is not answered")
        self.table[row, : len(blocks)], self.table_len[row], self.num_dead[row] = blocks, len(blocks), num_dead
        self.refs[held] += 1
        self._claims[blocks[num_dead:num_shared]] += 1
        fresh += [(row, block) for block in blocks[num_shared:].tolist()]

    def _change_tables(self, batch: StepBatch, fresh: list[tuple[int, int]]) -> None:
        copied = dict(zip(batch.copy_dst.tolist(), batch.copy_src.tolist(), strict=True))
        moves = batch.part(BeamMoves)
        parents = dict(zip(moves.rows.tolist(), moves.parents.tolist(), strict=True)) if moves else {}
        taken = {row: self.table[parent, : self.table_len[parent]].tolist() for row, parent in parents.items()}
        changes = zip(batch.table_rows.tolist(), batch.table_indices.tolist(), batch.table_blocks.tolist(), strict=True)
        for row, index, block in changes:
            self.worker._need_open(row, f"{self.name}: changes the table of")
            if index > self.table_len[row] or index >= self.table.shape[1]:
                raise Violation(f"{self.name}: row {row}: table[{index}] = {block} with {self.table_len[row]} blocks")
            if index < self.num_dead[row]:
                self.table[row, index] = block
                continue
            if index == self.table_len[row]:
                self.table_len[row] += 1
            else:
                old = int(self.table[row, index])
                is_taken = row in taken and taken[row][index] != old
                if copied.get(block, block if is_taken else None) != (taken[row][index] if is_taken else old):
                    raise Violation(f"{self.name}: row {row}: block {old} is replaced by {block} without a copy")
                self.refs[old] -= 1
            self.table[row, index] = block
            self.refs[block] += 1
            if block not in taken.get(row, ())[index:]:
                fresh.append((row, block))

    def _copy(self, batch: StepBatch, fresh: set[int]) -> None:
        kv, tokens = self.kv.reshape(-1, self.block_size), self.kv_token.reshape(-1, self.block_size)
        for src, dst in zip(batch.copy_src.tolist(), batch.copy_dst.tolist(), strict=True):
            if dst not in fresh:
                raise Violation(f"{self.name}: copies block {src} over block {dst}, which is in use")
            kv[dst], tokens[dst] = kv[src], tokens[src]
            self.fill_step[dst] = batch.step_id

    def _commit(self, batch: StepBatch, num_acked: int) -> None:
        for block, digest in zip(batch.commit_blocks.tolist(), batch.commit_digests, strict=True):
            if self.digest_of(block) != digest:
                raise Violation(f"{self.name}: commits block {block}, which is not full, or not with this digest")
            if self.fill_step[block] > num_acked:
                raise Violation(f"{self.name}: commits block {block} before its step was acknowledged")
            self.committed.pop(block, None)
            self.committed[block] = digest
            self.worker.newly_committed.append((self.first_id + block, digest))

    # -- moves --------------------------------------------------------------------------------------------------------

    def content_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, and keys and values, of a block now."""
        span = slice(block * self.block_size, (block + 1) * self.block_size)
        return self.kv_token[span].copy(), self.kv[span].copy()

    def deposit(self, block: int, tokens: np.ndarray, kv: np.ndarray, content: bytes) -> None:
        """`SymbolicWorker.deposit` for a block of the group."""
        span = slice(block * self.block_size, (block + 1) * self.block_size)
        self.committed.pop(block, None)
        self.kv[span], self.kv_token[span] = kv, tokens
        self.content[block], self.fill_step[block] = content, 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        slots: np.ndarray = (
            self.table[rows, positions // self.block_size] * self.block_size + positions % self.block_size
        )
        return slots

    def write(self, rows: np.ndarray, positions: np.ndarray, step_id: int) -> None:
        """The tokens of a step get their keys and values, as in the first group."""
        worker = self.worker
        if (positions // self.block_size >= self.table_len[rows]).any():
            raise Violation(f"{self.name}: rows {rows.tolist()} compute tokens beyond their tables")
        slots = self._slots(rows, positions)
        blocks = np.unique(slots // self.block_size)
        if len(np.unique(slots)) != len(slots):
            raise Violation(f"{self.name}: two tokens of one step are written to one slot")
        if (self.refs[blocks] - self._claims[blocks] != 1).any():
            raise Violation(f"{self.name}: writes into blocks that other rows share, of {blocks.tolist()}")
        if any(block in self.committed for block in blocks.tolist()):
            raise Violation(f"{self.name}: writes into a committed block of {blocks.tolist()}")
        self.kv[slots] = self._of_group(worker.kv[worker.slots[rows, positions]])
        self.kv_token[slots] = worker.tokens[rows, positions]
        self.fill_step[blocks] = step_id

    def poison(self, row: int, positions: np.ndarray) -> None:
        """A broken row leaves garbage there."""
        self.kv[self._slots(np.full_like(positions, row), positions)] = POISON

    def read_back(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Every slot that a row reads must hold the row's prefix, or garbage that the first group holds too."""
        worker = self.worker
        reads_from = self._first_seen(worker.num_computed_tokens)
        reads_from[rows] = self._first_seen(starts)
        for row in np.flatnonzero(worker.is_open).tolist():
            places = np.arange(reads_from[row], worker.num_computed_tokens[row])
            seen = self.kv[self._slots(np.full_like(places, row), places)]
            wrong = seen != self._of_group(worker.digests[row, places])
            if (wrong & (seen != POISON)).any():
                raise Violation(f"{self.name}: row {row} reads the wrong content at {places[wrong].tolist()}")
            if wrong.any() and not (worker.kv[worker.slots[row, places]] == POISON).any():
                raise Violation(f"{self.name}: row {row} reads what a failed row has written")

    def record_full_blocks(self, rows: np.ndarray, starts: np.ndarray) -> None:
        worker, bs = self.worker, self.block_size
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            for index in range(start // bs, int(worker.num_computed_tokens[row]) // bs):
                block = int(self.table[row, index])
                if not (self.kv[block * bs : (block + 1) * bs] == POISON).any():
                    group = worker.group[row].group
                    self.content[block] = worker.chains.of_block(worker.tokens[row], worker.digests[row], index, group)

    # -- the end ------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        self.leave_dead_blocks()
        for block, digest in self.committed.items():
            if self.digest_of(block) != digest:
                raise Violation(f"{self.name}: committed block {block} holds the wrong content")
