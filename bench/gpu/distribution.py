"""How evenly the programs of a decode step's attention work, computed without a GPU.

The work list is the engine's; a unit (a split of a row and KV head) takes time for its tiles of keys and a fixed
part. Programs take units from a counter, so each goes to the program that is free first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from bench.gpu.checks.references import work_items
from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.attention.tiles import DECODE_TILES, EXACT_TILES, Processors, fixed_splits_for, splits_for
from worker_svc.engine.gpu.kernels.attention import WHOLE

FIXED_KEYS = 48  # a unit's start and end take as long as so many keys: a query, a block table, a result
STORE_KEYS = 16  # storing the result of a split, and announcing it


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in units of one key of one KV head."""

    longest: float  # of a program
    mean: float
    needed: float  # of the keys alone, spread evenly
    merged: int  # most splits that one program merges at the end, one after the other

    @property
    def longest_to_mean(self) -> float:
        return self.longest / self.mean

    @property
    def overhead(self) -> float:
        """The longest program / the keys alone."""
        return self.longest / self.needed


def distribute(
    lengths: list[int], shape: HeadShape, processors: Processors, per_processor: int = 3, *, is_exact: bool = False
) -> Distribution:
    """A decode step of rows with these numbers of keys. Exact mode has fixed splits, of long rows only."""
    tiles = EXACT_TILES if is_exact else DECODE_TILES
    num_programs = processors.count * per_processor
    items, split = work_items(
        list(range(len(lengths) + 1)), [length - 1 for length in lengths],
        queries_per_tile=1, min_split=tiles.min_split, fixed_split=tiles.fixed_split, min_queries=1,
        splits=(fixed_splits_for if is_exact else splits_for)(shape, processors),
    )  # fmt: skip
    times, merged = [0.0] * num_programs, 0
    for row, _, part, first_part in items:
        is_whole = first_part == WHOLE.value
        keys = lengths[row] if is_whole else min(split, lengths[row] - part * split)
        unit = -(-keys // tiles.block_n) * tiles.block_n + FIXED_KEYS
        if not is_whole and lengths[row] > split:
            unit += STORE_KEYS
            merged = max(merged, -(-lengths[row] // split))
        for _ in range(shape.num_kv_heads):
            heapq.heappush(times, heapq.heappop(times) + unit)
    needed = sum(lengths) * shape.num_kv_heads / num_programs
    return Distribution(max(times), sum(times) / num_programs, needed, merged)
