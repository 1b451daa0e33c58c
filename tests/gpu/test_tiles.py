"""Tile sizes by the size of heads."""

from __future__ import annotations

import pytest

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.attention.tiles import PREFILL_TILES, for_heads


@pytest.mark.parametrize(("head_dim", "has_one_loop"), [(64, False), (128, False), (80, True), (96, True), (112, True)])
def test_heads_of_odd_sizes_have_one_loop(head_dim, has_one_loop):
    """With two, attention of prompts keeps registers in memory on sm_80 (scripts/kernels counts them)."""
    tiles = for_heads(PREFILL_TILES, HeadShape(32, 8, head_dim))
    assert tiles.one_loop == has_one_loop
