"""WorkerChoice and order of requests in the real core. The test answers the steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler_svc.core.admission.placement import Placement, Wait, WorkerChoice
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, QueueEntry
from scheduler_svc.core.steps.step_planner import StepPlanner
from scheduler_svc.core.worker_state import StepPlan, WorkerState
from step_protocol.messages import StepBatch
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler
from tests.unit.core.calls import count_calls
from tests.unit.core.test_scheduler import answer


def add(scheduler: Scheduler, name: str, prompt: list[int] | int, now: float = 0.0, **fields: Any) -> None:
    fields.setdefault("max_tokens", 2)
    scheduler.add_group(make_group(prompt, name, ignore_eos=True, **fields), now)


def opened(batches: list[StepBatch]) -> dict[str, list[str]]:
    """The requests that got a row, by worker."""
    return {b.worker_id: [o.group.request_id for o in b.opens] for b in batches if b.opens}


def run(scheduler: Scheduler, now: float = 0.0) -> None:
    """Run until everything has ended."""
    while batches := scheduler.schedule(now):
        for batch in batches:
            scheduler.update(answer(batch), now)


def run_once(scheduler: Scheduler) -> None:
    for batch in scheduler.schedule(0.0):
        scheduler.update(answer(batch), 0.0)


def know_pace(scheduler: Scheduler, tokens_per_s: float) -> None:
    scheduler._throughput.prefill.add(2 * tokens_per_s, 2.0)


def test_the_shortest_uncached_prompt_comes_first_however_long_it_is() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=1))
    shared = list(range(100, 140))
    add(scheduler, "warm", shared)
    run(scheduler)
    add(scheduler, "long", list(range(200, 230)))
    add(scheduler, "cached", [*shared, 7, 8])  # longer, but 2 tokens to compute
    add(scheduler, "short", list(range(300, 310)))
    order = []
    while scheduler.has_work:
        for batch in scheduler.schedule(0.0):
            order += opened([batch]).get("w0", [])
            scheduler.update(answer(batch), 0.0)
    assert order == ["cached", "short", "long"]


def test_a_short_request_does_not_pass_one_that_has_waited() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=1), aging_tokens_per_s=10.0)
    add(scheduler, "long", 50, now=0.0)
    add(scheduler, "soon", 10, now=3.0)
    add(scheduler, "late", 10, now=5.0)
    assert [entry.seq.group.request_id for entry in scheduler._waiting] == ["soon", "long", "late"]


def test_infinite_ageing_gives_the_order_of_arrival() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=1), aging_tokens_per_s=float("inf"))
    add(scheduler, "long", 50, now=0.0)
    add(scheduler, "short", 5, now=0.1)
    assert [entry.seq.group.request_id for entry in scheduler._waiting] == ["long", "short"]


def test_a_prefix_cached_or_evicted_meanwhile_changes_the_order() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=1, num_blocks=64))
    add(scheduler, "first", list(range(100, 150)))
    batches = scheduler.schedule(0.0)
    add(scheduler, "short", 12)
    add(scheduler, "same", [*range(100, 150), 1])  # the core knows of no cached block yet: its prefix is in flight
    for _ in range(2):
        for batch in batches:
            scheduler.update(answer(batch), 1.0)
        batches = scheduler.schedule(1.0)
    assert opened(batches) == {"w0": ["same"]}


def test_a_burst_spreads_over_empty_workers_and_a_conversation_returns() -> None:
    scheduler = make_scheduler(*(make_capacity(f"w{i}") for i in range(4)))
    for i in range(4):
        add(scheduler, f"r{i}", [*range(100 * i, 100 * i + 20)])
    where = opened(scheduler.schedule(0.0))
    assert sorted(len(names) for names in where.values()) == [1, 1, 1, 1]


def test_a_request_waits_for_the_worker_that_holds_its_prefix_and_leaves_when_that_costs_more() -> None:
    scheduler = make_scheduler(*(make_capacity(f"w{i}", max_num_seqs=1) for i in range(2)), aging_s=100.0)
    know_pace(scheduler, 100.0)
    prefix = list(range(100, 160))
    add(scheduler, "holder", prefix, max_tokens=100)
    (batch,) = scheduler.schedule(0.0)
    home = batch.worker_id
    scheduler.update(answer(batch), 0.0)
    add(scheduler, "again", [*prefix, 1], now=0.0)  # 60 tokens more elsewhere: 0.6 s, worth a wait of 2 s
    add(scheduler, "cold", list(range(300, 350)), now=0.0)  # may run on the other worker: no worker has its prefix
    batches = scheduler.schedule(0.0)
    assert "again" not in str(opened(batches))
    assert opened(batches) == {"w1" if home == "w0" else "w0": ["cold"]}
    scheduler.abort_group("cold", FinishReason.ABORTED)
    for at in (1.9, 2.1):
        for batch in batches:
            scheduler.update(answer(batch), at)
        batches = scheduler.schedule(at)
        assert bool(opened(batches)) == (at > 2.0)


def test_a_few_cached_tokens_do_not_bind_a_request() -> None:
    scheduler = make_scheduler(*(make_capacity(f"w{i}", max_num_seqs=1) for i in range(2)))
    know_pace(scheduler, 1e9)
    add(scheduler, "a", [1, 2, 3, 4, *range(100, 110)], max_tokens=50)
    (batch,) = scheduler.schedule(0.0)
    scheduler.update(answer(batch), 0.0)
    add(scheduler, "b", [1, 2, 3, 4, *range(200, 210)], now=0.0)
    scheduler.schedule(0.0)
    assert opened(scheduler.schedule(0.001)) == {"w1" if batch.worker_id == "w0" else "w0": ["b"]}


def test_what_was_written_long_ago_keeps_no_worker_idle() -> None:
    scheduler = make_scheduler(*(make_capacity(f"w{i}", max_num_seqs=16) for i in range(2)))
    for i in range(4):
        add(scheduler, f"long{i}", [*range(100 * i, 100 * i + 8)], max_tokens=20)
    run_once(scheduler)
    busy, idle = scheduler._workers.values()
    for row in idle.rows.active().tolist():
        scheduler.abort_group(idle.rows.sequence(row).group.request_id, FinishReason.ABORTED)
    scheduler._placement.add_written(idle, 200)  # its pool has 256
    add(scheduler, "short", list(range(900, 908)), max_tokens=20)
    assert opened(scheduler.schedule(0.0)) == {idle.capacity.worker_id: ["short"]}
    for _ in range(40):
        scheduler._placement.add_written(busy, 64)
    assert scheduler._placement._written[1] < 8, "it decays"


def test_an_answer_of_one_worker_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(*(make_capacity(f"w{i}", max_num_seqs=2) for i in range(16)))
    for i in range(60):
        add(scheduler, f"r{i}", 9, max_tokens=40)
    batches = scheduler.schedule(0.0)
    asked: list[str] = []
    begin = StepPlanner.begin_step

    def begin_step(planner: StepPlanner, now: float) -> StepPlan:
        asked.append(planner.worker.capacity.worker_id)
        return begin(planner, now)

    monkeypatch.setattr(StepPlanner, "begin_step", begin_step)
    monkeypatch.setattr(WorkerState, "num_cached", lambda w, *_: pytest.fail("a full placement looks at no prompt"))
    scheduler.update(answer(batches[3]), 0.0)
    scheduler.schedule(0.0)
    assert set(asked) <= {batches[3].worker_id}


def test_a_refused_sequence_is_not_placed_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_capacity(num_blocks=16))
    for i in range(8):
        add(scheduler, f"r{i}", 20, max_tokens=20)
    batches = scheduler.schedule(0.0)
    waiting = scheduler.stats().num_waiting
    assert waiting
    choices = count_calls(monkeypatch, Placement, "place")
    for _ in range(10):
        for batch in batches:
            scheduler.update(answer(batch), 0.0)
        batches = scheduler.schedule(0.0)
    assert len(choices) <= 2 * waiting, "expected one placement, and a second after the projected peak falls"
    while scheduler.stats().num_waiting == waiting:
        for batch in batches:
            scheduler.update(answer(batch), 0.0)
        batches = scheduler.schedule(0.0)
    assert opened(batches)


def test_only_prompts_near_the_front_of_a_long_queue_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=4, num_blocks=16), max_waiting=2000)
    for i in range(1000):
        add(scheduler, f"r{i}", 9, max_tokens=3)
    looks = count_calls(monkeypatch, WorkerState, "num_cached")
    for step in range(40):
        for batch in scheduler.schedule(step / 100):
            scheduler.update(answer(batch), step / 100)
    assert len(looks) < 40 * 20


def test_a_waiting_request_ends_at_its_deadline_anywhere_in_the_queue() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=1))
    add(scheduler, "running", 9, max_tokens=100)
    scheduler.update(answer(scheduler.schedule(0.0)[0]), 0.0)
    for i in range(50):
        add(scheduler, f"r{i}", 9, timeout_s=1.0 if i == 49 else None)
    scheduler.schedule(0.9)
    assert not scheduler.take_expired().finished
    scheduler.schedule(1.0)
    assert [end.group.request_id for end in scheduler.take_expired().finished] == ["r49"]
    assert scheduler.stats().num_waiting == 49


class Recorder(Placement):
    """Counts choices, or chooses again for every waiting sequence in every step."""

    def __init__(self, config: SchedulerConfig, *, keeps: bool) -> None:
        super().__init__(config)
        self._keeps, self.num_choices = keeps, 0

    def place(self, entry: QueueEntry, now: float, tokens_per_s: float | None) -> WorkerChoice:
        self.num_choices += 1
        return super().place(entry, now, tokens_per_s)

    def would_wait(self, waits: list[Wait], now: float, tokens_per_s: float | None) -> bool:
        return self._keeps and super().would_wait(waits, now, tokens_per_s)


def run_busy_workers(seed: int, *, keeps: bool) -> tuple[list[tuple[float, str, list[str]]], int]:
    """Which worker admits which requests when, and the number of choices, in a queue that is seldom empty."""
    rng, config = random.Random(seed), SchedulerConfig(max_pending_prefill_steps=1, aging_s=0.5)
    placement = Recorder(config, keeps=keeps)
    scheduler = Scheduler(config, placement)
    know_pace(scheduler, 200.0)
    for i in range(4):
        sizes = {"num_blocks": rng.choice((40, 80)), "max_num_batched_tokens": 24, "pipeline_depth": 2}
        scheduler.add_worker(make_capacity(f"w{i}", **sizes))
    prefixes = [[rng.randrange(100) for _ in range(40)] for _ in range(4)]
    in_flight: dict[str, list[StepBatch]] = {f"w{i}": [] for i in range(4)}
    admitted, now = [], 0.0
    for event in range(500):
        now += rng.random() * 0.02
        if rng.random() < 0.25:
            prompt = rng.choice(prefixes)[: rng.randrange(41)] + [rng.randrange(100) for _ in range(rng.randint(1, 30))]
            scheduler.add_group(make_group(prompt, str(event), max_tokens=rng.randint(1, 12), ignore_eos=True), now)
        busy = [name for name, batches in in_flight.items() if batches]
        if busy:
            step = in_flight[rng.choice(busy)].pop(0)
            scheduler.update(answer(step), now)
        for batch in scheduler.schedule(now):
            in_flight[batch.worker_id].append(batch)
            admitted.append((now, batch.worker_id, [opened.group.request_id for opened in batch.opens]))
    return admitted, placement.num_choices


def test_kept_choices_are_those_that_would_be_made_again() -> None:
    num_kept = num_made = 0
    for seed in range(12):
        admitted, num_choices = run_busy_workers(seed, keeps=True)
        expected, num_without = run_busy_workers(seed, keeps=False)
        assert admitted == expected, f"seed {seed}"
        num_kept, num_made = num_kept + num_without - num_choices, num_made + num_choices
    assert num_kept > num_made / 4


def test_requests_that_wait_for_their_prefix_keep_no_other_worker_idle() -> None:
    """However many of them there are: they want none of the rows that they leave to later requests."""
    capacities = [make_capacity(name, max_num_seqs=1, num_blocks=256) for name in ("a", "b")]
    scheduler = make_scheduler(*capacities, max_bypass=4)
    know_pace(scheduler, 100.0)
    shared = list(range(100, 140))
    add(scheduler, "warm", shared)
    run(scheduler)
    add(scheduler, "busy", [*shared, 1])
    (batch,) = scheduler.schedule(0.0)
    for i in range(12):
        add(scheduler, f"held{i}", [*shared, 2 + i])
    scheduler.schedule(0.0)
    add(scheduler, "later", list(range(300, 310)))
    idle = ({"a", "b"} - {batch.worker_id}).pop()
    assert opened(scheduler.schedule(0.0)) == {idle: ["later"]}
    check_scheduler(scheduler)


def test_requests_that_only_a_full_worker_can_run_keep_no_other_worker_idle() -> None:
    capacities = [make_capacity("large", max_num_seqs=1), make_capacity("small", num_blocks=4)]
    scheduler = make_scheduler(*capacities, max_bypass=4)
    for i in range(12):
        add(scheduler, f"large{i}", 30, max_tokens=20)
    assert opened(scheduler.schedule(0.0)) == {"large": ["large0"]}
    add(scheduler, "later", 12, now=1.0)
    assert opened(scheduler.schedule(1.0)) == {"small": ["later"]}
    check_scheduler(scheduler)
