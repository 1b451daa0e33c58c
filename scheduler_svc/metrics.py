"""The scheduler's numbers. What the core counts is read at a scrape; only requests and turns are timed as they pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from quire.v1 import types_pb2

from scheduler_svc.core.messages import Deltas, Finished, MigrationReason, SchedulerStats
from scheduler_svc.core.sequence import SequenceGroup
from svc_common.metrics import LATENCIES_S, SHORT_TIMES_S, Buckets, Row, Spec

MODEL = ("model_name",)
WORKER = ("model_name", "worker_id")
WORKER_STATES = ("loading", "ready", "draining", "lost")

Sample = tuple[int, int, int]  # owner, handle, sample index
STEP_BYTES = tuple(64 * 4**power for power in range(10))  # to 16 MiB

SPECS = (
    Spec("num_requests_waiting", "gauge", "sequences in the queue", "", MODEL, ("num_requests_waiting",)),
    Spec("num_requests_running", "gauge", "sequences that hold a row", "", MODEL, ("num_requests_running",)),
    Spec("max_requests_waiting", "gauge", "sequences that may wait (--max-waiting)", "", MODEL),
    Spec("pending_tokens", "gauge", "prompt tokens to compute, queue and workers together", "tokens", MODEL),
    Spec("requests_refused_total", "counter", "requests not taken, by status code", "", ("model_name", "code")),
    Spec("rows_used", "gauge", "rows of a worker that hold a sequence", "", WORKER),
    Spec("rows_limit", "gauge", "rows of a worker (--max-num-seqs)", "", WORKER),
    Spec(
        "kv_blocks",
        "gauge",
        "blocks of a worker's pool: used by sequences, cached (hold a prefix that nobody uses now), free (empty)",
        "",
        (*WORKER, "state"),
    ),
    Spec(
        "kv_cache_usage_perc",
        "gauge",
        "part of all workers' blocks that sequences use, 0 to 1",
        "",
        MODEL,
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    Spec(
        "cache_config_info",
        "gauge",
        "1; the pool in its labels, blocks of all workers together",
        "",
        (*MODEL, "block_size", "num_gpu_blocks"),
        ("cache_config_info",),
    ),
    Spec(
        "prefix_cache_queries_total",
        "counter",
        "prompt tokens of admitted sequences",
        "tokens",
        MODEL,
        ("prefix_cache_queries_total",),
    ),
    Spec(
        "prefix_cache_hits_total",
        "counter",
        "those of them that were cached",
        "tokens",
        MODEL,
        ("prefix_cache_hits_total",),
    ),
    Spec(
        "num_preemptions_total",
        "counter",
        "sequences sent back to the queue for lack of blocks or for a more urgent one",
        "",
        MODEL,
        ("num_preemptions_total",),
    ),
    Spec(
        "migrations_total",
        "counter",
        "sequences taken off a worker to go on at another: it drains, was lost, or failed the row",
        "",
        ("model_name", "reason"),
    ),
    Spec("workers", "gauge", "workers known, by state; lost ones for five minutes", "", ("model_name", "state")),
    Spec("gateways", "gauge", "gateways attached", "", MODEL),
    Spec("steps_total", "counter", "steps sent to workers", "", MODEL),
    Spec("step_round_trip_seconds", "histogram", "time from sending a step to its answer", "seconds", MODEL),
    Spec("scheduler_step_bytes", "histogram", "one step and its answer on the wire", "bytes", MODEL),
    Spec(
        "scheduler_step_rows_total",
        "counter",
        "rows that these steps computed",
        "",
        MODEL,
    ),
    Spec("scheduler_turn_seconds", "histogram", "time the core takes for what came together", "seconds"),
    Spec("scheduler_idle_seconds_total", "counter", "time the core waited for something to do", "seconds"),
    Spec(
        "request_queue_time_seconds",
        "histogram",
        "time from arrival to the first place in a step; of sequences that got a first token",
        "seconds",
        MODEL,
        ("request_queue_time_seconds",),
    ),
    Spec(
        "request_prefill_time_seconds",
        "histogram",
        "time from the first place in a step to the first token",
        "seconds",
        MODEL,
        ("request_prefill_time_seconds",),
    ),
    Spec(
        "request_decode_time_seconds",
        "histogram",
        "time from the first token to the last",
        "seconds",
        MODEL,
        ("request_decode_time_seconds",),
    ),
    Spec("redis_up", "gauge", "1 if Redis answered when it was last asked; absent without --redis"),
    Spec("redis_errors_total", "counter", "calls to Redis that failed; absent without --redis"),
    Spec("redis_pending_entries", "gauge", "index entries still to be written: its lag; absent without --redis"),
)


class StepMeter:
    """What steps cost between scheduler and workers."""

    def __init__(self) -> None:
        self.round_trip = Buckets(LATENCIES_S)
        self.num_bytes = Buckets(STEP_BYTES)
        self.num_rows = 0

    def note(self, round_trip_s: float, num_bytes: int, num_rows: int) -> None:
        """One step was answered."""
        self.round_trip.observe(round_trip_s)
        self.num_bytes.observe(num_bytes)
        self.num_rows += num_rows


class SchedulerTimes:
    """What is timed while it happens: once per turn, per step, and per request; never per token of a step."""

    def __init__(self) -> None:
        self.turn = Buckets(SHORT_TIMES_S)
        self.steps = StepMeter()
        self.queue = Buckets(LATENCIES_S)
        self.prefill = Buckets(LATENCIES_S)
        self.decode = Buckets(LATENCIES_S)
        self.idle_s = 0.0
        self.refusals: Counter[str] = Counter()  # by status code
        self._turn_ended_at: float | None = None
        self._first_token_at: dict[Sample, float] = {}  # of live samples

    def note_turn(self, started_at: float, ended_at: float) -> None:
        """One turn of the step loop."""
        if self._turn_ended_at is not None:
            self.idle_s += started_at - self._turn_ended_at
        self._turn_ended_at = ended_at
        self.turn.observe(ended_at - started_at)

    def note_deltas(self, deltas: Deltas, now: float, find: Callable[[int, int], SequenceGroup | None]) -> None:
        """What one answer produced; `find(owner, handle)` gives the request of a first token."""
        if np.count_nonzero(deltas.offsets) < len(deltas.offsets):
            self._note_first_tokens(deltas, now, find)
        for finished in deltas.finished:
            self._note_end(finished, now)

    def _note_first_tokens(self, deltas: Deltas, now: float, find: Callable[[int, int], SequenceGroup | None]) -> None:
        for i in np.flatnonzero(deltas.offsets == 0).tolist():
            group = find(int(deltas.owners[i]), int(deltas.handles[i]))
            if group is not None:
                self._note_first_token(group, int(deltas.sample_indices[i]), now)

    def _note_first_token(self, group: SequenceGroup, sample_index: int, now: float) -> None:
        self._first_token_at[(group.owner, group.handle, sample_index)] = now
        admitted_at = next((seq.admitted_at for seq in group.sequences if seq.sample_index == sample_index), None)
        if admitted_at is not None:
            self.queue.observe(admitted_at - group.arrival)
            self.prefill.observe(now - admitted_at)

    def _note_end(self, finished: Finished, now: float) -> None:
        group = finished.group
        first_token_at = self._first_token_at.pop((group.owner, group.handle, finished.sample_index), None)
        if first_token_at is not None:
            self.decode.observe(now - first_token_at)


class Loop(Protocol):
    """What is read of the step loop."""

    times: SchedulerTimes

    @property
    def max_waiting(self) -> int: ...
    def stats(self) -> SchedulerStats | None: ...


class Pool(Protocol):
    """What is read of the worker pool."""

    @property
    def info(self) -> types_pb2.ModelInfo | None: ...
    def num_in_states(self) -> Counter[str]: ...


class RedisFacts(Protocol):
    """What is read of an index in Redis."""

    @property
    def is_up(self) -> bool: ...
    @property
    def num_errors(self) -> int: ...
    @property
    def num_pending(self) -> int: ...


class SchedulerReader:
    """All rows of SPECS, as they are now."""

    def __init__(self, loop: Loop, pool: Pool, num_gateways: Callable[[], int], redis: RedisFacts | None) -> None:
        self._loop = loop
        self._pool = pool
        self._num_gateways = num_gateways
        self._redis = redis

    def __call__(self) -> Iterator[Row]:
        info, stats = self._pool.info, self._loop.stats()
        model = info.model if info is not None else ""
        yield from self._state_rows(model)
        yield from self._time_rows(model)
        yield from self._redis_rows()
        yield from _stats_rows(model, stats or NO_STATS)
        if info is not None and stats is not None:
            num_blocks = sum(w.blocks_free + w.blocks_cached + w.blocks_used for w in stats.workers)
            yield "cache_config_info", (model, str(info.block_size), str(num_blocks)), 1

    def _state_rows(self, model: str) -> Iterator[Row]:
        states = self._pool.num_in_states()
        for state in WORKER_STATES:
            yield "workers", (model, state), states[state]
        yield "gateways", (model,), self._num_gateways()
        yield "max_requests_waiting", (model,), self._loop.max_waiting
        for code, count in self._loop.times.refusals.items():
            yield "requests_refused_total", (model, code), count

    def _time_rows(self, model: str) -> Iterator[Row]:
        times = self._loop.times
        yield "scheduler_turn_seconds", (), times.turn
        yield "scheduler_idle_seconds_total", (), times.idle_s
        yield "step_round_trip_seconds", (model,), times.steps.round_trip
        yield "scheduler_step_bytes", (model,), times.steps.num_bytes
        yield "scheduler_step_rows_total", (model,), times.steps.num_rows
        yield "request_queue_time_seconds", (model,), times.queue
        yield "request_prefill_time_seconds", (model,), times.prefill
        yield "request_decode_time_seconds", (model,), times.decode

    def _redis_rows(self) -> Iterator[Row]:
        if self._redis is not None:
            yield "redis_up", (), float(self._redis.is_up)
            yield "redis_errors_total", (), self._redis.num_errors
            yield "redis_pending_entries", (), self._redis.num_pending


NO_STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, [])


def _stats_rows(model: str, stats: SchedulerStats) -> Iterator[Row]:
    yield "num_requests_waiting", (model,), stats.num_waiting
    yield "num_requests_running", (model,), stats.num_running
    yield "pending_tokens", (model,), stats.pending_tokens
    yield "prefix_cache_queries_total", (model,), stats.prefix_query_tokens
    yield "prefix_cache_hits_total", (model,), stats.prefix_hit_tokens
    yield "num_preemptions_total", (model,), stats.preemptions - sum(stats.migrations.values())
    yield "steps_total", (model,), stats.steps
    for reason in MigrationReason:
        yield "migrations_total", (model, reason.value), stats.migrations.get(reason, 0)
    num_used = num_blocks = 0
    for worker in stats.workers:
        labels = (model, worker.worker_id)
        yield "rows_used", labels, worker.rows_used
        yield "rows_limit", labels, worker.rows_total
        yield "kv_blocks", (*labels, "free"), worker.blocks_free
        yield "kv_blocks", (*labels, "cached"), worker.blocks_cached
        yield "kv_blocks", (*labels, "used"), worker.blocks_used
        num_used += worker.blocks_used
        num_blocks += worker.blocks_free + worker.blocks_cached + worker.blocks_used
    yield "kv_cache_usage_perc", (model,), num_used / max(1, num_blocks)
