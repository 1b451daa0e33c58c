"""Snapshots of the states of recurrent layers: where they are taken, which are kept, and which a row starts from.

A model with recurrent layers has, besides its blocks, a state per row: one matrix per head, of constant size. Cached
blocks alone are no hit for such a model, because the state after their tokens is needed too. So a row starts from the
deepest snapshot at or before the cached blocks, and computes the rest again; the worker keeps the snapshots in slots
that the scheduler gives.

    cached blocks  |######|######|######|######|      a hit of 4 blocks
    snapshots             ^2            ^4 evicted    the row starts after block 2

Where
    - at the last block boundary below the end of a prompt: the same prompt, or its next turn, starts there;
    - where a prompt leaves the cached blocks of another one: what both share is likely to come again;
    - in long prompts each time that the tokens since the last snapshot have as much KV as the snapshot has bytes, so
      that snapshots take at most as much memory as the blocks that they make useful;
    - at each block boundary of an output, in place of the previous one of the row: the next turn starts at the last.
      A row that speculates asks at each boundary that a step may pass; the answer says whether it has passed it.
    All are at block boundaries, because blocks are the unit of hits.

When
    A step takes snapshots as it passes their positions, so they cost no step. A snapshot can be used when that step is
    answered, and only if its row was not closed by then: a row that failed, or that read what a failed row wrote, is
    closed before. A slot may be overwritten in and after the step whose rows start from it, because they copy it when
    they open. A move that begins while that step is planned may write before it, so it takes none of its slots.

Moves
    A snapshot moves with the blocks before it (block_moves.py), and is kept while another worker reads it. Those of
    prompts, and the last one of an output when its row ends, are committed like blocks, so that a tier keeps them.

Price (GreedyDual)
    A snapshot is worth the tokens that would be computed without it: since the previous snapshot of its row. The slot
    with the lowest `clock + tokens` is evicted, and the clock becomes that number, so that old snapshots lose to new
    ones; a hit sets it anew. A snapshot whose blocks are evicted is worth nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from prefix_index.hashing import snapshot_digest, state_id
from scheduler_svc.core.features.adapters import adapter_of
from scheduler_svc.core.messages import Counts, Deltas, MovedExtra, RowAssignment
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.speculation import Accepted
from scheduler_svc.core.worker_state import Advance, InFlightStep, StepPlan, WorkerPart, WorkerState
from step_protocol.columns import U32, Bools
from step_protocol.features import TakenSnapshots
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError


@dataclass(slots=True)
class Kept:
    """A snapshot that rows can start from."""

    slot: int
    tokens: int  # that are computed again without it
    value: float
    was_hit: bool = False
    is_committed: bool = False


@dataclass(slots=True)
class Taken:
    """A snapshot of a step in flight."""

    row: int
    position: int
    slot: int
    tokens: int
    is_last: bool  # of the row's output: it replaces the previous one
    is_sure: bool  # that the step computes this position; a row that speculates may not come so far, or be beyond it
    digests: list[bytes] | None = None  # of the row's blocks, once the step is answered


@dataclass(slots=True)
class RowPlan:
    """Where snapshots of one row are taken."""

    digests: list[bytes]
    positions: list[int]  # in the tokens that the row opened with, ascending
    end: int  # number of these tokens; snapshots behind them replace each other
    newest: int  # position of the newest snapshot
    last: bytes = b""  # digest of the newest one behind `end`


class Snapshots(WorkerPart):
    """The snapshots of one worker. Only workers of models with recurrent layers have this part, for all their rows."""

    def __init__(self, worker: WorkerState, counts: Counts) -> None:
        super().__init__(worker)
        capacity = worker.capacity
        self.counts = counts
        self.kept: dict[bytes, Kept] = {}  # by the digest of the block that ends at the position
        self._block_size = capacity.block_size
        self._spacing = max(1, -(-capacity.snapshot_tokens // capacity.block_size)) * capacity.block_size
        self._free = list(range((capacity.num_snapshots or 0) - 1, -1, -1))
        self._rows: dict[int, RowPlan] = {}
        self._in_flight: dict[int, list[Taken]] = {}  # by step id
        self._answered: list[Taken] = []  # of the step whose answer is being applied
        self._lent: Counter[int] = Counter()  # slot -> moves that read it
        self._forgotten: set[int] = set()  # lent slots that become free when they are not read any more
        self._opening: set[int] = set()  # slots that rows of the step that is being planned start from
        self._arriving: dict[int, int] = {}  # slot -> tokens that its snapshot will save
        self._first_id = capacity.num_all_blocks
        self._has_tier = capacity.movement is not None and capacity.movement.has_tier
        self._commits: list[bytes] = []  # digests of the blocks of snapshots that the next message commits
        self._clock = 0.0

    @property
    def num_kept(self) -> int:
        return len(self.kept)

    # -- hits ---------------------------------------------------------------------------------------------------------

    def usable_hits(self, digests: Seq[bytes], num_blocks: int, token_ids: U32 | None = None) -> int:
        while num_blocks and digests[num_blocks - 1] not in self.kept:
            num_blocks -= 1
        return num_blocks

    def open(self, seq: Sequence, opened: RowAssignment, plan: StepPlan) -> None:
        digests, end, start = seq.digests, seq.data.num_tokens, opened.num_computed_tokens
        row_plan = self._rows[opened.row] = RowPlan(digests, [], end, start)
        if opened.fork_of_row is not None:
            return
        if start:
            opened.snapshot = self._hit(digests[start // self._block_size - 1])
        if self.worker.rows.is_private[opened.row]:
            del self._rows[opened.row]  # its blocks are no prefixes
            return
        row_plan.positions = self._positions(seq, start, end)

    def _hit(self, digest: bytes) -> int:
        kept = self.kept[digest]
        kept.was_hit, kept.value = True, self._clock + kept.tokens
        self.counts.snapshot_hits += 1
        self._opening.add(kept.slot)
        return kept.slot

    def _positions(self, seq: Sequence, start: int, end: int) -> list[int]:
        """The positions of snapshots in the tokens from `start` to `end`, ascending."""
        bs, last = self._block_size, (end - 1) // self._block_size * self._block_size
        branch = bs * self.worker.pool.match_len(seq.digests, seq.max_cached_tokens // bs)
        self.counts.snapshot_misses += max(0, branch - start)
        wanted = {last, branch, *range(start + self._spacing, last, self._spacing)}
        return sorted(position for position in wanted if start < position <= last)

    # -- steps --------------------------------------------------------------------------------------------------------

    def fill(self, batch: StepBatch) -> None:
        self._opening.clear()
        if self._commits:
            self._send_commits(batch)
        least, most = self.worker.context_bounds(batch)
        ends = most + batch.query_lens
        crosses = ends // self._block_size > least // self._block_size
        if not np.count_nonzero(crosses):
            return
        taken: list[Taken] = []
        for i in np.flatnonzero(crosses).tolist():
            row = int(batch.rows[i])
            plan = self._rows.get(row)
            if plan is not None:
                taken += self._take(row, plan, int(least[i]), int(ends[i]), is_sure=bool(least[i] == most[i]))
        if not taken:
            return
        self._in_flight[batch.step_id] = taken
        columns = [(one.row, one.position, one.slot) for one in taken]
        batch.add(TakenSnapshots(*np.array(columns, np.uint32).T.copy()))

    @property
    def has_changes(self) -> bool:
        return bool(self._commits)

    def _send_commits(self, batch: StepBatch) -> None:
        commits, self._commits = [digest for digest in self._commits if digest in self.kept], []
        ids = np.array([self._first_id + self.kept[digest].slot for digest in commits], dtype=np.uint32)
        batch.commit_blocks = np.concatenate((batch.commit_blocks, ids))
        batch.commit_digests = batch.commit_digests + [snapshot_digest(digest) for digest in commits]

    def _commit(self, digest: bytes) -> None:
        kept = self.kept.get(digest)
        if self._has_tier and kept is not None and not kept.is_committed:
            kept.is_committed = True
            self._commits.append(digest)

    def _take(self, row: int, plan: RowPlan, context: int, end: int, *, is_sure: bool) -> list[Taken]:
        """The snapshots of a row whose tokens from `context` to `end` a step computes, or may compute."""
        first, stop = (bisect_right(plan.positions, position) for position in (context, min(end, plan.end)))
        wanted = [(position, False) for position in plan.positions[first:stop]]
        if not self.worker.rows.is_awaiting[row]:
            behind = max(plan.end, context) // self._block_size + 1
            wanted += [(index * self._block_size, True) for index in range(behind, end // self._block_size + 1)]
        taken = []
        for position, is_last in wanted:
            index = position // self._block_size - 1
            if index < len(plan.digests) and plan.digests[index] in self.kept:
                plan.newest = position
                continue
            slot = self._take_slot(position - plan.newest, plan if is_last and is_sure else None)
            if slot is not None:
                taken.append(Taken(row, position, slot, position - plan.newest, is_last, is_sure))
                plan.newest = position if not is_last else plan.newest
        return taken

    def _take_slot(self, tokens: int, replacing: RowPlan | None) -> int | None:
        """A slot for a snapshot that saves so many tokens; None if all slots hold snapshots that are worth more."""
        if replacing is not None and self._is_replaceable(replacing.last):
            return self._drop(replacing.last)
        if self._free:
            return self._free.pop()
        held = self.worker.pool.held
        in_use = self._lent.keys() | self._opening
        free = [digest for digest, kept in self.kept.items() if kept.slot not in in_use]
        lowest = min(free, key=lambda digest: self.kept[digest].value if digest in held else 0.0, default=None)
        if lowest is None:
            return None
        value = self.kept[lowest].value if lowest in held else 0.0
        if value > self._clock + tokens:
            return None
        self._clock = max(self._clock, value)
        self.counts.snapshots_evicted += 1
        return self._drop(lowest)

    def _is_replaceable(self, digest: bytes) -> bool:
        kept = self.kept.get(digest)
        return kept is not None and not kept.was_hit and kept.slot not in self._lent

    def _drop(self, digest: bytes) -> int:
        return self.kept.pop(digest).slot

    # -- answers ------------------------------------------------------------------------------------------------------

    def read(self, step: InFlightStep, output: StepOutput, is_open: Bools | None, deltas: Deltas) -> list[RowError]:
        self._answered = self._in_flight.pop(step.step_id, [])
        for taken in self._answered:
            if taken.row not in step.closed and (taken.is_sure or _has_passed(step.accepted, taken)):
                taken.digests = self.worker.rows.digests[taken.row]
        return []

    def advance(self, step: InFlightStep, output: StepOutput) -> Advance | None:
        for taken in self._answered:
            self._keep(taken)
        self._answered = []
        return None

    def _keep(self, taken: Taken) -> None:
        """A snapshot is complete. Rows can start from it unless its row was closed, or its blocks have no digest."""
        index, digests = taken.position // self._block_size - 1, taken.digests
        if digests is None or index >= len(digests) or digests[index] in self.kept:
            self._free.append(taken.slot)
            return
        digest = digests[index]
        self.kept[digest] = Kept(taken.slot, taken.tokens, self._clock + taken.tokens)
        self.counts.snapshots_taken += 1
        plan = self._rows.get(taken.row)
        if not taken.is_last or plan is None:
            self._commit(digest)
        if not taken.is_last or plan is None or plan.digests is not digests:
            return
        if plan.last != digest and self._is_replaceable(plan.last):
            self._free.append(self._drop(plan.last))
        plan.last = digest

    def close(self, row: int) -> None:
        plan = self._rows.pop(row, None)
        if plan is not None:
            self._commit(plan.last)

    # -- moves --------------------------------------------------------------------------------------------------------

    def extras_at(self, num_blocks: int) -> range:
        return range(max(0, num_blocks - 1), num_blocks)

    def holds(self, digest: bytes) -> bool:
        return digest in self.kept

    def name_in_tier(self, digest: bytes) -> bytes:
        return snapshot_digest(digest)

    def name_extra(self, seq: Sequence, token_ids: U32, digest: bytes) -> tuple[bytes, U32]:
        found = state_id(token_ids, adapter_of(seq.group))
        return found[4:], np.frombuffer(found, np.uint32)

    def blocks_worth(self, num_extras: int) -> float:
        return num_extras * self._spacing / self._block_size

    def reserve(self, num_extras: int, num_tokens: int) -> list[int]:
        slots = [slot for _ in range(num_extras) if (slot := self._take_slot(num_tokens, None)) is not None]
        self._arriving.update(dict.fromkeys(slots, num_tokens))
        return [self._first_id + slot for slot in slots]

    def receive(self, extras: Seq[MovedExtra], num_arrived: int) -> None:
        for number, extra in enumerate(extras):
            slot, digest = extra.block_id - self._first_id, extra.block_digest
            tokens = self._arriving.pop(slot)
            if number >= num_arrived or digest in self.kept:
                self._free.append(slot)
                continue
            self.kept[digest] = Kept(slot, tokens, self._clock + tokens)
            self._commit(digest)

    def lend(self, digests: Seq[bytes]) -> list[int]:
        slots = [self.kept[digest].slot for digest in digests]
        self._lent.update(slots)
        return [self._first_id + slot for slot in slots]

    def take_back(self, ids: Seq[int]) -> None:
        self._lent -= Counter(block_id - self._first_id for block_id in ids)
        ended = self._forgotten - self._lent.keys()
        self._forgotten -= ended
        self._free += ended

    def forget_all(self) -> None:
        """No row starts from a snapshot that was taken so far. No step is in flight."""
        slots = {kept.slot for kept in self.kept.values()}
        self._free += slots - self._lent.keys()
        self._forgotten |= slots & self._lent.keys()
        self.kept.clear()
        self._commits.clear()
        self._rows.clear()


def _has_passed(accepted: Accepted | None, taken: Taken) -> bool:
    """Whether an answered step has computed the position of a snapshot of a row that speculates."""
    if accepted is None:
        return False
    rows, starts, ends = accepted  # the newest known token is not computed
    return bool(np.count_nonzero((rows == taken.row) & (starts <= taken.position) & (taken.position < ends)))
