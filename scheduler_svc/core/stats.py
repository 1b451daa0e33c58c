"""Load, statistics and snapshots of the core, for operators. Reading them changes nothing.

The size of a snapshot is bounded: of a pool with more blocks than MAX_CELLS the used blocks are shown first, as cells
of several blocks if they are so many, and only the first rows and waiting sequences are listed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.block_manager import CACHED, USED, ceil_div
from scheduler_svc.core.messages import Counts
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps.costs import Costs
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import I64, U32


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a scheduler. Cheap enough to read for every refusal and heartbeat."""

    num_waiting: int = 0  # sequences in the queue
    num_running: int = 0
    pending_tokens: int = 0  # prompt tokens to compute, in the queue and on all workers


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker's occupancy."""

    worker_id: str
    rows_used: int
    rows_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    steps_in_flight: int

    @property
    def blocks_total(self) -> int:
        return self.blocks_free + self.blocks_cached + self.blocks_used


@dataclass(frozen=True, slots=True)
class SchedulerStats(Load):
    """The values that status and metrics show. A new gauge is a field here and a line in scheduler_svc/metrics.py."""

    workers: list[WorkerStats] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    num_unschedulable: int = 0  # sequences in the queue that no present worker could run
    waiting_tokens: int = 0  # of the queue, to compute and expected to be generated
    costs: Costs = field(default_factory=Costs)

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of all workers' blocks that sequences use, 0 to 1."""
        used = sum(worker.blocks_used for worker in self.workers)
        return used / max(1, sum(worker.blocks_total for worker in self.workers))


def load_of(requests: Requests, workers: Collection[WorkerState]) -> Load:
    """The load of a scheduler with these requests and workers."""
    return Load(
        num_waiting=len(requests.waiting),
        num_running=sum(worker.rows.num_used for worker in workers),
        pending_tokens=requests.waiting.pending_tokens + sum(worker.pending_prefill for worker in workers),
    )


def worker_stats(worker: WorkerState) -> WorkerStats:
    """The occupancy of this worker."""
    return WorkerStats(
        worker_id=worker.capacity.worker_id,
        rows_used=worker.rows.num_used,
        rows_total=worker.capacity.max_num_seqs,
        blocks_free=worker.pool.num_empty,
        blocks_cached=worker.pool.num_cached,
        blocks_used=worker.pool.num_used,
        steps_in_flight=len(worker.in_flight),
    )


def scheduler_stats(requests: Requests, workers: Collection[WorkerState], counts: Counts) -> SchedulerStats:
    """A snapshot of all statistics."""
    load = load_of(requests, workers)
    return SchedulerStats(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        pending_tokens=load.pending_tokens,
        workers=[worker_stats(worker) for worker in workers],
        counts=replace(counts, migrations=counts.migrations.copy()),
        num_unschedulable=len(requests.waiting.unschedulable if workers else requests.waiting),
        waiting_tokens=requests.waiting.expected_tokens,
        costs=requests.costs,
    )


MAX_CELLS = 4096
MAX_ROWS = 256
MAX_WAITING = 64
MAX_SLOWEST = 10

U8 = npt.NDArray[np.uint8]
Column = TypeVar("Column", U8, U32)


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """One running sequence."""

    row: int
    sequence: Sequence
    num_tokens: int
    num_computed_tokens: int
    is_prefill: bool
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One worker's pool as cells of `blocks_per_cell` blocks, and its rows in order of admission. `is_ordered`: used
    blocks come first, and not all others have a cell.

    `states`: the highest state of the blocks of each cell (BlockManager.states). `owners`: 1 + the index in `rows` of a
    row that uses the cell; 0: none that is listed.
    """

    worker_id: str
    num_blocks: int
    block_size: int
    blocks_per_cell: int
    num_shared: int
    states: U8  # [C]
    owners: U32  # [C]
    rows: list[RowSnapshot]
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence that has not ended."""

    sequence: Sequence
    age_s: float
    num_output_tokens: int


def pool_snapshot(worker: WorkerState) -> PoolSnapshot:
    """The state of this worker's pool."""
    rows, pool = worker.rows, worker.pool
    listed = rows.active()[:MAX_ROWS].tolist()
    owners = np.zeros(pool.num_blocks, dtype=np.uint32)
    for index, row in enumerate(listed):
        owners[rows.table[row, : rows.num_blocks[row]]] = index + 1
    states, per_cell = pool.states(), 1
    if is_ordered := pool.num_blocks > MAX_CELLS:
        per_cell = max(1, ceil_div(pool.num_used, MAX_CELLS))
        order = _used_first(states, owners)[: per_cell * MAX_CELLS]
        states, owners = states[order], owners[order]
    return PoolSnapshot(
        worker_id=worker.capacity.worker_id,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        blocks_per_cell=per_cell,
        num_shared=int(np.count_nonzero(pool.refs > 1)),
        states=_cells(states, per_cell),
        owners=_cells(owners, per_cell),
        rows=[_row(worker, row) for row in listed],
        is_ordered=is_ordered,
    )


def _used_first(states: U8, owners: U32) -> I64:
    """The blocks: used ones by owner, then cached ones, then free ones."""
    used = np.flatnonzero(states >= USED)
    used = used[np.argsort(owners[used].astype(np.uint16), kind="stable")]  # 16 bits: a radix sort
    return np.concatenate((used, np.flatnonzero(states == CACHED), np.flatnonzero(states < CACHED)))


def _cells(values: Column, per_cell: int) -> Column:
    """The highest value of each `per_cell` consecutive ones."""
    if per_cell == 1:
        return values
    missing = -len(values) % per_cell
    highest: Column = np.pad(values, (0, missing)).reshape(-1, per_cell).max(axis=1)
    return highest


def _row(worker: WorkerState, row: int) -> RowSnapshot:
    rows = worker.rows
    return RowSnapshot(
        row=row,
        sequence=rows.sequence(row),
        num_tokens=int(rows.num_tokens[row]),
        num_computed_tokens=int(rows.num_computed_tokens[row]),
        is_prefill=rows.todo_of(row) > 1,
        num_blocks=int(rows.num_blocks[row]),
    )


def waiting_snapshot(requests: Requests, now: float) -> list[OpenSequence]:
    """The first waiting sequences, in the order of the queue."""
    return [
        OpenSequence(seq, now - seq.group.arrival, len(seq.data.output))
        for seq in islice(requests.waiting.sequences(), MAX_WAITING)
    ]


def slowest(requests: Requests, workers: Collection[WorkerState], now: float) -> list[OpenSequence]:
    """The oldest open sequences, one per request."""
    tables = {worker.capacity.worker_id: worker.rows for worker in workers}
    found = []
    for group in nsmallest(MAX_SLOWEST, requests.groups.values(), key=lambda group: group.arrival):
        seq = next((seq for seq in group.sequences if not seq.is_finished), None)
        if seq is None:
            continue
        table = tables.get(seq.worker_id or "")
        is_running = table is not None and seq.row is not None
        num_tokens = int(table.num_tokens[seq.row]) if table is not None and is_running else seq.data.num_tokens
        found.append(OpenSequence(seq, now - group.arrival, num_tokens - len(group.prompt)))
    return found
