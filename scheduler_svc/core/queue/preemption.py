"""Preempts the least urgent rows when the pool has too few blocks, or when a more urgent sequence needs room."""

from __future__ import annotations

from scheduler_svc.core.queue.requests import Requests
from scheduler_svc.core.sequence import QueueEntry, Sequence
from scheduler_svc.core.steps.worker_state import WorkerState, num_forks_needed


def preempt_for(
    worker: WorkerState, entry: QueueEntry, requests: Requests, watermark: float, mean_output: float
) -> None:
    """Preempt less urgent rows to make room for an urgent sequence. Do not preempt if it still would not fit."""
    urgent = entry.seq
    if _has_space(urgent, worker) or not _has_less_urgent(urgent, worker):
        return
    refusal = worker.check_preempting(urgent, watermark, mean_output)
    if refusal is not None:
        entry.refusals[worker.capacity.worker_id] = refusal
        return
    while not _has_space(urgent, worker) and _has_less_urgent(urgent, worker):
        preempt_one(worker, requests)


def _has_space(seq: Sequence, worker: WorkerState) -> bool:
    _, num_blocks = worker.rows.opening_blocks(seq.data.num_tokens, 0)
    return worker.has_space(1 + num_forks_needed(seq), num_blocks)


def _has_less_urgent(seq: Sequence, worker: WorkerState) -> bool:
    priorities = worker.rows.priority[worker.rows.active()]
    return bool((priorities > seq.group.priority).any())


def preempt_one(worker: WorkerState, requests: Requests) -> None:
    """Preempt the least urgent row, or the gang that it belongs to."""
    victim = max(worker.rows.active().tolist(), key=lambda row: worker.rows.sequence(row).order)
    seq = worker.preempt(victim)
    requests.requeue(seq)
    entry = requests.waiting.entry(seq)
    if worker.in_flight and entry:  # without a refusal it could reuse its blocks as cached blocks before they are free
        entry.refusals[worker.capacity.worker_id] = worker.refuse()
