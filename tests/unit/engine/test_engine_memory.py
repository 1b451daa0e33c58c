"""Memory in huge pages (worker_svc/engine/memory.py)."""

from __future__ import annotations

import pytest
import torch

from worker_svc.engine.memory import HUGE_PAGE, lazy_zeros


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 4097])
def test_memory_is_zero_writable_and_as_long_as_asked(num_bytes: int) -> None:
    memory = lazy_zeros(num_bytes)
    assert memory.dtype is torch.uint8
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_large_memory_begins_with_a_huge_page() -> None:
    """Otherwise the system could back its first part with small pages only."""
    assert lazy_zeros(HUGE_PAGE).data_ptr() % HUGE_PAGE == 0


def test_memory_outlives_the_mapping_object() -> None:
    views = [lazy_zeros(HUGE_PAGE).fill_(value) for value in range(8)]
    assert [int(view.sum()) for view in views] == [value * HUGE_PAGE for value in range(8)]
