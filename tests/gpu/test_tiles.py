"""Tile sizes from the environment."""

from __future__ import annotations

import json

import pytest

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.attention.tiles import PREFILL_TILES, TILES_VARIABLE, for_heads, measured
from worker_svc.engine.gpu.kernels.attention import AttentionTiles

TILES = AttentionTiles(block_m=16, block_n=64, min_split=64, num_warps=4, num_stages=5)


def test_fields_of_a_use_replace_those_of_the_table(monkeypatch):
    monkeypatch.setenv(TILES_VARIABLE, json.dumps({"decode": {"num_stages": 3, "block_n": 32}}))
    assert measured("decode", TILES) == AttentionTiles(block_m=16, block_n=32, min_split=64, num_warps=4, num_stages=3)
    assert measured("prefill", TILES) == TILES


@pytest.mark.parametrize("text", ["{", "[]", '{"decode": {"stages": 3}}', '{"decode": 3}'])
def test_other_values_are_refused(monkeypatch, text):
    monkeypatch.setenv(TILES_VARIABLE, text)
    with pytest.raises(ValueError, match="QUIRE_ATTENTION_TILES must be JSON such as"):
        measured("decode", TILES)


@pytest.mark.parametrize(("head_dim", "has_one_loop"), [(64, False), (128, False), (80, True), (96, True), (112, True)])
def test_heads_of_odd_sizes_have_one_loop(head_dim, has_one_loop):
    """With two, attention of prompts keeps registers in memory on sm_80 (scripts/kernels counts them)."""
    tiles = for_heads(PREFILL_TILES, HeadShape(32, 8, head_dim))
    assert tiles.one_loop == has_one_loop
