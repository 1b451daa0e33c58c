"""Counters of tenants and the queue that follows them."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from scheduler_svc.core.messages import EMPTY
from scheduler_svc.core.queue import fairness
from scheduler_svc.core.queue.fairness import FairShare, WaitingQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceData
from tests.builders import make_capacity, make_group, make_scheduler
from tests.unit.core.test_scheduler import answer


class Line:
    """A queue, and a way to put one-sample requests into it."""

    def __init__(self) -> None:
        self.share = FairShare()
        self.queue = WaitingQueue(self.share)
        self.num_made = 0

    def add(self, name: str, tenant: str = "", size: int = 10, priority: int = 0, arrival: float = 0.0) -> Sequence:
        group = make_group(size, name, priority=priority, tenant_id=tenant)
        group.arrival, group.tenant_slot = arrival, self.share.join(tenant)
        self.num_made += 1
        seq = Sequence(group, 0, SequenceData(group.prompt, EMPTY), self.num_made)
        self.queue.add(seq, held_tokens=size, turn=arrival)
        return seq

    def names(self) -> list[str]:
        self.queue.check_invariants()
        return [seq.group.request_id for seq in self.queue]


def test_one_tenant_is_served_in_order_of_priority_and_arrival() -> None:
    line = Line()
    line.add("late", arrival=5.0)
    line.add("early", arrival=1.0)
    line.add("urgent", priority=-1, arrival=9.0)
    under_way = line.add("under way", arrival=7.0)
    line.queue.remove(under_way)
    under_way.is_admitted_before = True
    line.queue.add(under_way, 10, 7.0)
    assert line.names() == ["urgent", "under way", "early", "late"]


def test_turns_can_change_and_tell_what_is_ahead() -> None:
    line = Line()
    long_one = line.add("long", size=50, arrival=3.0)
    line.add("short", size=5, arrival=4.0)
    line.add("urgent", size=7, priority=-1, arrival=9.0)
    slot = line.share.slot_of("")
    assert line.queue.tokens_ahead(slot, 0) == 62
    assert line.queue.tokens_ahead(slot, 0, 3.5) == 57
    line.queue.move(long_one, 4.5)
    assert line.names() == ["urgent", "short", "long"]
    assert line.queue.tokens_ahead(slot, 0, 4.2) == 12


def test_tenants_take_turns_however_much_one_asks_for() -> None:
    line = Line()
    for i in range(4):
        line.add(f"a{i}", "a")
    line.add("b0", "b", size=25)
    line.add("b1", "b")
    # Each turn counts its tokens: after b's 25 tokens a is served until it has had more.
    assert line.names() == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_priority_and_streams_that_stand_still_come_before_shares() -> None:
    line = Line()
    line.add("b", "b")
    line.share.charge_prompt(line.add("a", "a", priority=-1).group.tenant_slot, 10_000)
    back = line.add("a back", "a")
    line.queue.remove(back)
    back.is_admitted_before = True
    line.queue.add(back, 10, 0.0)
    line.add("a new", "a")
    assert line.names() == ["a", "a back", "b", "a new"]


def test_nobody_saves_up_credit_while_away_and_nobody_pays_twice() -> None:
    share = FairShare()
    a = share.join("a")
    share.charge_outputs(np.array([a]), np.zeros(50, dtype=np.int64))
    assert share.served[a] == 100
    b = share.join("b")
    assert share.served[b] == 100  # lifted to the least served of those that are here
    share.charge_prompt(b, 30)
    share.leave(a)
    share.leave(b)
    c = share.join("c")
    assert share.served[c] == 130  # nobody is here: where the last one ended
    share.charge_prompt(c, 500)
    assert share.join("a") == a
    assert share.served[a] == 630


def test_outputs_count_per_tenant() -> None:
    share = FairShare()
    slots = np.array([share.join("a"), share.join("b"), share.join("b")])
    share.charge_outputs(slots, np.array([0, 1, 2]))
    assert share.served[slots].tolist() == [2, 4, 4]


def test_idle_tenants_are_forgotten_in_time(monkeypatch: object) -> None:
    share = FairShare()
    monkeypatch.setattr(fairness, "MAX_IDLE_TENANTS", 3)  # type: ignore[attr-defined]
    stays = share.join("stays")
    for i in range(100):
        share.leave(share.join(f"t{i}"))
    assert len(share._names) <= 5
    share.check_invariants({stays: 1})


def test_random_lines_keep_their_books() -> None:
    rng, line = random.Random(7), Line()
    live: list[Sequence] = []
    for step in range(2000):
        if live and rng.random() < 0.48:
            seq = live.pop(rng.randrange(len(live)))
            assert seq in line.queue
            line.queue.remove(seq)
            assert seq not in line.queue
            line.share.leave(seq.group.tenant_slot)
        else:
            tenant, size = rng.choice("abcdefgh"), rng.randint(1, 40)
            live.append(line.add(f"{step}", tenant, size, rng.randint(-1, 1), float(step // 3)))
        if step % 50 == 0:
            line.queue.check_invariants()
            line.share.check_invariants(Counter(seq.group.tenant_slot for seq in live))
            assert sorted(map(id, line.queue)) == sorted(map(id, live))
            priorities = [seq.group.priority for seq in line.queue]
            assert priorities == sorted(priorities)


def serve(scheduler: Scheduler, until_s: float) -> Counter[str]:
    """Step every 10 ms; output tokens per tenant."""
    served: Counter[str] = Counter()
    now = 0.0
    while now < until_s:
        for batch in scheduler.schedule(now):
            deltas = scheduler.update(answer(batch), now)
            served.update(deltas.handles.tolist())
        now += 0.01
    return Counter({"ab"[handle]: count for handle, count in served.items()})


def test_a_flood_of_one_tenant_leaves_another_its_share() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=4, num_blocks=256), max_waiting=1000)
    for i in range(400):
        scheduler.add_group(make_group(8, f"a{i}", tenant_id="a", handle=0, ignore_eos=True), 0.0)
    for i in range(100):
        scheduler.add_group(make_group(8, f"b{i}", tenant_id="b", handle=1, ignore_eos=True), 0.0)
    served = serve(scheduler, 2.0)
    scheduler.check_invariants()
    assert served["b"] > 300
    assert abs(served["a"] - served["b"]) < 0.1 * served["a"]
