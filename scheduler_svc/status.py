"""Answers of GetSchedulerStatus and GetPools.

However many callers GetPools has, the core is read for the same workers at most once per MIN_INTERVAL_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2

from prefix_index.index import PrefixIndex
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import OpenSequence, PoolSnapshot
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.pool import WorkerPool
from step_protocol.columns import u32_to_bytes

MIN_INTERVAL_S = 0.2


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
            pools=[_pool_to_proto(pool, now) for pool in core.pool_snapshots(worker_ids)],
            waiting=[_waiting_to_proto(waiting) for waiting in core.waiting_snapshot(now)],
        )


def _pool_to_proto(pool: PoolSnapshot, now: float) -> scheduler_pb2.PoolState:
    message = scheduler_pb2.PoolState(
        worker_id=pool.worker_id,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        blocks_per_cell=pool.blocks_per_cell,
        num_shared=pool.num_shared,
        is_ordered=pool.is_ordered,
        states=pool.states.tobytes(),
        owners=u32_to_bytes(pool.owners),
    )
    for row in pool.rows:
        state = _sequence_to_proto(row.sequence, now - row.sequence.group.arrival, row.num_tokens)
        state.row, state.num_computed_tokens = row.row, row.num_computed_tokens
        state.num_blocks, state.is_prefill = row.num_blocks, row.is_prefill
        message.rows.append(state)
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
