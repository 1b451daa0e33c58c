"""Tile sizes of attention, as a table. Autotuning needs a GPU, cannot run in a graph capture, and differs between GPUs.

`python -m bench.gpu.aot` prints registers and shared memory of each on sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.kernels.attention import AttentionTiles, group_lines
from worker_svc.engine.gpu.kernels.work_list import MOST_OF_ROW, Splits

# Keys are addressed through the block table, whose load takes a pipeline stage of its own. With 5 stages, the loop
# waits for loads that it issued two tiles earlier; with 3, for those that it has just issued (`aot` reports the waits).
# One query per row: bound by memory, so many small programs.
DECODE_TILES = AttentionTiles(block_m=16, block_n=32, min_split=64, num_warps=2, num_stages=7, one_loop=True)
# Chunks of prompts: bound by tensor cores.
PREFILL_TILES = AttentionTiles(block_m=128, block_n=64, min_split=0, num_warps=8, num_stages=5)
# Exact mode: the same instructions for one query and for a prompt, keys in one order. Always the same, because they
# affect the bits of results.
EXACT_TILES = AttentionTiles(
    block_m=64, block_n=64, min_split=0, num_warps=4, num_stages=5, one_loop=True, fixed_split=512
)

WIDE_HEAD = 128
WIDE_KEYS = 32  # of a tile: two more tiles can be loaded ahead in the memory that tiles of 64 keys take
SMALL_SHARED = 104 << 10  # bytes of a processor; sm_86 and sm_89 have 100 KiB
WIDE_NUMBER = 4  # bytes; tensor cores do not multiply float32, so registers must hold whole tiles


def for_heads(tiles: AttentionTiles, shape: HeadShape, number_bytes: int = 2, shared_bytes: int = 0) -> AttentionTiles:
    """The tiles for these heads: wide heads and float32 get fewer lines and keys, more warps, and float32 fewer stages.
    Heads of odd sizes get one loop: with their masks, the registers of a second one do not suffice on sm_80.

    A tile holds all query heads that share a KV head. `shared_bytes` are those of a processor, 0 if it has no limit.
    """
    most, is_wide = tiles.block_m, shape.head_dim > WIDE_HEAD
    if number_bytes == WIDE_NUMBER:
        most = 32 if is_wide else 64
        tiles = replace(tiles, block_n=32, num_warps=8, num_stages=2)
    elif is_wide:
        most = 64
        is_large = tiles.block_m >= most
        tiles = replace(tiles, block_n=WIDE_KEYS, num_warps=8 if is_large else 4)
        if is_large and 0 < shared_bytes < SMALL_SHARED:
            tiles = replace(tiles, num_stages=4)
    if shape.head_dim & (shape.head_dim - 1):
        tiles = replace(tiles, one_loop=True)
    return replace(tiles, block_m=max(min(tiles.block_m, most), group_lines(shape)))


MAX_PROGRAMS_PER_PROCESSOR = 4
MAX_SPLITS = 2048  # of a step, beside one per row: bounds the memory for their results
# A split costs about as much as SPLIT_KEYS keys (its start, its end, merging). Longer splits cost less in all, but
# leave programs idle at the end; with this constant both losses are about equal.
SPLIT_KEYS = 288
UNITS_OF_ROW = 256  # splits x KV heads of a long row: more only take longer to merge
LEAST_OF_ROW = 32  # splits that a row may have at least
INTERPRETER_PROCESSORS = 4
WARP_LANES = 32
REGISTER_UNIT = 256  # registers are given to warps in units
REGISTERS = 65536  # of a processor, on every architecture since sm_50
RESERVED_SHARED = 1024  # bytes of shared memory that the driver takes for each program


@dataclass(frozen=True, slots=True)
class Processors:
    """The multiprocessors of a GPU. The interpreter has processors that run one program each."""

    count: int
    registers: int = 0
    shared_bytes: int = 0
    threads: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Processors:
        if device.type != "cuda":
            return cls(INTERPRETER_PROCESSORS)
        found = torch.cuda.get_device_properties(device)
        return cls(
            found.multi_processor_count,
            REGISTERS,
            found.shared_memory_per_multiprocessor,
            found.max_threads_per_multi_processor,
        )

    def num_programs(self, compiled: Any, num_warps: int) -> int:
        """Programs of a compiled kernel that run at once on all processors."""
        if not self.registers:
            return self.count
        return self.count * self.programs_per_processor(compiled.n_regs, compiled.metadata.shared, num_warps)

    def programs_per_processor(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """As many as registers, shared memory and threads allow, but not more than are useful."""
        by_warp = -(-registers * WARP_LANES // REGISTER_UNIT) * REGISTER_UNIT
        limits = (
            self.registers // (by_warp * num_warps),
            self.shared_bytes // (shared_bytes + RESERVED_SHARED),
            self.threads // (WARP_LANES * num_warps),
            MAX_PROGRAMS_PER_PROCESSOR,
        )
        return max(1, min(limits))


def fixed_splits_for(shape: HeadShape, processors: Processors, per_processor: int = 2) -> Splits:
    """Which rows of exact mode are divided: those that alone would take a program longer than a quarter of a step whose
    tiles are evenly divided among all programs. This affects no bit of a result."""
    return Splits(shape.num_kv_heads / (4 * per_processor * processors.count), MAX_SPLITS)


def splits_for(shape: HeadShape, processors: Processors, per_processor: int = 3) -> Splits:
    """How decode steps of these heads are divided among all programs."""
    most_of_row = min(max(UNITS_OF_ROW // shape.num_kv_heads, LEAST_OF_ROW), MOST_OF_ROW)
    return Splits(SPLIT_KEYS * shape.num_kv_heads / (per_processor * processors.count), MAX_SPLITS, most_of_row)
