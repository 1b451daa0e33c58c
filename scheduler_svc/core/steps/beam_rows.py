"""Beams as rows of one worker. A move of a search changes tokens and block tables of the rows, but copies no KV.

A beam that continues another beam shares its blocks by reference count. The planner copies the block to which both
write next, like the last prompt block of samples that fork: at most one block per beam and step.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.beams import Candidates, Move
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.steps.rows import RowTable
from scheduler_svc.core.steps.step_plan import BeamMoves
from step_protocol.columns import I64
from step_protocol.messages import StepOutput


class BeamRows:
    """Owns the moves of one worker's beams that were not sent in a step yet."""

    def __init__(self, table: RowTable, pool: BlockManager) -> None:
        self._table = table
        self._pool = pool
        self._moves: dict[int, tuple[int, int]] = {}  # row -> parent row, token
        self._tables: dict[int, tuple[I64, I64]] = {}  # row -> changed indices of its table, blocks

    @property
    def has_moves(self) -> bool:
        return bool(self._moves)

    def move(self, group: SequenceGroup, moves: list[Move]) -> None:
        """Apply the moves of a search. Each of its beams must have a row and no tokens left to compute."""
        rows = rows_of(group)
        parents = rows[[move.parent for move in moves]]
        token_ids = [move.token_id for move in moves]
        moved = rows != parents
        if moved.any():
            self._take_tables(rows[moved], parents[moved])
            self._take_tokens(rows[moved], parents[moved])
        r = self._table
        r.tokens[rows, r.num_tokens[rows]] = token_ids
        r.num_tokens[rows] += 1
        r.num_planned[rows] += 1
        for row, parent, token_id in zip(rows.tolist(), parents.tolist(), token_ids, strict=True):
            self._moves[row] = parent, token_id

    def _take_tables(self, rows: I64, parents: I64) -> None:
        """Share the parents' blocks, then free the rows' previous blocks. No step in flight uses those: the last step
        of these rows was answered, and blocks of ended rows keep a reference until their last step is answered.
        """
        r = self._table
        width = int(r.num_blocks[rows[0]])  # equal for all beams
        before = r.table[rows, :width].astype(np.int64)
        after = r.table[parents, :width].astype(np.int64)
        places, firsts = np.arange(width), r.first_block[parents]
        had, has = places >= r.first_block[rows, None], places >= firsts[:, None]
        stays = (before == after) & had & has
        for i in range(len(rows)):
            self._pool.share(after[i, has[i] & ~stays[i]])
        for i, row in enumerate(rows.tolist()):
            self._pool.free(before[i, had[i] & ~stays[i]][::-1])
            changes = has[i] & (before[i] != after[i])
            self._tables[row] = changes.nonzero()[0], after[i, changes]
        r.table[rows, :width], r.first_block[rows] = np.where(has, after, before), firsts

    def _take_tokens(self, rows: I64, parents: I64) -> None:
        r = self._table
        start, end = int(r.prompt_len[rows[0]]), int(r.num_tokens[rows[0]])
        r.tokens[rows, start:end] = r.tokens[parents, start:end]
        digests = [list(r.digests[parent]) for parent in parents.tolist()]
        for row, known in zip(rows.tolist(), digests, strict=True):
            r.digests[row][:] = known  # `Sequence.digests` is the same list

    def drop(self, row: int) -> None:
        """Discard the moves of a closed row."""
        self._moves.pop(row, None)
        self._tables.pop(row, None)

    def take(self) -> BeamMoves | None:
        """The moves since the last call, for the next step; None if there are none."""
        if not self._moves:
            return None
        moves, tables = self._moves, self._tables
        self._moves, self._tables = {}, {}
        parents, token_ids = np.array(list(moves.values()), dtype=np.uint32).T
        changes = [(np.full(len(indices), row), indices, blocks) for row, (indices, blocks) in tables.items()]
        return BeamMoves(np.array(list(moves), dtype=np.uint32), parents, token_ids, changes)


def rows_of(group: SequenceGroup) -> I64:
    """The rows of all beams of a running search, in the order of the beams."""
    return np.array([seq.row for seq in group.sequences], dtype=np.int64)


def candidates_of(output: StepOutput, row: int) -> Candidates:
    """The best continuations of one beam in an answer; empty if the worker returned none."""
    is_mine = output.candidates.rows == row
    return Candidates(output.candidates.token_ids[is_mine], output.candidates.logprobs[is_mine])
