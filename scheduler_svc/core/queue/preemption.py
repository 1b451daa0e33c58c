"""Preempts the least urgent rows when the pool has too few blocks, or when a more urgent sequence needs room."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.queue.requests import Requests
from scheduler_svc.core.sequence import QueueEntry, Sequence
from scheduler_svc.core.steps.step_plan import StepPlan
from scheduler_svc.core.steps.step_planner import StepPlanner
from scheduler_svc.core.steps.worker_state import WorkerState, num_forks_needed


def plan_running(planner: StepPlanner, plan: StepPlan, requests: Requests) -> bool:
    """Plan the running rows. Returns True if some were preempted.

    Each decoding row gets the block to which it writes next. The least urgent rows are preempted until there are enough
    blocks. While steps in flight still use a preempted row's blocks, rows without a block skip the step.
    """
    worker = planner.worker
    if not worker.rows.num_used:
        return False
    num_for_run = planner.update_run()
    num_free = worker.pool.num_free
    if num_for_run <= num_free and not worker.rows.outside:
        planner.plan_run(plan)
        return False
    has_preempted = False
    while True:
        decode, prefill = planner.split_by_stage()
        needy = planner.rows_that_need_a_block(decode) if len(decode) else decode
        num_needed = planner.num_blocks_for(needy) + planner.num_without_block(prefill)
        if worker.beams_to_open:
            num_needed += planner.num_blocks_to_open()
        if num_for_run and num_needed + num_for_run > num_free:
            num_for_run = planner.leave_run()
            continue
        if num_needed <= worker.pool.num_free + worker.num_pending_free:
            break
        if worker.free_unneeded(worker.rows.active()):
            continue
        has_preempted = True
        _preempt_one(worker, requests)
        planner.shrink_run()
    planner.plan_run(plan)
    num_free = worker.pool.num_free
    if num_needed > num_free:
        by_urgency = sorted(needy.tolist(), key=lambda row: worker.rows.sequence(row).order)
        needy = np.array(by_urgency[:num_free], dtype=np.int64)
        decode = decode[~np.isin(decode, by_urgency[num_free:])]
    if len(needy):
        planner.give_blocks(needy, plan)
    planner.plan_running(plan, decode, prefill)
    if worker.beams_to_open:
        planner.open_beams(plan)
    return has_preempted


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
        _preempt_one(worker, requests)


def _has_space(seq: Sequence, worker: WorkerState) -> bool:
    _, num_blocks = worker.rows.opening_blocks(seq.data.num_tokens, 0)
    return worker.has_space(1 + num_forks_needed(seq), num_blocks)


def _has_less_urgent(seq: Sequence, worker: WorkerState) -> bool:
    priorities = worker.rows.priority[worker.rows.active()]
    return bool((priorities > seq.group.priority).any())


def _preempt_one(worker: WorkerState, requests: Requests) -> None:
    victim = max(worker.rows.active().tolist(), key=lambda row: worker.rows.sequence(row).order)
    seq = worker.preempt(victim)
    requests.requeue(seq)
    entry = requests.waiting.entry(seq)
    if worker.in_flight and entry:  # without a refusal it could reuse its blocks as cached blocks before they are free
        entry.refusals[worker.capacity.worker_id] = worker.refuse()
