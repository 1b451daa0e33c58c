"""Beam search as a feature: the beams of a request are the rows of a gang, and the search chooses their tokens.

A search advances when all its beams have candidates. This may take several steps, because a beam skips a step if the
pool has no block for it. A move changes tokens and block tables of the rows, but copies no KV: a beam that continues
another beam shares its blocks by reference count. The planner copies the block to which both write next, like the last
prompt block of samples that fork: at most one block per beam and step. When the search ends, its best sequences become
the samples 0 to n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from request_fields.parameters import BeamParams
from scheduler_svc.core.block_manager import BlockManager, ceil_div
from scheduler_svc.core.errors import NeverFitsError
from scheduler_svc.core.features.beam_search import BeamSearch, Candidates, Move
from scheduler_svc.core.messages import RowAssignment, WorkerCapacity
from scheduler_svc.core.rows import BlockTables
from scheduler_svc.core.sequence import Completion, Feature, Sequence, SequenceGroup
from scheduler_svc.core.worker_state import Advance, InFlightStep, StepPlan, WorkerPart, WorkerState
from step_protocol.columns import I64, U32
from step_protocol.features import NO_CANDIDATES, BeamCandidates, BeamMoves
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError


class Beams(Feature):
    """The beam search of one request."""

    is_gang = True
    chooses_tokens = True
    selects_workers = True

    def __init__(self, params: BeamParams) -> None:
        self.params = params
        self.num_sequences = params.width
        self._search: BeamSearch | None = None

    @property
    def search(self) -> BeamSearch:
        """The search. The request must have been accepted."""
        if self._search is None:
            raise RuntimeError("a beam search was used before its request was accepted: a bug in the scheduler")
        return self._search

    def begin(self, group: SequenceGroup, eos_token_ids: frozenset[int]) -> None:
        self._search = BeamSearch(self.params, group.stop, eos_token_ids)

    def preempted(self) -> None:
        self.search.forget_candidates()


class BeamRows(WorkerPart):
    """Owns the moves of one worker's beams that were not sent in a step yet."""

    def __init__(self, worker: WorkerState) -> None:
        super().__init__(worker)
        self._moves: dict[int, tuple[int, int]] = {}  # row -> parent row, token
        self._tables: dict[int, tuple[I64, I64]] = {}  # row -> changed indices of its table, blocks

    # -- admit and plan -----------------------------------------------------------------------------------------------

    @classmethod
    def check(cls, group: SequenceGroup, workers: Seq[WorkerState]) -> None:
        width, capacities = group.num_sequences, [worker.capacity for worker in workers]
        max_rows = max(capacity.max_num_seqs for capacity in capacities)
        if width > max_rows:
            raise NeverFitsError(
                f"sampling.beam_width is {width}; must be at most {max_rows}, max_num_seqs of the largest worker",
                field="sampling.beam_width",
            )
        largest_pool = max(capacity.num_blocks * capacity.block_size for capacity in capacities)
        num_needed = capacities[0].block_size * _num_blocks(group, capacities[0])
        if not any(_num_blocks(group, capacity) <= capacity.num_blocks for capacity in capacities):
            raise NeverFitsError(
                f"sampling.beam_width is {width}; with {len(group.prompt)} prompt tokens and max_tokens "
                f"{group.stop.max_tokens} the beams need {num_needed} tokens of one KV pool, and the largest pool has "
                f"{largest_pool}: lower beam_width or max_tokens",
                field="sampling.beam_width",
            )

    def could_run(self, group: SequenceGroup) -> bool:
        capacity = self.worker.capacity
        return group.num_sequences <= capacity.max_num_seqs and _num_blocks(group, capacity) <= capacity.num_blocks

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        opened.num_candidates = self._num_candidates(seq.group.features.get(Beams).search)

    def _num_candidates(self, search: BeamSearch) -> int:
        return min(search.num_candidates, self.worker.capacity.vocab_size)

    @property
    def has_changes(self) -> bool:
        return bool(self._moves)

    def fill(self, batch: StepBatch) -> None:
        """Add the moves since the last step. The changes of their tables precede those of the step itself."""
        if not self._moves:
            return
        moves, tables = self._moves, self._tables
        self._moves, self._tables = {}, {}
        parents, tokens = np.array(list(moves.values()), dtype=np.uint32).T
        batch.add(BeamMoves(np.array(list(moves), dtype=np.uint32), parents, tokens))
        if tables:
            rows = np.repeat(np.array(list(tables)), [len(indices) for indices, _ in tables.values()])
            indices = np.concatenate([indices for indices, _ in tables.values()])
            blocks = np.concatenate([blocks for _, blocks in tables.values()])
            batch.table_rows, batch.table_indices, batch.table_blocks = newest_of_each(
                np.concatenate((rows.astype(np.uint32), batch.table_rows)),
                np.concatenate((indices.astype(np.uint32), batch.table_indices)),
                np.concatenate((blocks.astype(np.uint32), batch.table_blocks)),
            )

    # -- answer -------------------------------------------------------------------------------------------------------

    def advance(self, step: InFlightStep, output: StepOutput) -> Advance | None:
        """Store the candidates of an answer, and move the beams of the searches that have all of theirs."""
        if not step.has_awaiting:
            return None
        outcome, ready, r = Advance([], [], []), list[SequenceGroup](), self.worker.rows
        for row in output.rows[r.is_awaiting[output.rows]].tolist():
            if row in step.closed:
                continue
            group = r.sequence(row).group
            problem = self._put(r.sequence(row), row, output)
            if problem is not None:
                outcome.failures.append(problem)
                continue
            outcome.advanced.append(row)
            if group.features.get(Beams).search.is_ready:
                ready.append(group)
        for group in ready:
            found = self._advance(group)
            if found is not None:
                outcome.completed.append((group, found))
        return outcome

    def _put(self, seq: Sequence, row: int, output: StepOutput) -> RowError | None:
        """Store the candidates of a beam. Returns a failure if the worker did not return as many as requested."""
        search, found = seq.group.features.get(Beams).search, output.part(BeamCandidates) or NO_CANDIDATES
        is_mine, expected = found.rows == row, self._num_candidates(search)
        candidates = Candidates(found.token_ids[is_mine], found.logprobs[is_mine])
        if len(candidates.token_ids) != expected:
            num_found = len(candidates.token_ids)
            return RowError(row, f"the worker returned {num_found} candidates for this beam, expected {expected}")
        search.put(seq.sample_index, candidates)
        return None

    def _advance(self, group: SequenceGroup) -> list[Completion] | None:
        """Move the beams of a search. Returns its outputs if it has ended, the best first."""
        search, r, rows = group.features.get(Beams).search, self.worker.rows, rows_of(group)
        length = int(r.num_tokens[rows[0]] - r.prompt_len[rows[0]]) + 1
        moves = search.advance(length, lambda beam: r.output_tokens(int(rows[beam])))
        if moves is None:
            return search.hypotheses
        self.move(group, moves)
        return None

    def move(self, group: SequenceGroup, moves: list[Move]) -> None:
        """Apply the moves of a search. Each of its beams must have a row and no tokens left to compute."""
        rows = rows_of(group)
        parents = rows[[move.parent for move in moves]]
        token_ids = [move.token_id for move in moves]
        moved = rows != parents
        if moved.any():
            self._tables |= take_tables(self.worker.rows, self.worker.pool, rows[moved], parents[moved])
            for part in self.worker.parts_of_all:
                part.take_over(rows[moved], parents[moved])
            self._take_tokens(rows[moved], parents[moved])
        r = self.worker.rows
        r.tokens[rows, r.num_tokens[rows]] = token_ids
        r.num_tokens[rows] += 1
        r.num_planned[rows] += 1
        for row, parent, token_id in zip(rows.tolist(), parents.tolist(), token_ids, strict=True):
            self._moves[row] = parent, token_id

    def _take_tokens(self, rows: I64, parents: I64) -> None:
        r = self.worker.rows
        start, end = int(r.prompt_len[rows[0]]), int(r.num_tokens[rows[0]])
        r.tokens[rows, start:end] = r.tokens[parents, start:end]
        digests = [list(r.digests[parent]) for parent in parents.tolist()]
        for row, known in zip(rows.tolist(), digests, strict=True):
            r.digests[row][:] = known  # `Sequence.digests` is the same list

    def close(self, row: int) -> None:
        """Discard the moves of a closed row."""
        self._moves.pop(row, None)
        self._tables.pop(row, None)


Beams.part = BeamRows


def take_tables(tables: BlockTables, pool: BlockManager, rows: I64, parents: I64) -> dict[int, tuple[I64, I64]]:
    """Share the parents' blocks, then free the rows' previous blocks. No step in flight uses those: the last step of
    these rows was answered, and blocks of ended rows keep a reference until their last step is answered. Returns the
    changes of each row: indices of its table, and blocks.
    """
    changed: dict[int, tuple[I64, I64]] = {}
    width = int(tables.num_blocks[rows[0]])  # equal for all beams
    before = tables.table[rows, :width].astype(np.int64)
    after = tables.table[parents, :width].astype(np.int64)
    places, firsts = np.arange(width), tables.first_block[parents]
    had, has = places >= tables.first_block[rows, None], places >= firsts[:, None]
    stays = (before == after) & had & has
    for i in range(len(rows)):
        pool.share(after[i, has[i] & ~stays[i]])
    for i, row in enumerate(rows.tolist()):
        pool.free(before[i, had[i] & ~stays[i]][::-1])
        changes = has[i] & (before[i] != after[i])
        changed[row] = changes.nonzero()[0], after[i, changes]
    tables.table[rows, :width], tables.first_block[rows] = np.where(has, after, before), firsts
    return changed


def beam_blocks(
    num_prompt: int,
    max_tokens: int,
    width: int,
    block_size: int,
    blocks_before: int | None = None,
    *,
    shares_prompt: bool = True,
) -> int:
    """The largest number of blocks that the beams of one search use in total. The beams share the full blocks of the
    prompt, and the last token of each beam needs no KV. `blocks_before`: see `WorkerCapacity`. `shares_prompt`: not
    with cache groups or recurrent layers, where a beam that is computed again may miss the window before the end of the
    prompt, or the snapshot.
    """
    shared = num_prompt // block_size if shares_prompt else 0
    num_blocks = shared + width * (ceil_div(num_prompt + max_tokens - 1, block_size) - shared)
    return num_blocks if blocks_before is None else min(num_blocks, width * (blocks_before + 1))


def _num_blocks(group: SequenceGroup, capacity: WorkerCapacity) -> int:
    """The largest number of blocks that the beams of a request use together."""
    size = len(group.prompt), group.stop.max_tokens, group.num_sequences
    shares_prompt = not capacity.groups and capacity.num_snapshots is None
    return beam_blocks(*size, capacity.block_size, capacity.blocks_before, shares_prompt=shares_prompt)


def rows_of(group: SequenceGroup) -> I64:
    """The rows of all beams of a running search, in the order of the beams."""
    return np.array([seq.row for seq in group.sequences], dtype=np.int64)


def newest_of_each(rows: U32, indices: U32, blocks: U32) -> tuple[U32, U32, U32]:
    """The last change of each table entry. In one step, a beam may get a shared block and then a copy of this block in
    the same entry.
    """
    entries = rows.astype(np.int64) << 32 | indices
    _, newest = np.unique(entries[::-1], return_index=True)
    kept = np.sort(len(entries) - 1 - newest)
    return rows[kept], indices[kept], blocks[kept]
