"""Answers of GetPools are made at most five times per second."""

from __future__ import annotations

from typing import Any

from scheduler_svc.core.stats import OpenSequence
from scheduler_svc.snapshots import MIN_INTERVAL_S, Snapshots
from tests.builders import make_capacity, make_group, make_scheduler


class Loop:
    """A step loop that counts how often it is read."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler(make_capacity(max_num_seqs=1))
        self.num_reads = 0

    def pool_snapshots(self) -> Any:
        self.num_reads += 1
        return self.scheduler.pool_snapshots()

    def waiting_snapshot(self) -> list[OpenSequence]:
        return self.scheduler.waiting_snapshot(5.0)


def test_an_answer_is_kept_for_a_moment() -> None:
    loop: Any = Loop()
    for name in ("a", "b"):
        loop.scheduler.add_group(make_group(10, name), 4.0)
    loop.scheduler.schedule(4.0)
    now = 5.0
    snapshots = Snapshots(loop, lambda: now)
    first = snapshots.newest()
    assert (first.pools[0].worker_id, len(first.pools[0].states), len(first.pools[0].owners)) == ("w0", 64, 4 * 64)
    assert [(row.request_id, row.num_tokens, row.num_blocks) for row in first.pools[0].rows] == [("a", 10, 3)]
    assert [(waiting.request_id, waiting.age_s) for waiting in first.waiting] == [("b", 1.0)]
    now = 5.0 + MIN_INTERVAL_S / 2
    assert snapshots.newest() is first
    now = 5.0 + MIN_INTERVAL_S
    assert snapshots.newest() is not first
    assert loop.num_reads == 2
