"""Prefill and decode workers: where prompts go, and when streams leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.messages import MigrationReason, WorkerCapacity
from scheduler_svc.core.policy import placement_scores
from scheduler_svc.core.scheduler import Scheduler
from step_protocol.types import BlockMovement, WorkerRole
from tests.builders import answer, make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler

PROMPT = list(range(1, 41))  # ten blocks


def worker(name: str, role: WorkerRole, **sizes: int) -> WorkerCapacity:
    movement = BlockMovement(b"layout", 100, has_tier=False, can_transfer=True, role=role)
    return replace(make_capacity(name, **({"num_blocks": 400} | sizes)), movement=movement)


def pair(**sizes: int) -> Scheduler:
    return make_scheduler(worker("p", WorkerRole.PREFILL, **sizes), worker("d", WorkerRole.DECODE, **sizes))


def run_step(scheduler: Scheduler) -> float:
    now = scheduler._now + 0.01
    for batch in scheduler.schedule(now):
        answer(scheduler, batch, now)
    return now


def run(scheduler: Scheduler, steps: int, *, moves: bool = True) -> None:
    """Run steps of 10 ms, and moves, which end at once."""
    for _ in range(steps):
        now = run_step(scheduler)
        for move in scheduler.moves.take_moves():
            scheduler.end_move(move.move_id, len(move.digests) if moves else 0, 0.01, now)
        check_scheduler(scheduler)


def stream(scheduler: Scheduler, prompt: list[int], name: str) -> None:
    scheduler.add_group(make_group(prompt, name, max_tokens=100), 0.0)


def running(scheduler: Scheduler) -> dict[str, list[str]]:
    workers = scheduler._workers.items()
    return {name: [seq.group.request_id for seq in worker.running()] for name, worker in workers}


def test_a_token_on_a_decode_worker_counts_once_more_for_each_stream() -> None:
    scores = placement_scores(np.array([0, 5]), np.array([10, 10]), 2.0, np.array([0, 6]))
    assert scores.tolist() == [20, 85]


def test_a_stream_leaves_the_prefill_worker_with_its_blocks() -> None:
    scheduler = pair()
    stream(scheduler, PROMPT, "busy")
    run(scheduler, 8)
    assert running(scheduler) == {"p": [], "d": ["busy"]}, "an idle decode worker computes prompts too, or gets them"
    stream(scheduler, [7, *PROMPT], "long")
    run(scheduler, 1)
    assert running(scheduler) == {"p": ["long"], "d": ["busy"]}, "its prompt would delay the stream"
    run(scheduler, 6)
    assert running(scheduler) == {"p": [], "d": ["busy", "long"]}
    assert scheduler.stats().counts.migrations[MigrationReason.HANDOVER] >= 1
    assert scheduler.stats().counts.transferred_tokens == 2 * len(PROMPT)


def test_a_row_that_leaves_makes_room_in_the_same_turn() -> None:
    """Between two answers of its worker nothing else says that its row is free."""
    roles = WorkerRole.PREFILL, WorkerRole.DECODE
    scheduler = make_scheduler(worker("p", roles[0], max_num_seqs=1), worker("d", roles[1], max_num_seqs=2))
    stream(scheduler, PROMPT, "busy")
    run(scheduler, 8)
    stream(scheduler, [7, *PROMPT], "a")
    while not (moves := scheduler.moves.take_moves()):
        run_step(scheduler)
    scheduler.end_move(moves[0].move_id, len(moves[0].digests), 0.01, scheduler._now)
    stream(scheduler, [8, *PROMPT], "b")
    scheduler.schedule(scheduler._now)
    assert running(scheduler) == {"p": ["b"], "d": ["busy", "a"]}


@pytest.mark.parametrize("gone", ["p", "d"])
def test_the_other_worker_does_everything_if_one_is_lost(gone: str) -> None:
    scheduler = pair()
    stream(scheduler, PROMPT, "a")
    run(scheduler, 6)
    scheduler.remove_worker(gone)
    stream(scheduler, [5, *PROMPT], "b")
    run(scheduler, 6)
    (left,) = running(scheduler).values()
    assert sorted(left) == ["a", "b"]
