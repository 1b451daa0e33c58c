"""Tile sizes, by use. A table and no autotuning: that needs a device, cannot run in a capture, and differs by machine.

Registers and shared memory on sm_90 of each are printed by `python -m worker_svc.engine.gpu.aot`.
"""

from __future__ import annotations

from dataclasses import replace

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.kernels.attention import Tiles, group_lines

# Keys lie behind a table that is read first, which takes Triton a stage of its own: 3 stages are one tile on its way
# while one is computed, 4 are no more, 5 are two.
# One query a row: bound by memory, so many small programs; a split of 512 keeps all of them busy at any batch.
DECODE_TILES = Tiles(block_m=16, block_n=64, split=512, num_warps=4, num_stages=3, one_loop=True)
# Chunks of prompts: bound by the tensor cores.
PREFILL_TILES = Tiles(block_m=128, block_n=64, split=0, num_warps=8, num_stages=3)
# Exact mode: the same instructions for a single query as for a prompt, keys in one order.
EXACT_TILES = Tiles(block_m=64, block_n=64, split=0, num_warps=4, num_stages=3, one_loop=True)

WIDE_HEAD = 128
WIDE_NUMBER = 4  # bytes; tensor cores do not multiply float32, so a tile's numbers all lie in registers


def for_heads(tiles: Tiles, shape: HeadShape, number_bytes: int = 2) -> Tiles:
    """The same; of wide heads or numbers fewer lines, spread over more warps, and fewer tiles on their way.

    A tile holds all query heads that share a key-value head."""
    most, is_wide = tiles.block_m, shape.head_dim > WIDE_HEAD
    if number_bytes == WIDE_NUMBER:
        most = 32 if is_wide else 64
        tiles = replace(tiles, block_n=32, num_warps=8, num_stages=2)
    elif is_wide:
        most = 64
        tiles = replace(tiles, num_warps=8 if tiles.block_m >= 64 else 4, num_stages=2)
    return replace(tiles, block_m=max(min(tiles.block_m, most), group_lines(shape)))


PROGRAMS_PER_SM = 3  # as many as registers let run at once
