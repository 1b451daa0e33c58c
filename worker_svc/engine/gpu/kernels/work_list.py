"""The work list of attention, built on the device so that each replay of a CUDA graph builds its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.engine.gpu.kernels.attention import WHOLE, AttentionTiles, Queries, WorkList
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

MAX_QUERIES = NO_WINDOW = 2**31 - 1
MOST_OF_ROW = 128
MIN_ROWS = 256  # rows that each program reads: few distinct sizes mean few kernels to compile before the first step


@dataclass(frozen=True, slots=True)
class Splits:
    """How a step divides keys: a split has sqrt(keys of all rows x factor) keys, or more if there would be more than
    `most` parts (splits x queries) beside one per query, or more than `most_of_row`, which one program merges.

    With fixed splits, a row with more keys than `factor` x those of all tiles is divided, if its splits are among the
    first `most`.
    """

    factor: float
    most: int
    most_of_row: int = MOST_OF_ROW  # not with fixed splits

    def keys(self, total: int, longest: int, min_split: int, of_queries: int | None = None) -> int:
        """Keys of a split, a multiple of min_split. `of_queries`: those of all queries, if rows have several."""
        wanted = int(np.ceil(np.sqrt(np.float32(total) * np.float32(self.factor))))
        least = max(-(-(of_queries or total) // self.most), -(-longest // self.most_of_row))
        return -(-max(wanted, least, 1) // min_split) * min_split


@triton.jit(
    do_not_specialize=[
        "min_queries",
        "max_queries",
        "most_splits",
        "most_of_row",
        "window",
        "num_launches",
    ]
)
def work_list_kernel(
    num_rows_ptr, start_ptr, context_ptr, item_ptr, size_ptr, ticket_ptr, min_queries, max_queries, most_splits,
    most_of_row, factor, window, num_launches,
    QUERIES: tl.constexpr, MIN_SPLIT: tl.constexpr, FIXED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    batch_row = tl.program_id(0)
    if batch_row == 0:
        for begin in range(0, num_launches, BLOCK):
            launch = begin + tl.arange(0, BLOCK)
            tl.store(ticket_ptr + launch * 4, launch * 0, mask=launch < num_launches)
    row = tl.arange(0, ROWS)
    is_row = row < tl.load(num_rows_ptr)
    start = tl.load(start_ptr + row, mask=is_row, other=0)
    num_queries = tl.load(start_ptr + row + 1, mask=is_row, other=0) - start
    is_row = is_row & (num_queries >= min_queries) & (num_queries <= max_queries)
    context = tl.load(context_ptr + row, mask=is_row, other=0)
    num_keys = tl.where(is_row, context + num_queries, 0)
    is_own = row == batch_row
    if MIN_SPLIT == 0:
        num_tiles = tl.where(is_row, (num_queries + QUERIES - 1) // QUERIES, 0)
        num_splits = row * 0
        if FIXED > 0:
            first_key = tl.maximum(context + 1 - window, 0) // FIXED * FIXED
            length = tl.where(is_row, num_keys - first_key, 0)
            work = tl.sum(num_tiles.to(tl.float32) * length.to(tl.float32), 0)
            is_long = (num_queries <= QUERIES) & (length > FIXED) & (length.to(tl.float32) > work * factor)
            num_splits = tl.where(is_long, (length + FIXED - 1) // FIXED, 0)
            num_splits = tl.where(tl.cumsum(num_splits * num_queries, 0) <= most_splits, num_splits, 0)
            num_tiles = tl.where(num_splits > 0, 0, num_tiles)
        own_tiles = tl.sum(tl.where(is_own, num_tiles, 0), 0)
        own_keys = tl.sum(tl.where(is_own, num_keys, 0), 0)
        is_before = (num_keys > own_keys) | ((num_keys == own_keys) & (row < batch_row))
        first_item = item_ptr + tl.sum(tl.where(is_before, num_tiles, 0), 0) * 4
        for begin in range(0, own_tiles, BLOCK):
            item = begin + tl.arange(0, BLOCK)
            is_item = item < own_tiles
            tl.store(first_item + item * 4, item * 0 + batch_row, mask=is_item)
            # The last tile of a prompt has the most keys.
            tl.store(first_item + item * 4 + 1, (own_tiles - 1 - item) * QUERIES, mask=is_item)
            tl.store(first_item + item * 4 + 2, item * 0, mask=is_item)
            tl.store(first_item + item * 4 + 3, item * 0 + WHOLE, mask=is_item)
        if FIXED > 0:  # splits are shorter: after all others
            own_splits = tl.sum(tl.where(is_own, num_splits, 0), 0)
            earlier_splits = tl.where(row < batch_row, num_splits, 0)
            first_part = tl.sum(earlier_splits * num_queries, 0)
            first_item = item_ptr + (tl.sum(num_tiles, 0) + tl.sum(earlier_splits, 0)) * 4
            for begin in range(0, own_splits, BLOCK):
                item = begin + tl.arange(0, BLOCK)
                is_item = item < own_splits
                tl.store(first_item + item * 4, item * 0 + batch_row, mask=is_item)
                tl.store(first_item + item * 4 + 1, item * 0, mask=is_item)
                tl.store(first_item + item * 4 + 2, item, mask=is_item)
                tl.store(first_item + item * 4 + 3, item * 0 + first_part, mask=is_item)
        if batch_row == 0:
            tl.store(size_ptr, tl.sum(num_tiles, 0) + tl.sum(num_splits, 0))
            tl.store(size_ptr + 1, FIXED)
    else:
        # Splits begin at the first one that the window reaches.
        first_key = tl.maximum(context + 1 - window, 0) // MIN_SPLIT * MIN_SPLIT
        num_keys = tl.where(is_row, num_keys - first_key, 0)
        total = tl.sum(num_keys, 0)
        least = (tl.sum(num_keys * num_queries, 0) + most_splits - 1) // most_splits
        least = tl.maximum(least, (tl.max(num_keys, 0) + most_of_row - 1) // most_of_row)
        wanted = tl.ceil(tl.sqrt_rn(total.to(tl.float32) * factor)).to(tl.int32)
        split = (tl.maximum(tl.maximum(wanted, least), 1) + MIN_SPLIT - 1) // MIN_SPLIT * MIN_SPLIT
        num_full = num_keys // split
        tail = num_keys - num_full * split
        own_full = tl.sum(tl.where(is_own, num_full, 0), 0)
        own_tail = tl.sum(tl.where(is_own, tail, 0), 0)
        is_earlier = row < batch_row
        first_part = tl.sum(tl.where(is_earlier, (num_full + (tail > 0).to(tl.int32)) * num_queries, 0), 0)
        first_item = item_ptr + tl.sum(tl.where(is_earlier, num_full, 0), 0) * 4
        for begin in range(0, own_full, BLOCK):
            item = begin + tl.arange(0, BLOCK)
            is_item = item < own_full
            tl.store(first_item + item * 4, item * 0 + batch_row, mask=is_item)
            tl.store(first_item + item * 4 + 1, item * 0, mask=is_item)
            tl.store(first_item + item * 4 + 2, item, mask=is_item)
            tl.store(first_item + item * 4 + 3, item * 0 + first_part, mask=is_item)
        all_full = tl.sum(num_full, 0)
        if own_tail > 0:  # the last split of a row is shorter: after all full ones, the longest first
            is_before = (tail > own_tail) | ((tail == own_tail) & is_earlier)
            place = item_ptr + (all_full + tl.sum(is_before.to(tl.int32), 0)) * 4
            tl.store(place, batch_row)
            tl.store(place + 1, 0)
            tl.store(place + 2, own_full)
            tl.store(place + 3, first_part)
        if batch_row == 0:
            tl.store(size_ptr, all_full + tl.sum((tail > 0).to(tl.int32), 0))
            tl.store(size_ptr + 1, split)


def make_work_list(
    queries: Queries,
    num_rows: torch.Tensor,
    work: WorkList,
    tiles: AttentionTiles,
    *,
    queries_per_tile: int,
    splits: Splits,
    min_queries: int = 1,
    window: int | None = None,
) -> None:
    """Fills `work` with the tiles of the rows that have at least min_queries queries.

    If tiles.min_split is set: with the splits of the rows whose queries fit one tile, without keys before `window`.
    Their number of keys is a multiple of min_split. If tiles.fixed_split is set: also with those splits, of long rows.
    """
    bound = len(queries.rows)
    max_queries = queries_per_tile if tiles.min_split else MAX_QUERIES
    work_list_kernel[(bound,)](
        num_rows, queries.starts, queries.contexts, work.items, work.sizes, work.tickets, min_queries, max_queries,
        splits.most, splits.most_of_row, splits.factor, window or NO_WINDOW, len(work.tickets),
        QUERIES=queries_per_tile, MIN_SPLIT=tiles.min_split, FIXED=tiles.fixed_split,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(bound)), BLOCK=64, num_warps=4, **dependent(),
    )  # fmt: skip
