"""Load and statistics of the core, for operators. Reading them changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice

import numpy as np

from request_fields.fields import LAST_PRIORITY
from scheduler_svc.core.admission.requests import Requests
from scheduler_svc.core.messages import Counts
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps.costs import Costs
from scheduler_svc.core.worker_state import WorkerState


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
    rows_background: int  # used rows with background work
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
    num_queued: int = 0  # sequences in the queue, without background work
    num_background: int = 0  # sequences of background work (the lowest priority) that wait or run

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
        rows_background=int(np.count_nonzero(worker.rows.priority[worker.rows.active()] == LAST_PRIORITY)),
        blocks_free=worker.pool.num_empty,
        blocks_cached=worker.pool.num_cached,
        blocks_used=worker.pool.num_used,
        steps_in_flight=len(worker.in_flight),
    )


def scheduler_stats(requests: Requests, workers: Collection[WorkerState], counts: Counts) -> SchedulerStats:
    """A snapshot of all statistics."""
    load, rows = load_of(requests, workers), [worker_stats(worker) for worker in workers]
    num_background = sum(seq.group.priority == LAST_PRIORITY for seq in requests.waiting.sequences())
    return SchedulerStats(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        pending_tokens=load.pending_tokens,
        workers=rows,
        counts=replace(counts, migrations=counts.migrations.copy()),
        num_unschedulable=len(requests.waiting.unschedulable if workers else requests.waiting),
        waiting_tokens=requests.waiting.expected_tokens,
        costs=requests.costs,
        num_queued=load.num_waiting - num_background,
        num_background=num_background + sum(worker.rows_background for worker in rows),
    )


MAX_WAITING = 64
MAX_SLOWEST = 10


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """A sequence that has not ended."""

    sequence: Sequence
    age_s: float
    num_output_tokens: int


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
