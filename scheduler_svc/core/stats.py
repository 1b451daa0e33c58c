"""Load and statistics of the core. Reading them changes nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from scheduler_svc.core.counts import Counts
from scheduler_svc.core.queue.requests import Requests
from scheduler_svc.core.steps.worker_books import WorkerBooks


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
    adapters_resident: int = 0
    adapter_swaps: int = 0

    @property
    def blocks_total(self) -> int:
        return self.blocks_free + self.blocks_cached + self.blocks_used


@dataclass(frozen=True, slots=True)
class SchedulerStats(Load):
    """The values that status and metrics show. A new gauge is a field here and a line in scheduler_svc/metrics.py."""

    workers: list[WorkerStats] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    num_unschedulable: int = 0  # sequences in the queue that no present worker could run

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of all workers' blocks that sequences use, 0 to 1."""
        used = sum(worker.blocks_used for worker in self.workers)
        return used / max(1, sum(worker.blocks_total for worker in self.workers))


def load_of(requests: Requests, workers: Collection[WorkerBooks]) -> Load:
    """The load of a scheduler with these requests and workers."""
    return Load(
        num_waiting=len(requests.waiting),
        num_running=sum(worker.rows.num_used for worker in workers),
        pending_tokens=requests.waiting.pending_tokens + sum(worker.pending_prefill for worker in workers),
    )


def worker_stats(worker: WorkerBooks) -> WorkerStats:
    """The occupancy of this worker."""
    return WorkerStats(
        worker_id=worker.capacity.worker_id,
        rows_used=worker.rows.num_used,
        rows_total=worker.capacity.max_num_seqs,
        blocks_free=worker.pool.num_empty,
        blocks_cached=worker.pool.num_cached,
        blocks_used=worker.pool.num_used,
        steps_in_flight=len(worker.in_flight),
        adapters_resident=worker.adapters.num_resident,
        adapter_swaps=worker.adapters.num_swaps,
    )


def scheduler_stats(requests: Requests, workers: Collection[WorkerBooks], counts: Counts) -> SchedulerStats:
    """A snapshot of all statistics."""
    load = load_of(requests, workers)
    return SchedulerStats(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        pending_tokens=load.pending_tokens,
        workers=[worker_stats(worker) for worker in workers],
        counts=replace(counts, migrations=counts.migrations.copy()),
        num_unschedulable=len(requests.waiting.unschedulable if workers else requests.waiting),
    )
