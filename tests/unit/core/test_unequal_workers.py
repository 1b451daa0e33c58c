"""Workers of different sizes: a request that fits only some of them waits for these; others are not delayed."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.errors import NoWorkerError, QueueFullError
from scheduler_svc.core.messages import Finished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler
from tests.unit.core.test_scheduler import answer

BIG = make_capacity("big", num_blocks=640, max_num_seqs=32, max_num_batched_tokens=1024)
SMALL = make_capacity("small", num_blocks=8)


def add(scheduler: Scheduler, name: str, first: int, count: int, max_tokens: int, now: float, **fields: Any) -> None:
    prompt = range(first, first + count)
    scheduler.add_group(make_group(prompt, name, max_tokens=max_tokens, ignore_eos=True, **fields), now)


def run(scheduler: Scheduler, now: float) -> dict[str, Finished]:
    """Run until no worker has anything to do."""
    ended = []
    while batches := scheduler.schedule(now):
        ended += scheduler.take_expired().finished
        for batch in batches:
            ended += scheduler.update(answer(batch), now).finished
        check_scheduler(scheduler)
    return {end.group.request_id: end for end in ended + scheduler.take_expired().finished}


def lose_the_big_one(num_streams: int) -> Scheduler:
    """Start `num_streams` streams on the only worker that can run them. Then remove it and keep a small worker."""
    scheduler = make_scheduler(BIG)
    for i in range(num_streams):
        add(scheduler, f"long{i}", 100 * i, 40, 20, 0.0, tenant_id="a")
    for batch in scheduler.schedule(0.0):
        scheduler.update(answer(batch), 0.0)
    scheduler.add_worker(SMALL)
    scheduler.remove_worker("big")
    return scheduler


def test_an_unschedulable_request_ends_when_no_worker_joins_in_time() -> None:
    scheduler = lose_the_big_one(2)
    assert not run(scheduler, 1.0)
    assert scheduler.patience_ends_at == 61.0
    assert not run(scheduler, 60.9)
    ended = run(scheduler, 61.0)
    assert {name: end.reason for name, end in ended.items()} == dict.fromkeys(("long0", "long1"), FinishReason.ERROR)
    assert "40 prompt tokens, max_tokens 20; the largest pool has 32 tokens" in ended["long0"].message
    assert scheduler.patience_ends_at == float("inf")
    assert not scheduler.has_work


def test_a_worker_that_comes_and_goes_gives_all_patience_back() -> None:
    scheduler = lose_the_big_one(1)
    run(scheduler, 1.0)
    scheduler.add_worker(BIG)
    scheduler.drain_worker("big")
    run(scheduler, 50.0)
    assert scheduler.patience_ends_at == 110.0


def test_without_any_worker_requests_end_together_and_later_ones_are_refused() -> None:
    scheduler = lose_the_big_one(1)
    run(scheduler, 1.0)
    scheduler.remove_worker("small")
    run(scheduler, 5.0)
    add(scheduler, "late", 7000, 4, 4, 64.0)
    assert scheduler.stats().num_unschedulable == 2
    assert not run(scheduler, 64.9)
    assert scheduler.patience_ends_at == 65.0
    ended = run(scheduler, 65.0)
    assert {name: end.reason for name, end in ended.items()} == dict.fromkeys(("long0", "late"), FinishReason.ERROR)
    assert "none joined within 60 s" in ended["late"].message
    with pytest.raises(NoWorkerError):
        add(scheduler, "later", 7000, 4, 4, 65.0)
    assert not scheduler.has_work
    scheduler.add_worker(SMALL)
    add(scheduler, "again", 7000, 4, 4, 70.0)
    assert run(scheduler, 70.0)["again"].reason is FinishReason.LENGTH


def test_a_starved_request_reserves_no_worker_that_it_cannot_use() -> None:
    """It failed on one, and waits for the other, which is full."""
    scheduler = make_scheduler(*(make_capacity(name, num_blocks=128, max_num_seqs=2) for name in ("w0", "w1")))
    for i in range(4):
        add(scheduler, f"long{i}", 100 * i, 30, 100, 0.0)
    for batch in scheduler.schedule(0.0):
        scheduler.update(answer(batch, failures=(0,) if batch.worker_id == "w0" else ()), 0.0)
    batches = scheduler.schedule(0.0)
    assert [entry.seq.failed_on for entry in scheduler._waiting] == ["w0"]
    add(scheduler, "for either", 7000, 4, 4, 3.0)
    add(scheduler, "too", 7100, 4, 4, 3.0)
    for batch in batches:
        scheduler.update(answer(batch), 3.0)
    opened = [(b.worker_id, o.group.request_id) for b in scheduler.schedule(3.0) for o in b.opens]
    assert opened == [("w0", "for either")]
    check_scheduler(scheduler)


def test_a_request_starved_for_the_big_worker_leaves_the_small_one_to_others() -> None:
    scheduler = make_scheduler(BIG, SMALL, watermark=0.0)
    add(scheduler, "runs", 0, 100, 100, 0.0)
    for i in range(12):
        add(scheduler, f"run{i}", 1000 * (i + 1), 100, 100, 0.0)
    batches = scheduler.schedule(0.0)
    for now in (0.0, 3.0):
        for batch in batches:
            scheduler.update(answer(batch), now)
        batches = scheduler.schedule(now)
    assert len(scheduler._waiting)
    for i in range(4):
        add(scheduler, f"short{i}", 20_000 + 100 * i, 10, 10, 3.0)
    for batch in batches:
        scheduler.update(answer(batch), 3.0)
    opened = {(b.worker_id, o.group.request_id) for b in scheduler.schedule(3.0) for o in b.opens}
    assert {name for name, _ in opened} == {"small"}


def test_an_unschedulable_request_costs_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = lose_the_big_one(30)
    add(scheduler, "short", 7000, 4, 20, 0.3)
    batches = scheduler.schedule(1.0)
    monkeypatch.setattr(Placement, "place", lambda *_: pytest.fail("no schedulable sequence is left to place"))
    monkeypatch.setattr(Placement, "could_run", lambda *_: pytest.fail("nothing has changed"))
    for _ in range(10):
        for batch in batches:
            scheduler.update(answer(batch), 1.0)
        batches = scheduler.schedule(1.0)


@pytest.mark.parametrize("limits", [{"max_waiting": 5}, {"max_waiting_tokens": 5 * 60}])
def test_requests_that_no_open_worker_could_run_are_bounded(limits: dict[str, int]) -> None:
    """They wait outside the order, so the limits of the queue must hold for them too."""
    scheduler = make_scheduler(BIG, SMALL, expected_output_tokens=20, **limits)
    scheduler.drain_worker("big")
    for i in range(5):
        add(scheduler, f"long{i}", 100 * i, 40, 20, 0.0)
    with pytest.raises(QueueFullError, match="no present worker could run"):
        add(scheduler, "more", 900, 40, 20, 0.0)
    for i in range(8):  # a client that comes back
        add(scheduler, f"back{i}", 1000 + 100 * i, 40, 20, 0.0, takes_over=True)
    add(scheduler, "short", 7000, 4, 4, 0.0)
    assert run(scheduler, 1.0).keys() == {"short"}
    scheduler.abort_group("long0", FinishReason.ABORTED)
    check_scheduler(scheduler)
