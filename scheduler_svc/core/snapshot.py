"""What the blocks and rows of a worker hold at one moment, for people who look at it. Reading changes nothing.

The size of a snapshot is bounded: a pool with more blocks than MAX_CELLS is shown as cells of several blocks, and only
the first rows and waiting sequences are listed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.policy import ceil_div
from scheduler_svc.core.queue.requests import Requests
from scheduler_svc.core.sequence import Sequence, SequenceStage
from scheduler_svc.core.steps.worker_books import WorkerBooks

MAX_CELLS = 4096
MAX_ROWS = 256
MAX_WAITING = 64
MAX_SLOWEST = 10

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
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
    """One worker's pool as cells of `blocks_per_cell` blocks, and its rows in order of admission.

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


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence that has not ended."""

    sequence: Sequence
    age_s: float
    num_output_tokens: int


def pool_snapshot(worker: WorkerBooks) -> PoolSnapshot:
    """The state of this worker's pool."""
    rows, pool = worker.rows, worker.pool
    listed = rows.active()[:MAX_ROWS].tolist()
    owners = np.zeros(pool.num_blocks, dtype=np.uint32)
    for index, row in enumerate(listed):
        owners[rows.table[row, : rows.num_blocks[row]]] = index + 1
    states = pool.states()
    per_cell = ceil_div(pool.num_blocks, MAX_CELLS)
    return PoolSnapshot(
        worker_id=worker.capacity.worker_id,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        blocks_per_cell=per_cell,
        num_shared=int(np.count_nonzero(pool.refs > 1)),
        states=_cells(states, per_cell),
        owners=_cells(owners, per_cell),
        rows=[_row(worker, row) for row in listed],
    )


def _cells(values: Column, per_cell: int) -> Column:
    """The highest value of each `per_cell` consecutive ones."""
    if per_cell == 1:
        return values
    missing = -len(values) % per_cell
    highest: Column = np.pad(values, (0, missing)).reshape(-1, per_cell).max(axis=1)
    return highest


def _row(worker: WorkerBooks, row: int) -> RowSnapshot:
    rows = worker.rows
    return RowSnapshot(
        row=row,
        sequence=rows.sequence(row),
        num_tokens=int(rows.num_tokens[row]),
        num_computed_tokens=int(rows.num_computed_tokens[row]),
        is_prefill=rows.stage(row) is SequenceStage.PREFILL,
        num_blocks=int(rows.num_blocks[row]),
    )


def waiting_snapshot(requests: Requests, now: float) -> list[OpenSequence]:
    """The first waiting sequences, in the order of the queue."""
    return [
        OpenSequence(seq, now - seq.group.arrival, len(seq.data.output))
        for seq in islice(requests.waiting.sequences(), MAX_WAITING)
    ]


def slowest(requests: Requests, workers: Collection[WorkerBooks], now: float) -> list[OpenSequence]:
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
