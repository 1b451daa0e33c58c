"""Answers of GetPools are made at most five times per second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from scheduler_svc.status import MIN_INTERVAL_S, PoolSnapshots
from tests.builders import make_capacity, make_group, make_scheduler


def test_an_answer_is_kept_for_a_moment() -> None:
    core = make_scheduler(make_capacity(max_num_seqs=1))
    for name in ("a", "b"):
        core.add_group(make_group(10, name), 4.0)
    core.schedule(4.0)
    core.first_workers = Mock(wraps=core.first_workers)  # type: ignore[method-assign]
    now = 5.0
    step_loop: Any = SimpleNamespace(core=core)
    snapshots = PoolSnapshots(step_loop, lambda: now)
    first = snapshots.newest()
    assert (first.pools[0].worker_id, len(first.pools[0].states), len(first.pools[0].owners)) == ("w0", 64, 4 * 64)
    assert [(row.request_id, row.num_tokens, row.num_blocks) for row in first.pools[0].rows] == [("a", 10, 3)]
    assert [(waiting.request_id, waiting.age_s) for waiting in first.waiting] == [("b", 1.0)]
    now = 5.0 + MIN_INTERVAL_S / 2
    assert snapshots.newest() is first
    now = 5.0 + MIN_INTERVAL_S
    assert snapshots.newest() is not first
    assert core.first_workers.call_count == 2
    assert [pool.worker_id for pool in snapshots.newest(["w0", "unknown"]).pools] == ["w0"]
    assert not snapshots.newest(["unknown"]).pools
