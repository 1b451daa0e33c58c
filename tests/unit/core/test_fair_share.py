"""FairShare: the tenants' counters of served tokens."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.queue import fair_share
from scheduler_svc.core.queue.fair_share import FairShare


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
    monkeypatch.setattr(fair_share, "MAX_IDLE_TENANTS", 3)
    stays = share.join("stays")
    for i in range(100):
        share.leave(share.join(f"t{i}"))
    assert len(share._names) <= 5
    share.check_invariants({stays: 1})
