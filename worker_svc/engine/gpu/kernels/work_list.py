"""The work list of attention, built on the device so that each replay of a CUDA graph builds its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.engine.gpu.kernels.attention import Queries, WorkList

MAX_QUERIES = 2**31 - 1
MIN_ROWS = 256  # rows that each program reads: few distinct sizes mean few kernels to compile before the first step


@triton.jit(do_not_specialize=["min_queries", "max_queries"])
def work_list_kernel(
    num_rows_ptr, start_ptr, context_ptr, item_ptr, count_ptr, min_queries, max_queries,
    QUERIES: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch_row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    start = tl.load(start_ptr + row, mask=is_row, other=0)
    num_queries = tl.load(start_ptr + row + 1, mask=is_row, other=0) - start
    num_keys = tl.load(context_ptr + row, mask=is_row, other=0) + num_queries
    is_row = is_row & (num_queries >= min_queries) & (num_queries <= max_queries)
    num_tiles = (num_queries + QUERIES - 1) // QUERIES
    num_splits = num_tiles * 0 + 1
    if SPLIT > 0:
        num_splits = (num_keys + SPLIT - 1) // SPLIT
    num_items = tl.where(is_row, num_tiles * num_splits, 0)
    if batch_row == 0:
        tl.store(count_ptr, tl.sum(num_items, 0))
    own_tiles = tl.sum(tl.where(row == batch_row, num_tiles, 0), 0)
    own_items = tl.sum(tl.where(row == batch_row, num_items, 0), 0)
    first_item = item_ptr + tl.sum(tl.where(row < batch_row, num_items, 0), 0) * 4
    for begin in range(0, own_items, BLOCK):
        item = begin + tl.arange(0, BLOCK)
        is_item = item < own_items
        # The last tile of a prompt has the most keys, so it comes first.
        tile = own_tiles - 1 - item % tl.maximum(own_tiles, 1)
        tl.store(first_item + item * 4, item * 0 + batch_row, mask=is_item)
        tl.store(first_item + item * 4 + 1, tile * QUERIES, mask=is_item)
        tl.store(first_item + item * 4 + 2, item // tl.maximum(own_tiles, 1), mask=is_item)


def make_work_list(
    queries: Queries,
    num_rows: torch.Tensor,
    work: WorkList,
    *,
    queries_per_tile: int,
    split: int,
    min_queries: int = 1,
    max_queries: int = MAX_QUERIES,
) -> None:
    """Fills `work` with every tile and split of the rows that have min_queries to max_queries queries."""
    bound = len(queries.rows)
    work_list_kernel[(bound,)](
        num_rows, queries.starts, queries.contexts, work.items, work.count, min_queries, max_queries,
        QUERIES=queries_per_tile, SPLIT=split, ROWS=max(MIN_ROWS, triton.next_power_of_2(bound)), BLOCK=64, num_warps=4,
    )  # fmt: skip


def reference(
    starts: list[int], contexts: list[int], *, queries_per_tile: int, split: int, min_queries: int, max_queries: int
) -> list[tuple[int, int, int]]:
    """The work items in order."""
    items = []
    for row, context in enumerate(contexts):
        count = starts[row + 1] - starts[row]
        if not min_queries <= count <= max_queries:
            continue
        num_splits = -(-(context + count) // split) if split else 1
        tiles = range(0, count, queries_per_tile)
        items += [(row, first, part) for part in range(num_splits) for first in reversed(tiles)]
    return items
