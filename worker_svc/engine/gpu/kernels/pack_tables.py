"""The blocks of all rows of a step in one list, for libraries that read them so."""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels.attention import Queries
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

BLOCK = 256
MIN_ROWS = 256  # rows that each program reads, as in work_list.py


@triton.jit(do_not_specialize=["num_zeros"])
def pack_tables_kernel(
    num_rows_ptr, row_ptr, start_ptr, context_ptr, table_ptr, table_stride, out_ptr, num_zeros,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    batch_row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    num_keys = tl.load(start_ptr + row + 1, mask=is_row, other=0) - tl.load(start_ptr + row, mask=is_row, other=0)
    num_keys += tl.load(context_ptr + row, mask=is_row, other=0)
    num_blocks = tl.where(is_row, (num_keys + PAGE - 1) // PAGE, 0)
    out = out_ptr + tl.sum(tl.where(row < batch_row, num_blocks, 0), 0)
    own_blocks = tl.sum(tl.where(row == batch_row, num_blocks, 0), 0)
    if batch_row < num_rows:
        table = table_ptr + tl.load(row_ptr + batch_row).to(tl.int64) * table_stride
        for begin in range(0, own_blocks, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            is_block = index < own_blocks
            tl.store(out + index, tl.load(table + index, mask=is_block, other=0), mask=is_block)
    elif batch_row == num_rows:
        for begin in range(0, num_zeros, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            tl.store(out + index, index * 0, mask=index < num_zeros)


def pack_tables(queries: Queries, num_rows: torch.Tensor, out: torch.Tensor, num_zeros: int, block_size: int) -> None:
    """Writes the blocks of the first `num_rows` rows to `out`, row by row without gaps, and zeros behind them."""
    bound = len(queries.rows)
    pack_tables_kernel[(bound + 1,)](
        num_rows, queries.rows, queries.starts, queries.contexts, queries.tables, queries.tables.stride(0), out,
        num_zeros, PAGE=block_size, ROWS=max(MIN_ROWS, triton.next_power_of_2(bound)), BLOCK=BLOCK, num_warps=4,
        **dependent(),
    )  # fmt: skip
