"""WaitingQueue: the order of waiting sequences, with fair shares for tenants."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import islice
from typing import Any

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueueEntry, Sequence, SequenceData
from scheduler_svc.core.waiting_queue import FairShare, WaitingQueue
from step_protocol.columns import EMPTY
from tests.builders import make_capacity, make_group, make_scheduler
from tests.call_counts import counted
from tests.invariants import check_queue, check_scheduler, check_share
from tests.unit.core.test_scheduler import answer


class Waiting:
    """A queue with requests of one sample each."""

    def __init__(self) -> None:
        self.share = FairShare()
        self.queue = WaitingQueue(self.share, math.inf)
        self.num_made = 0

    def add(self, name: str, tenant: str = "", size: int = 10, priority: int = 0, arrival: float = 0.0) -> Sequence:
        group = make_group(size, name, priority=priority, tenant_id=tenant)
        group.arrival, group.tenant_slot = arrival, self.share.join(tenant)
        self.num_made += 1
        seq = Sequence(group, 0, SequenceData(group.prompt, EMPTY), self.num_made)
        self.queue.add(QueueEntry(seq, size))
        return seq

    def entry(self, seq: Sequence) -> QueueEntry:
        entry = self.queue.entry(seq)
        assert entry is not None
        return entry

    def names(self) -> list[str]:
        check_queue(self.queue)
        return [entry.seq.group.request_id for entry in self.queue]


def test_tenants_take_turns_however_much_one_asks_for() -> None:
    waiting = Waiting()
    for i in range(4):
        waiting.add(f"a{i}", "a")
    waiting.add("b0", "b", size=25)
    waiting.add("b1", "b")
    # Each served sequence counts: after the 25 tokens of b, a is served until it has had more.
    assert waiting.names() == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_priority_and_preempted_sequences_come_before_shares() -> None:
    waiting = Waiting()
    waiting.add("b", "b")
    waiting.share.charge_prompt(waiting.add("a", "a", priority=-1).group.tenant_slot, 10_000)
    back = waiting.add("a back", "a")
    waiting.queue.remove(back)
    back.is_admitted_before = True
    waiting.queue.add(QueueEntry(back, 10))
    waiting.add("a new", "a")
    assert waiting.names() == ["a", "a back", "b", "a new"]


def test_random_changes_keep_the_books_balanced() -> None:
    rng, waiting = random.Random(7), Waiting()
    live: list[Sequence] = []
    for step in range(2000):
        if live and rng.random() < 0.48:
            seq = live.pop(rng.randrange(len(live)))
            assert seq in waiting.queue
            waiting.queue.remove(seq)
            assert seq not in waiting.queue
            waiting.share.leave(seq.group.tenant_slot)
        else:
            tenant, size = rng.choice("abcdefgh"), rng.randint(1, 40)
            live.append(waiting.add(f"{step}", tenant, size, rng.randint(-1, 1), float(step // 3)))
        if step % 50 == 0:
            check_queue(waiting.queue)
            check_share(waiting.share, Counter(seq.group.tenant_slot for seq in live))
            assert {entry.seq for entry in waiting.queue} == {*live}
            assert list(waiting.queue) == merged(waiting)
        if live and rng.random() < 0.5:  # a running sequence of the tenant gets tokens
            waiting.share.charge_prompt(rng.choice(live).group.tenant_slot, rng.randint(1, 60))


def merged(waiting: Waiting) -> list[QueueEntry]:
    """The order by its definition: each entry counts as served when the next one is chosen."""
    lists: dict[int, list[QueueEntry]] = {}
    for entry in sorted(waiting.queue, key=lambda entry: entry.key):
        lists.setdefault(entry.seq.group.tenant_slot, []).append(entry)
    served = {slot: int(waiting.share.served[slot]) for slot in lists}
    order = []

    def rank(slot: int) -> tuple[Any, ...]:
        priority, is_new, virtual_arrival, seq_id = lists[slot][0].key
        return priority, is_new, served[slot] if is_new else 0, virtual_arrival, seq_id

    while lists:
        slot = min(lists, key=rank)
        order.append(lists[slot].pop(0))
        served[slot] += order[-1].num_tokens
        if not lists[slot]:
            del lists[slot]
    return order


def test_a_look_at_the_first_entries_does_not_depend_on_the_tenants() -> None:
    calls = []
    for num_tenants in (10, 1000):
        waiting = Waiting()
        for i in range(num_tenants):
            waiting.add(f"{i}", f"tenant {i}", arrival=float(i))
        counts = Counter[str]()
        with counted(counts):
            assert len(list(islice(waiting.queue, 8))) == 8
        calls.append(counts["call"] + counts["c_call"])
    assert calls[1] < 2 * calls[0]


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
    check_scheduler(scheduler)
    assert served["b"] > 300
    assert abs(served["a"] - served["b"]) < 0.1 * served["a"]
