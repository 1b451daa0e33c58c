"""Adapters in the core: which are resident, which request waits for a swap, and what is not delayed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from prefix_index.hashing import root_key
from scheduler_svc.core.admission.placement import Placement
from scheduler_svc.core.features.adapters import AdapterSlots, AdapterSwap, UsesAdapter
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Features, SequenceGroup
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler
from tests.unit.core.calls import count_calls
from tests.unit.core.test_scheduler import answer

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def with_adapter(group: SequenceGroup, adapter: bytes) -> SequenceGroup:
    group.features, group.root_key = Features(UsesAdapter(adapter)), root_key(adapter=adapter)
    return group


def scheduler_with(*adapters: bytes, num_slots: int = 1, names: tuple[str, ...] = ("w0",)) -> Scheduler:
    capacities = [replace(make_capacity(name), max_adapters=num_slots) for name in names]
    scheduler = make_scheduler(*capacities)
    for name in names:
        scheduler.adapters.set_loaded(name, adapters)
    return scheduler


def test_a_failed_swap_counts_as_not_loaded_until_the_worker_reports_it() -> None:
    slots = AdapterSlots(1)
    slots.set_loaded([A])
    slots.want(A)
    assert slots.take_swap({}) == (A, (), b"")
    assert slots.is_loading(A)
    slots.end_swap(A, is_resident=False)
    assert not slots.has(A)
    slots.set_loaded([A])
    slots.want(A)
    assert slots.take_swap({}) == (A, (), b"")


def test_parts_of_a_root_key_cannot_be_confused() -> None:
    keys = [
        root_key(),
        root_key(cache_salt=b"x"),
        root_key(adapter=A),
        root_key(adapter=B),
        root_key(cache_salt=b"x", adapter=A),
        root_key(cache_salt=root_key(adapter=A)),
    ]
    assert len(set(keys)) == len(keys)


def test_a_swap_costs_nothing_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resident adapter changes which rows can open, not which worker could run a request."""
    scheduler = scheduler_with(A, B)
    for i in range(20):
        scheduler.add_group(with_adapter(make_group(10, f"a{i}"), A), 0.0)
    scheduler.schedule(0.0)
    assert scheduler.adapters.take_swaps() == [AdapterSwap("w0", A)]
    checks = count_calls(monkeypatch, Placement, "could_run")
    scheduler.adapters.end_swap("w0", A, is_resident=True)
    scheduler.adapters.set_loaded("w0", [B, A])
    assert not checks, "the adapters in memory are the same"
    scheduler.adapters.set_loaded("w0", [A])
    assert not checks, "no request waits for the other adapter"
    check_scheduler(scheduler)


def test_an_urgent_request_gets_the_slot_of_less_urgent_rows() -> None:
    """Rows of priority 9 and 5 hold both slots for 80 steps. The least urgent one makes place for a more urgent
    request, and runs again after it.
    """
    scheduler = scheduler_with(A, B, C, num_slots=2)
    for adapter, priority in ((A, 9), (B, 5)):
        long = make_group(10, f"{priority}", max_tokens=80, ignore_eos=True, priority=priority)
        scheduler.add_group(with_adapter(long, adapter), 0.0)
    opened, ended = list[str](), list[str]()
    swaps = list[AdapterSwap]()
    for step in range(200):
        if step in (5, 6):  # the first is not urgent enough
            new = make_group(10, f"new {step}", max_tokens=4, ignore_eos=True, priority=9 if step == 5 else 0)
            scheduler.add_group(with_adapter(new, C), 0.0)
        for swap in swaps:
            scheduler.adapters.end_swap("w0", swap.digest, is_resident=True)
        for batch in scheduler.schedule(0.0):
            opened += [row.group.request_id for row in batch.opens]
            ended += [end.group.request_id for end in scheduler.update(answer(batch), 0.0).finished]
        swaps = scheduler.adapters.take_swaps()
        check_scheduler(scheduler)
    assert opened == ["5", "9", "new 6", "new 5", "9"]
    assert ended == ["new 6", "new 5", "5", "9"]


def test_a_worker_is_reserved_for_a_starved_long_prompt_with_an_adapter() -> None:
    """It waits for blocks, which short requests behind it would take again and again."""
    capacity = make_capacity("w0", num_blocks=32, max_num_seqs=8, max_num_batched_tokens=16)
    scheduler = make_scheduler(replace(capacity, max_adapters=1), aging_s=1.0, aging_tokens_per_s=1e9)
    scheduler.adapters.set_loaded("w0", [A])
    opened = list[str]()
    for step in range(100):
        if step == 10:
            scheduler.add_group(with_adapter(make_group(100, "long", max_tokens=1), A), 0.5 * step)
        if step % 2 == 0:
            scheduler.add_group(make_group(4, f"{step}", max_tokens=14, ignore_eos=True), 0.5 * step)
        for batch in scheduler.schedule(0.5 * step):
            opened += [row.group.request_id for row in batch.opens]
            scheduler.update(answer(batch), 0.5 * step)
        for swap in scheduler.adapters.take_swaps():
            scheduler.adapters.end_swap("w0", swap.digest, is_resident=True)
    assert "long" in opened


class Overload:
    """One worker with 3 slots for adapters and 12 rows, and a queue that always has 40 requests. Time is counted in
    steps of 20 ms; a swap takes 15 of them.
    """

    def __init__(self, adapters: Iterator[bytes], *, aging_s: float = 2.0) -> None:
        capacity = make_capacity(max_num_seqs=12, num_blocks=1024, max_num_batched_tokens=512)
        self.scheduler = make_scheduler(replace(capacity, max_adapters=3), aging_s=aging_s)
        self.scheduler.adapters.set_loaded("w0", EIGHT)
        self.num_row_steps = self.longest_wait = self.num_swaps = 0
        self.num_run: Counter[bytes] = Counter()
        self._adapters, self._rng = adapters, random.Random(1)
        self._added_at: dict[str, int] = {}

    def run(self, num_steps: int) -> None:
        swaps: dict[int, bytes] = {}
        for step in range(num_steps):
            self._fill_queue(step)
            if step in swaps:
                self.scheduler.adapters.end_swap("w0", swaps.pop(step), is_resident=True)
            for batch in self.scheduler.schedule(step / 50):
                for opened in batch.opens:
                    self.num_run[opened.group.features.items[0].digest] += 1
                    self.longest_wait = max(self.longest_wait, step - self._added_at[opened.group.request_id])
                self.scheduler.update(answer(batch), step / 50)
            for swap in self.scheduler.adapters.take_swaps():
                self.num_swaps += 1
                swaps[step + 15] = swap.digest
            self.num_row_steps += self.scheduler.load().num_running

    def _fill_queue(self, step: int) -> None:
        while self.scheduler.load().num_waiting < 40:
            name, size = f"{len(self._added_at)}", self._rng.randint(5, 60)
            group = make_group(size, name, max_tokens=self._rng.randint(1, 80), ignore_eos=True)
            self.scheduler.add_group(with_adapter(group, next(self._adapters)), step / 50)
            self._added_at[name] = step


EIGHT = [bytes([number]) * 16 for number in range(1, 9)]


def equally() -> Iterator[bytes]:
    rng = random.Random(0)
    while True:
        yield rng.choice(EIGHT)


def test_starved_requests_of_many_adapters_leave_no_rows_idle() -> None:
    """A request that waits for a slot reserves the slot, not the rows of the worker."""
    overload, without = Overload(equally()), Overload(equally(), aging_s=1e9)
    for run in (overload, without):
        run.run(1500)
    assert overload.num_row_steps > 0.97 * without.num_row_steps
    assert overload.num_row_steps > 0.8 * 12 * 1500
    assert min(overload.num_run[digest] for digest in EIGHT) > 0.5 * max(overload.num_run.values())
    assert overload.num_swaps < 1500 / 30
    check_scheduler(overload.scheduler)


def test_busy_adapters_do_not_keep_another_one_out() -> None:
    """Three adapters always have rows. A request of a fourth gets a slot when the rows of one of them have ended."""

    def mostly_three() -> Iterator[bytes]:
        for i in range(10_000):
            yield EIGHT[3] if i % 100 == 50 else EIGHT[i % 3]

    overload = Overload(mostly_three())
    overload.run(1500)
    assert overload.num_run[EIGHT[3]] >= 4
    assert overload.longest_wait < 400, "2 s, the rows of one adapter (80 steps), a swap, and a row"
    assert overload.num_row_steps > 0.9 * 12 * 1500


def test_an_adapter_is_retired_only_while_another_one_needs_its_slot() -> None:
    slots = AdapterSlots(1)
    slots.set_loaded([A, B])
    slots.want(A)
    slots.take_swap({})
    slots.end_swap(A, is_resident=True)
    slots.want(B)
    assert slots.take_swap({A: 0}) is None
    assert slots.is_ready(A)
    slots.want(B, is_starved=True)
    assert slots.take_swap({A: 0}) is None
    assert (slots.is_ready(A), slots.is_resident(A)) == (False, True)
    slots.want(A)
    assert slots.take_swap({A: 0}) is None  # the request of B has ended
    assert slots.is_ready(A)


def test_an_adapter_is_not_retired_while_a_more_urgent_request_wants_it() -> None:
    """A seed of the simulation: two requests took the slot from each other, and a third one used their blocks."""
    slots = AdapterSlots(1)
    slots.set_loaded([A, B])
    slots.want(A)
    slots.take_swap({})
    slots.end_swap(A, is_resident=True)
    slots.want(A, is_starved=True)
    slots.want(B, is_starved=True)
    assert slots.take_swap({}) is None
    assert slots.is_ready(A)


def test_an_adapter_is_not_evicted_before_an_older_request_has_used_it() -> None:
    slots = AdapterSlots(1)
    slots.set_loaded([A, B])
    slots.want(A)
    slots.take_swap({})
    slots.end_swap(A, is_resident=True)
    slots.want(A)
    slots.want(B)
    assert slots.take_swap({}) is None
    slots.want(B)
    slots.want(A)
    assert slots.take_swap({}) == (B, (), b"")
