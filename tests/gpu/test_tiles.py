"""Tile sizes from the environment."""

from __future__ import annotations

import json

import pytest

from worker_svc.engine.gpu.kernels.attention import Tiles
from worker_svc.engine.gpu.tiles import TILES_VARIABLE, measured

TILES = Tiles(block_m=16, block_n=64, min_split=64, num_warps=4, num_stages=5)


def test_fields_of_a_use_replace_those_of_the_table(monkeypatch):
    monkeypatch.setenv(TILES_VARIABLE, json.dumps({"decode": {"num_stages": 3, "block_n": 32}}))
    assert measured("decode", TILES) == Tiles(block_m=16, block_n=32, min_split=64, num_warps=4, num_stages=3)
    assert measured("prefill", TILES) == TILES


@pytest.mark.parametrize("text", ["{", "[]", '{"decode": {"stages": 3}}', '{"decode": 3}'])
def test_other_values_are_refused(monkeypatch, text):
    monkeypatch.setenv(TILES_VARIABLE, text)
    with pytest.raises(ValueError, match="QUIRE_ATTENTION_TILES must be JSON such as"):
        measured("decode", TILES)
