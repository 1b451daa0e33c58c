"""Adapters in the core: which are resident, which request waits for a swap, and what is not delayed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefix_index.hashing import root_key
from scheduler_svc.core.errors import NoWorkerError
from scheduler_svc.core.features.adapters import AdapterSlots, AdapterSwap, UsesAdapter
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Features, SequenceGroup
from tests.builders import make_capacity, make_group, make_scheduler
from tests.unit.core.calls import count_calls

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


def test_a_swap_delays_only_the_requests_of_its_adapter() -> None:
    scheduler = scheduler_with(A)
    scheduler.add_group(with_adapter(make_group(10, "adapted"), A), 0.0)
    scheduler.add_group(make_group(10, "base"), 0.0)
    (batch,) = scheduler.schedule(0.0)
    assert [opened.group.request_id for opened in batch.opens] == ["base"]
    assert scheduler.adapters.take_swaps() == [AdapterSwap("w0", A)]
    assert scheduler.adapters.take_swaps() == []
    scheduler.adapters.end_swap("w0", A, is_resident=True)
    assert scheduler.adapters.is_resident("w0", A)
    scheduler.check_invariants()


def test_the_least_recently_used_adapter_without_rows_is_replaced() -> None:
    slots = AdapterSlots(2)
    slots.set_loaded([A, B, C])
    for adapter in (A, B):
        slots.want(adapter)
        assert slots.take_swap(()) is not None
        slots.end_swap(adapter, is_resident=True)
    slots.want(A)  # used again: B is older
    assert slots.take_swap(()) is None
    slots.want(C)
    assert slots.take_swap({B}) == (C, (B,))  # B is older, but has rows
    slots.end_swap(C, is_resident=True)
    slots.want(A)
    assert slots.take_swap({B, C}) is None
    assert (slots.num_resident, slots.num_swaps) == (2, 3)


def test_a_failed_swap_counts_as_not_loaded_until_the_worker_reports_it() -> None:
    slots = AdapterSlots(1)
    slots.set_loaded([A])
    slots.want(A)
    assert slots.take_swap(()) == (A, ())
    assert slots.is_loading(A)
    slots.end_swap(A, is_resident=False)
    assert not slots.has(A)
    slots.set_loaded([A])
    slots.want(A)
    assert slots.take_swap(()) == (A, ())


def test_an_unloaded_adapter_is_not_resident() -> None:
    slots = AdapterSlots(1)
    slots.set_loaded([A])
    slots.want(A)
    slots.take_swap(())
    slots.set_loaded([])
    slots.end_swap(A, is_resident=True)
    assert not slots.is_ready(A)
    assert slots.is_ready(b"")


def test_requests_run_only_where_their_adapter_is() -> None:
    scheduler = scheduler_with(names=("w0", "w1"))
    with pytest.raises(NoWorkerError, match=rf"no worker of this scheduler has the adapter with digest {A.hex()}"):
        scheduler.add_group(with_adapter(make_group(10), A), 0.0)
    scheduler.adapters.set_loaded("w1", [A])
    scheduler.add_group(with_adapter(make_group(10), A), 0.0)
    assert scheduler.adapters.num_requests_with(A) == 1
    scheduler.schedule(0.0)
    (swap,) = scheduler.adapters.take_swaps()
    assert swap.worker_id == "w1"
    scheduler.adapters.end_swap("w1", A, is_resident=True)
    (batch,) = scheduler.schedule(0.0)
    assert batch.worker_id == "w1"
    scheduler.check_invariants()


def test_a_request_waits_until_a_worker_has_its_adapter_again() -> None:
    scheduler = scheduler_with(A)
    scheduler.add_group(with_adapter(make_group(10), A), 0.0)
    scheduler.adapters.set_loaded("w0", [])
    assert scheduler.schedule(0.0) == []
    assert scheduler.stats().num_unschedulable == 1
    scheduler.adapters.set_loaded("w0", [A])
    scheduler.schedule(0.0)
    assert scheduler.adapters.take_swaps() == [AdapterSwap("w0", A)]


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
    scheduler.check_invariants()


def test_an_adapter_that_is_gone_makes_its_requests_unschedulable() -> None:
    scheduler = scheduler_with(A, B)
    for name, adapter in (("a", A), ("b", B)):
        scheduler.add_group(with_adapter(make_group(10, name), adapter), 0.0)
    scheduler.schedule(0.0)
    (swap,) = scheduler.adapters.take_swaps()
    scheduler.adapters.end_swap("w0", swap.digest, is_resident=False)
    assert scheduler.stats().num_unschedulable == 1
    scheduler.check_invariants()
    scheduler.adapters.set_loaded("w0", [A, B])
    assert scheduler.stats().num_unschedulable == 0
    scheduler.check_invariants()
