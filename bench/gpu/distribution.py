"""How evenly the programs of a decode step's attention work, computed without a GPU.

The work list is the engine's; a unit (a split of a row and KV head) takes time for its tiles of keys and a fixed
part. Programs take units from a counter, so each goes to the program that is free first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from bench.gpu.checks.references import work_items
from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.attention.tiles import DECODE_TILES, Processors, splits_for

FIXED_KEYS = 48  # a unit's start and end take as long as so many keys: a query, a block table, a result
MERGE_KEYS = 24  # storing the result of a split, and merging it later


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times in units of one key of one KV head."""

    longest: float  # of a program
    mean: float
    needed: float  # of the keys alone, spread evenly

    @property
    def longest_to_mean(self) -> float:
        return self.longest / self.mean

    @property
    def overhead(self) -> float:
        """The longest program / the keys alone."""
        return self.longest / self.needed


def distribute(lengths: list[int], shape: HeadShape, processors: Processors, per_processor: int = 3) -> Distribution:
    """A decode step of rows with these numbers of keys."""
    num_programs = processors.count * per_processor
    items, split = work_items(
        list(range(len(lengths) + 1)), [length - 1 for length in lengths],
        queries_per_tile=1, min_split=DECODE_TILES.min_split, splits=splits_for(shape, processors), min_queries=1,
    )  # fmt: skip
    times = [0.0] * num_programs
    for row, _, part, _ in items:
        keys = min(split, lengths[row] - part * split)
        unit = -(-keys // DECODE_TILES.block_n) * DECODE_TILES.block_n + FIXED_KEYS
        unit += MERGE_KEYS if lengths[row] > split else 0
        for _ in range(shape.num_kv_heads):
            heapq.heappush(times, heapq.heappop(times) + unit)
    return Distribution(max(times), sum(times) / num_programs, sum(lengths) * shape.num_kv_heads / num_programs)
