"""Closed rows and committed blocks of an idle worker wait for the next step, but not for long."""

import math

from scheduler_svc.core.scheduler import Scheduler
from step_protocol.messages import StepBatch
from tests.builders import answer, make_group, make_scheduler
from tests.invariants import check_scheduler

WAIT_S = 0.5


def serve_one(scheduler: Scheduler, now: float) -> None:
    """Serve a request with one output token, whose prompt fills a block, to its end."""
    scheduler.add_group(make_group(6, f"at {now}", max_tokens=1), now)
    [batch] = scheduler.schedule(now)
    answer(scheduler, batch, now)
    assert not scheduler.has_work


def has_changes(batch: StepBatch) -> bool:
    return len(batch.close_rows) == len(batch.commit_blocks) == 1


def test_the_next_step_carries_the_changes() -> None:
    scheduler = make_scheduler(changes_wait_s=WAIT_S)
    serve_one(scheduler, 1.0)
    assert not scheduler.schedule(1.0)
    assert scheduler.changes_due_at == 1.0 + WAIT_S
    scheduler.add_group(make_group([7] * 5), 1.4)
    [batch] = scheduler.schedule(1.4)
    assert has_changes(batch)
    assert len(batch.rows) == 1
    assert scheduler.changes_due_at == math.inf
    check_scheduler(scheduler)


def test_a_step_without_rows_carries_changes_that_are_due() -> None:
    scheduler = make_scheduler(changes_wait_s=WAIT_S)
    serve_one(scheduler, 1.0)
    assert not scheduler.schedule(1.0)
    assert not scheduler.schedule(1.4)
    [batch] = scheduler.schedule(1.5)
    assert has_changes(batch)
    assert not len(batch.rows)
    answer(scheduler, batch, 1.6)
    assert not scheduler.schedule(9.0)
    assert scheduler.changes_due_at == math.inf


def test_changes_of_a_draining_worker_do_not_wait() -> None:
    scheduler = make_scheduler(changes_wait_s=WAIT_S)
    serve_one(scheduler, 1.0)
    assert not scheduler.schedule(1.0)
    scheduler.drain_worker("w0")
    [batch] = scheduler.schedule(1.1)
    assert has_changes(batch)
    assert scheduler.changes_due_at == math.inf
