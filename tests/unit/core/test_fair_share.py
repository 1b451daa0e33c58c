"""FairShare: the tenants' counters of served tokens."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core import waiting_queue
from scheduler_svc.core.waiting_queue import FairShare
from tests.invariants import check_share


def test_a_tenant_neither_saves_up_credit_while_idle_nor_pays_twice() -> None:
    share = FairShare()
    a = share.join("a")
    share.charge_outputs(np.array([a]), np.zeros(50, dtype=np.int64))
    assert share.served[a] == 100
    b = share.join("b")
    assert share.served[b] == 100  # lifted to the lowest counter of the active tenants
    share.charge_prompt(b, 30)
    share.leave(a)
    share.leave(b)
    c = share.join("c")
    assert share.served[c] == 130  # no tenant is active: starts at the counter of the last one
    share.charge_prompt(c, 500)
    assert share.join("a") == a
    assert share.served[a] == 630


def test_outputs_count_per_tenant() -> None:
    share = FairShare()
    slots = np.array([share.join("a"), share.join("b"), share.join("b")])
    share.charge_outputs(slots, np.array([0, 1, 2]))
    assert share.served[slots].tolist() == [2, 4, 4]


def test_the_longest_idle_tenants_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    share = FairShare()
    monkeypatch.setattr(waiting_queue, "MAX_IDLE_TENANTS", 3)
    stays = share.join("stays")
    for i in range(100):
        share.leave(share.join(f"t{i}"))
    assert len(share._names) <= 5
    check_share(share, {stays: 1})


def test_a_tenant_joins_at_the_lowest_counter_of_any_history() -> None:
    """The lowest counter is found without reading the counters of all active tenants."""
    rng, share = np.random.default_rng(5), FairShare()
    live: list[int] = []
    floor = 0
    for i in range(3000):
        choice = rng.random()
        if live and choice < 0.4:
            share.charge_prompt(live[rng.integers(len(live))], int(rng.integers(1, 50)))
        elif live and choice < 0.7:
            slot = live.pop(rng.integers(len(live)))
            share.leave(slot)
            floor = floor if live else max(floor, int(share.served[slot]))
        else:
            tenant_id = str(rng.integers(60))
            is_new = share.slot_of(tenant_id) not in live
            before = max(floor, min((int(share.served[slot]) for slot in live), default=0))
            known = share.slot_of(tenant_id)
            own = 0 if known is None else int(share.served[known])
            slot = share.join(tenant_id)
            live.append(slot)
            if is_new:
                floor = before
                assert share.served[slot] == max(own, floor), i
