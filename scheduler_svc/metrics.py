"""The scheduler's metrics. Counters of the core are read at a scrape. Only requests, steps and turns are timed live.

To add a metric: for a counter of the core, add a field to `core.measurements.Counts`. For a gauge of the core, add a
field to `core.stats.SchedulerStats` and a line to GAUGES. For anything else, add a Spec and a row of `SchedulerReader`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from quire.v1 import types_pb2

from request_fields.fields import LAST_PRIORITY
from scheduler_svc.core.messages import Counts, Deltas, Finished, MigrationReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.stats import SchedulerStats
from scheduler_svc.core.steps.costs import Costs
from svc_common.observe.metrics import LATENCIES_S, SHORT_TIMES_S, Buckets, Row, Spec

MODEL = ("model_name",)
WORKER = ("model_name", "worker_id")
TENANT = ("model_name", "tenant")
WORKER_STATES = {
    types_pb2.WORKER_STATE_LOADING: "loading",
    types_pb2.WORKER_STATE_JOINING: "joining",
    types_pb2.WORKER_STATE_READY: "ready",
    types_pb2.WORKER_STATE_DRAINING: "draining",
    types_pb2.WORKER_STATE_LOST: "lost",
}

Sample = tuple[int, int, int]  # owner, handle, sample index
STEP_BYTES = tuple(64 * 4**power for power in range(10))  # bucket bounds from 64 bytes to 16 MiB


# One value per model, by field of SchedulerStats.
GAUGES = {
    "num_queued": Spec(
        "num_requests_waiting", "gauge", "sequences in the queue, without background work", "", MODEL,
        ("num_requests_waiting",),
    ),
    "num_background": Spec(
        "num_requests_background", "gauge",
        "sequences of background work (the lowest priority: batches, shadows) that wait or run; the times of requests, "
        "the queue and the rows in use do not count them", labels=MODEL,
    ),
    "num_unschedulable": Spec(
        "num_requests_unschedulable", "gauge",
        "sequences in the queue that no present worker can run; they fail after --worker-patience-s", labels=MODEL,
    ),
    "num_running": Spec(
        "num_requests_running", "gauge", "sequences that hold a row", "", MODEL, ("num_requests_running",)
    ),
    "pending_tokens": Spec(
        "pending_tokens", "gauge", "prompt tokens to compute, in the queue and on all workers", "tokens", MODEL
    ),
    "waiting_tokens": Spec(
        "waiting_tokens", "gauge",
        "tokens of the queue, to compute and expected to be generated; --max-waiting-tokens limits them", "tokens",
        MODEL,
    ),
    "kv_cache_usage": Spec(
        "kv_cache_usage_perc", "gauge", "fraction of all workers' blocks that are used by sequences, 0 to 1", "", MODEL,
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
}  # fmt: skip

VLLM_COUNTS = {"prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"}  # equal names in vLLM
COUNTS = {
    count.name: Spec(
        name := f"{count.name}_total",
        "counter",
        count.metadata["meaning"],
        count.metadata["unit"],
        MODEL,
        (name,) if name in VLLM_COUNTS else (),
    )
    for count in dataclasses.fields(Counts)
    if count.metadata
}


def _time(name: str, meaning: str, *vllm: str) -> Spec:
    return Spec(name, "histogram", meaning, "seconds", MODEL, vllm)


SPECS = (
    *GAUGES.values(),
    *COUNTS.values(),
    Spec("max_requests_waiting", "gauge", "limit of sequences in the queue (--max-waiting)", "", MODEL),
    Spec("requests_refused_total", "counter", "refused requests, by status code", "", ("model_name", "code")),
    Spec("rows_used", "gauge", "rows of a worker that hold a sequence, without background work", "", WORKER),
    Spec("rows_limit", "gauge", "rows of a worker (--max-num-seqs)", "", WORKER),
    Spec(
        "kv_blocks", "gauge",
        "blocks of a worker's pool: used by sequences, cached (with a prefix that no sequence uses), or free (empty)",
        "", (*WORKER, "state"),
    ),
    Spec(
        "cache_config_info", "gauge",
        "always 1; the labels describe the KV pools, num_gpu_blocks is the total of all workers", "",
        (*MODEL, "block_size", "num_gpu_blocks"), ("cache_config_info",),
    ),
    Spec(
        "migrations_total", "counter", "sequences moved off a worker that was draining or lost, or whose row failed",
        "", ("model_name", "reason"),
    ),
    Spec(
        "workers", "gauge",
        "known workers by state; joining: loaded but not leased yet; a lost worker is listed for five minutes", "",
        ("model_name", "state"),
    ),
    Spec("gateways", "gauge", "attached gateways", "", MODEL),
    Spec("weight_version", "gauge", "version of the weights in use; 0: those of the checkpoint", "", MODEL),
    Spec("weight_updates_total", "counter", "updates of the weights", "", ("model_name", "outcome")),
    Spec("step_processor_seconds_total", "counter", "time that workers took for the answered steps", "seconds", MODEL),
    Spec(
        "unattributed_processor_seconds_total", "counter",
        "the part of it that no request pays for: steps whose rows had all ended", "seconds", MODEL,
    ),
    Spec(
        "tenant_processor_seconds_total", "counter",
        "the share of ended samples, by tenant; `other` after the first 1000 tenants, empty: requests without one",
        "seconds", TENANT,
    ),
    Spec("tenant_block_seconds_total", "counter", "KV blocks x seconds of ended samples, by tenant", "", TENANT),
    _time("step_round_trip_seconds", "time from sending a step to its answer"),
    Spec("scheduler_step_bytes", "histogram", "size of one step and its answer on the wire", "bytes", MODEL),
    Spec("scheduler_step_rows_total", "counter", "rows computed by answered steps", "", MODEL),
    Spec("scheduler_turn_seconds", "histogram", "time of one turn of the step loop", "seconds"),
    Spec(
        "block_move_lost_seconds", "histogram",
        "time by which a move took longer than computing its tokens would have; 0 for the others", "seconds",
    ),
    Spec("scheduler_idle_seconds_total", "counter", "time between turns of the step loop", "seconds"),
    Spec("scheduler_output_tokens_total", "counter", "output tokens that workers returned", "tokens", MODEL),
    Spec("scheduler_sequences_ended_total", "counter", "sequences that ended, for any reason", "", MODEL),
    _time("scheduler_first_token_seconds", "time from a request's arrival at the scheduler to its first token"),
    _time(
        "request_queue_time_seconds", "time from arrival to admission; only sequences that got a first token",
        "request_queue_time_seconds",
    ),
    _time("request_prefill_time_seconds", "time from admission to the first token", "request_prefill_time_seconds"),
    _time("request_decode_time_seconds", "time from the first token to the last token", "request_decode_time_seconds"),
    Spec("redis_up", "gauge", "1 if Redis answered the last call, else 0; absent without --redis"),
    Spec("redis_errors_total", "counter", "failed calls to Redis; absent without --redis"),
    Spec("redis_pending_entries", "gauge", "index entries not yet written to Redis; absent without --redis"),
)  # fmt: skip


class RoundTripMeter:
    """Round trips, bytes and rows of steps between scheduler and workers."""

    def __init__(self) -> None:
        self.round_trip = Buckets(LATENCIES_S)
        self.num_bytes = Buckets(STEP_BYTES)
        self.num_rows = 0

    def note(self, round_trip_s: float, num_bytes: int, num_rows: int) -> None:
        """Record one answered step."""
        self.round_trip.observe(round_trip_s)
        self.num_bytes.observe(num_bytes)
        self.num_rows += num_rows


class SchedulerTimes:
    """Times that are measured live: of each turn, each step and each request, but not of each token."""

    def __init__(self) -> None:
        self.turn = Buckets(SHORT_TIMES_S)
        self.move_lost = Buckets(SHORT_TIMES_S)
        self.steps = RoundTripMeter()
        self.queue = Buckets(LATENCIES_S)
        self.prefill = Buckets(LATENCIES_S)
        self.decode = Buckets(LATENCIES_S)
        self.first_token = Buckets(LATENCIES_S)
        self.output_tokens = 0
        self.num_finished = 0
        self.idle_s = 0.0
        self.refusals: Counter[str] = Counter()  # by status code
        self._turn_ended_at: float | None = None
        self._first_token_at: dict[Sample, float] = {}  # live samples only

    def record_turn(self, started_at: float, ended_at: float) -> None:
        """Record one turn of the step loop."""
        if self._turn_ended_at is not None:
            self.idle_s += started_at - self._turn_ended_at
        self._turn_ended_at = ended_at
        self.turn.observe(ended_at - started_at)

    def record_deltas(self, deltas: Deltas, now: float, find: Callable[[int, int], SequenceGroup | None]) -> None:
        """Record the first tokens and finishes of one update. `find(owner, handle)` returns the request."""
        self.output_tokens += len(deltas.token_ids)
        self.num_finished += len(deltas.finished)
        if np.count_nonzero(deltas.offsets) < len(deltas.offsets):
            self._record_first_tokens(deltas, now, find)
        for finished in deltas.finished:
            self._record_end(finished, now)

    def first_token_at(self, owner: int, handle: int, sample_index: int) -> float | None:
        """When the first token of a live sample arrived; None before."""
        return self._first_token_at.get((owner, handle, sample_index))

    def _record_first_tokens(
        self, deltas: Deltas, now: float, find: Callable[[int, int], SequenceGroup | None]
    ) -> None:
        for i in np.flatnonzero(deltas.offsets == 0).tolist():
            group = find(int(deltas.owners[i]), int(deltas.handles[i]))
            if group is not None:
                self._record_first_token(group, int(deltas.sample_indices[i]), now)

    def _record_first_token(self, group: SequenceGroup, sample_index: int, now: float) -> None:
        self._first_token_at[(group.owner, group.handle, sample_index)] = now
        if group.priority == LAST_PRIORITY:
            return
        self.first_token.observe(now - group.arrival)
        for seq in group.sequences:
            if seq.sample_index == sample_index and seq.admitted_at is not None:
                self.queue.observe(seq.admitted_at - group.arrival)
                self.prefill.observe(now - seq.admitted_at)

    def _record_end(self, finished: Finished, now: float) -> None:
        group = finished.group
        first_token_at = self._first_token_at.pop((group.owner, group.handle, finished.sample_index), None)
        if first_token_at is not None and group.priority < LAST_PRIORITY:
            self.decode.observe(now - first_token_at)


class Loop(Protocol):
    """The attributes of the step loop that the metrics read."""

    core: Scheduler
    times: SchedulerTimes


class Pool(Protocol):
    """The attributes of the worker pool that are read."""

    @property
    def info(self) -> types_pb2.ModelInfo | None: ...
    def num_in_states(self) -> Counter[types_pb2.WorkerState.ValueType]: ...
    @property
    def weights(self) -> WeightFacts: ...


class WeightFacts(Protocol):
    """The attributes of the weights that are read."""

    num_updates: int
    num_failed: int

    @property
    def version(self) -> int: ...


class RedisFacts(Protocol):
    """The attributes of a Redis index that are read."""

    @property
    def is_up(self) -> bool: ...
    @property
    def num_errors(self) -> int: ...
    @property
    def num_pending(self) -> int: ...


class SchedulerReader:
    """Yields the current rows of all SPECS."""

    def __init__(self, loop: Loop, pool: Pool, num_gateways: Callable[[], int], redis: RedisFacts | None) -> None:
        self._loop = loop
        self._pool = pool
        self._num_gateways = num_gateways
        self._redis = redis

    def __call__(self) -> Iterator[Row]:
        info, stats = self._pool.info, self._loop.core.stats()
        model = info.model if info is not None else ""
        yield from _core_rows(model, stats)
        yield from self._shell_rows(model)
        yield from self._time_rows(model)
        yield from self._redis_rows()
        if info is not None:
            num_blocks = sum(worker.blocks_total for worker in stats.workers)
            yield "cache_config_info", (model, str(info.block_size), str(num_blocks)), 1

    def _shell_rows(self, model: str) -> Iterator[Row]:
        states = self._pool.num_in_states()
        for state, text in WORKER_STATES.items():
            yield "workers", (model, text), states[state]
        yield "gateways", (model,), self._num_gateways()
        weights = self._pool.weights
        yield "weight_version", (model,), weights.version
        yield "weight_updates_total", (model, "committed"), weights.num_updates
        yield "weight_updates_total", (model, "failed"), weights.num_failed
        yield "max_requests_waiting", (model,), self._loop.core.config.max_waiting
        for code, count in self._loop.times.refusals.items():
            yield "requests_refused_total", (model, code), count

    def _time_rows(self, model: str) -> Iterator[Row]:
        times = self._loop.times
        yield "scheduler_turn_seconds", (), times.turn
        yield "block_move_lost_seconds", (), times.move_lost
        yield "scheduler_idle_seconds_total", (), times.idle_s
        yield "step_round_trip_seconds", (model,), times.steps.round_trip
        yield "scheduler_step_bytes", (model,), times.steps.num_bytes
        yield "scheduler_step_rows_total", (model,), times.steps.num_rows
        yield "scheduler_output_tokens_total", (model,), times.output_tokens
        yield "scheduler_sequences_ended_total", (model,), times.num_finished
        yield "scheduler_first_token_seconds", (model,), times.first_token
        yield "request_queue_time_seconds", (model,), times.queue
        yield "request_prefill_time_seconds", (model,), times.prefill
        yield "request_decode_time_seconds", (model,), times.decode

    def _redis_rows(self) -> Iterator[Row]:
        if self._redis is not None:
            yield "redis_up", (), float(self._redis.is_up)
            yield "redis_errors_total", (), self._redis.num_errors
            yield "redis_pending_entries", (), self._redis.num_pending


def _cost_rows(model: str, costs: Costs) -> Iterator[Row]:
    yield "step_processor_seconds_total", (model,), costs.processor_us / 1e6
    yield "unattributed_processor_seconds_total", (model,), costs.unattributed_us / 1e6
    for tenant, cost in costs.tenants.items():
        yield "tenant_processor_seconds_total", (model, tenant), cost.processor_us / 1e6
        yield "tenant_block_seconds_total", (model, tenant), cost.block_s


def _core_rows(model: str, stats: SchedulerStats) -> Iterator[Row]:
    yield from _cost_rows(model, stats.costs)
    for field, gauge in GAUGES.items():
        yield gauge.name, (model,), getattr(stats, field)
    for field, count in COUNTS.items():
        yield count.name, (model,), getattr(stats.counts, field)
    for reason in MigrationReason:
        yield "migrations_total", (model, reason.value), stats.counts.migrations[reason]
    for worker in stats.workers:
        labels = (model, worker.worker_id)
        yield "rows_used", labels, worker.rows_used - worker.rows_background
        yield "rows_limit", labels, worker.rows_total
        yield "kv_blocks", (*labels, "free"), worker.blocks_free
        yield "kv_blocks", (*labels, "cached"), worker.blocks_cached
        yield "kv_blocks", (*labels, "used"), worker.blocks_used
