"""Answers of GetSchedulerStatus and GetPools.

However many callers GetPools has, the core is read for the same workers at most once per MIN_INTERVAL_S. The size of an
answer is bounded: of a pool with more blocks than MAX_CELLS the used blocks are shown first, as cells of several blocks
if they are so many, and only the first rows and waiting sequences are listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2

from prefix_index.index import PrefixIndex
from scheduler_svc.core.block_manager import CACHED, USED, ceil_div
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import OpenSequence
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.pool import WorkerPool
from step_protocol.columns import I64, U32, u32_to_bytes

MIN_INTERVAL_S = 0.2
MAX_CELLS = 4096
MAX_ROWS = 256

U8 = npt.NDArray[np.uint8]
Column = TypeVar("Column", U8, U32)


def describe(
    step_loop: StepLoop, pool: WorkerPool, index: PrefixIndex, num_gateways: int, listen_address: str
) -> inference_pb2.SchedulerStatus:
    """The scheduler's status: queue, prefix hits and workers. The gateway sets `connected`."""
    core = step_loop.core
    stats = core.stats()
    status = inference_pb2.SchedulerStatus(
        address=listen_address,
        model=pool.info.model if pool.info is not None else "",
        revision=pool.info.revision if pool.info is not None else "",
        prefix_index=index.state(),
        num_gateways=num_gateways,
        workers=pool.describe(stats),
        max_waiting=core.config.max_waiting,
        max_waiting_tokens=core.config.max_waiting_tokens,
    )
    counts = stats.counts
    status.num_waiting, status.num_running = stats.num_waiting, stats.num_running
    status.pending_tokens, status.refused_deadline = stats.pending_tokens, counts.refused_deadline
    status.prefix_query_tokens = counts.prefix_cache_queries
    status.prefix_hit_tokens = counts.prefix_cache_hits
    status.preemptions = counts.num_requeued
    status.accepted_draft_tokens = counts.accepted_draft_tokens
    status.steps = counts.steps
    status.slowest.extend(map(_open_request_to_proto, core.slowest(asyncio.get_running_loop().time())))
    times = step_loop.times
    status.output_tokens, status.finished = times.output_tokens, times.num_finished
    status.first_token.bounds_s.extend(times.first_token.bounds)
    status.first_token.counts.extend(times.first_token.counts)
    status.first_token.sum_s = times.first_token.total
    return status


def _open_request_to_proto(open_sequence: OpenSequence) -> inference_pb2.OpenRequest:
    sequence = open_sequence.sequence
    return inference_pb2.OpenRequest(
        request_id=sequence.group.request_id,
        worker_id=sequence.worker_id or "",
        age_s=max(0.0, open_sequence.age_s),
        prompt_tokens=len(sequence.group.prompt),
        output_tokens=max(0, open_sequence.num_output_tokens),
    )


class PoolSnapshots:
    """Owns the newest answer. `now` is the event loop's clock."""

    def __init__(self, step_loop: StepLoop, now: Callable[[], float]) -> None:
        self._step_loop = step_loop
        self._now = now
        self._newest: dict[tuple[str, ...], tuple[float, scheduler_pb2.GetPoolsResponse]] = {}  # by workers

    def newest(self, worker_ids: Iterable[str] = ()) -> scheduler_pb2.GetPoolsResponse:
        """The state of these pools, or of the first ones, at most MIN_INTERVAL_S old."""
        now, wanted = self._now(), tuple(worker_ids)
        self._newest = {key: made for key, made in self._newest.items() if now - made[0] < MIN_INTERVAL_S}
        if wanted not in self._newest:
            self._newest[wanted] = now, self._read(wanted, now)
        return self._newest[wanted][1]

    def _read(self, worker_ids: tuple[str, ...], now: float) -> scheduler_pb2.GetPoolsResponse:
        core = self._step_loop.core
        return scheduler_pb2.GetPoolsResponse(
            pools=[pool_state(worker, now) for worker in core.first_workers(worker_ids)],
            waiting=[_waiting_to_proto(waiting) for waiting in core.waiting_snapshot(now)],
        )


def pool_state(worker: WorkerState, now: float) -> scheduler_pb2.PoolState:
    """The state of this worker's pool, as cells of `blocks_per_cell` blocks, and its first rows."""
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
    return scheduler_pb2.PoolState(
        worker_id=worker.capacity.worker_id,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        blocks_per_cell=per_cell,
        num_shared=int(np.count_nonzero(pool.refs > 1)),
        states=_cells(states, per_cell).tobytes(),
        owners=u32_to_bytes(_cells(owners, per_cell)),
        rows=[_row_to_proto(rows, row, now) for row in listed],
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


def _row_to_proto(rows: RowTable, row: int, now: float) -> scheduler_pb2.SequenceState:
    sequence = rows.sequence(row)
    message = _sequence_to_proto(sequence, now - sequence.group.arrival, int(rows.num_tokens[row]))
    message.row, message.num_computed_tokens = row, int(rows.num_computed_tokens[row])
    message.num_blocks, message.is_prefill = int(rows.num_blocks[row]), rows.todo_of(row) > 1
    return message


def _waiting_to_proto(waiting: OpenSequence) -> scheduler_pb2.SequenceState:
    return _sequence_to_proto(waiting.sequence, waiting.age_s, waiting.sequence.data.num_tokens)


def _sequence_to_proto(sequence: Sequence, age_s: float, num_tokens: int) -> scheduler_pb2.SequenceState:
    return scheduler_pb2.SequenceState(
        request_id=sequence.group.request_id,
        sample_index=sequence.sample_index,
        prompt_tokens=len(sequence.group.prompt),
        num_tokens=num_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        age_s=max(0.0, age_s),
        preemptions=sequence.num_preemptions,
    )
