"""Attention windows: blocks that no later token attends to are freed, counted out of admission, and shared."""

from __future__ import annotations

import pytest

from request_fields.sizes import blocks_before
from scheduler_svc.core.errors import NeverFitsError, WorkerMismatchError
from scheduler_svc.core.messages import WorkerCapacity
from tests.builders import make_capacity, make_group, make_scheduler

WINDOW = 10  # with blocks of 4 tokens: 3 blocks before the one that a token is in


def window_capacity(worker_id: str = "w0", **sizes: int) -> WorkerCapacity:
    return make_capacity(worker_id, **{"attention_window": WINDOW, "block_size": 4, **sizes})


@pytest.mark.parametrize(
    ("window", "block_size", "expected"), [(1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2), (90, 16, 6)]
)
def test_blocks_before_the_block_of_a_token(window: int, block_size: int, expected: int) -> None:
    assert blocks_before(window, block_size) == expected
    positions = range(window, 200)
    needed = [p // block_size - (p - window + 1) // block_size for p in positions]
    assert max(needed) == expected


def test_a_pool_without_room_for_the_window_refuses_a_longer_sequence() -> None:
    scheduler = make_scheduler(window_capacity(num_blocks=3))
    with pytest.raises(NeverFitsError, match="the largest KV pool"):
        scheduler.add_group(make_group(5, max_tokens=9), 0.0)
    scheduler.add_group(make_group(5, max_tokens=8), 0.0)


def test_workers_with_different_windows_do_not_mix() -> None:
    scheduler = make_scheduler(window_capacity())
    with pytest.raises(WorkerMismatchError, match="attention_window 12, but worker w0 has 10"):
        scheduler.add_worker(window_capacity("w1", attention_window=12))
