"""Tile sizes of attention, as a table. Autotuning needs a GPU, cannot run in a graph capture, and differs between GPUs.

`python -m worker_svc.engine.gpu.aot` prints registers and shared memory of each on sm_90.
"""

from __future__ import annotations

from dataclasses import replace

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.kernels.attention import Tiles, group_lines

# Keys are addressed through the block table, whose load takes a pipeline stage of its own: 3 and 4 stages keep one tile
# in flight while another is computed, 5 stages keep two.
# One query per row: bound by memory, so many small programs. Splits of 512 keys keep them busy at any batch size.
DECODE_TILES = Tiles(block_m=16, block_n=64, split=512, num_warps=4, num_stages=3, one_loop=True)
# Chunks of prompts: bound by tensor cores.
PREFILL_TILES = Tiles(block_m=128, block_n=64, split=0, num_warps=8, num_stages=3)
# Exact mode: the same instructions for one query and for a prompt, keys in one order.
EXACT_TILES = Tiles(block_m=64, block_n=64, split=0, num_warps=4, num_stages=3, one_loop=True)

WIDE_HEAD = 128
WIDE_NUMBER = 4  # bytes; tensor cores do not multiply float32, so registers must hold whole tiles


def for_heads(tiles: Tiles, shape: HeadShape, number_bytes: int = 2) -> Tiles:
    """The tiles for these heads: wide heads and float32 get fewer lines, more warps and fewer stages.

    A tile holds all query heads that share a KV head.
    """
    most, is_wide = tiles.block_m, shape.head_dim > WIDE_HEAD
    if number_bytes == WIDE_NUMBER:
        most = 32 if is_wide else 64
        tiles = replace(tiles, block_n=32, num_warps=8, num_stages=2)
    elif is_wide:
        most = 64
        tiles = replace(tiles, num_warps=8 if tiles.block_m >= 64 else 4, num_stages=2)
    return replace(tiles, block_m=max(min(tiles.block_m, most), group_lines(shape)))


PROGRAMS_PER_SM = 3  # limited by registers
