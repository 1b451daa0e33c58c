"""Adapters of linear layers: y += b(a(x)), where each row of x has an adapter of its own, or none.

    shrink  a(x), in parts of the inputs    one program per tile of rows, ranks and part
    expand  b of the sum of these parts     one program per tile of rows and outputs; adds to y

A tile has rows of one adapter (route.py groups them), so one launch serves all adapters of a step, as in Punica
(https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285). The matrices of an adapter are in a
slot of one buffer, and a table names their ranks and places. Both have fixed addresses, so CUDA graphs serve all
adapters.

A row's additions are in one order for every batch: inputs in parts whose number depends on the layer alone, these parts
in order, ranks in order. a(x) is rounded to the dtype of y. Rows without adapter are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.linear import Tile
from worker_svc.engine.gpu.kernels.route import ExpertTiles

MAX_PARTS = 3  # of a fused layer: q, k, v
# A line of the table: ranks of all parts, place of a; then of each part its first rank, ranks, and place of b
LINE = 2 + 3 * MAX_PARTS
ALIGNMENT = 16  # numbers; places of matrices are multiples, so that loads are vectors
RANKS = 4  # the first rank of a part is a multiple, for the same reason
BLOCK_R = 32  # ranks
BLOCK_N = 128  # outputs
SPLIT_INPUTS = 1024  # of a part: a layer of a short step has few tiles, and reads long rows
MAX_SPLITS = 8
SPLIT_MULTIPLE = 128  # a multiple of every depth below


EXACT = Tile(64, BLOCK_R, 64)  # for every number of rows
FEW_ROWS = Tile(16, BLOCK_R, 128)  # the smallest tile of tensor cores: short steps are limited by the matrices
WIDE_NUMBERS = Tile(32, BLOCK_R, 32, num_stages=2)  # float32 on a GPU: see tiles.py
FEW = 256  # rows up to which tiles are small


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """The matrices of all slots, and where they are."""

    weights: torch.Tensor  # [slots, capacity]: per site a [ranks of all parts, in], per part b transposed [ranks, out]
    table: torch.Tensor  # int64 [slots, sites, LINE]


@dataclass(frozen=True, slots=True)
class SiteOutputs:
    """A linear layer and its outputs."""

    index: int  # in the table
    parts: tuple[int, ...]  # outputs of each part
    max_rank: int  # of all parts together


@triton.jit(do_not_specialize=["site", "num_rows"])
def shrink_kernel(
    x_ptr, weights_ptr, table_ptr, row_ptr, tile_slot_ptr, num_tiles_ptr, sum_ptr,
    num_rows, K, max_rank, capacity, site, num_sites, split_inputs,
    LINE: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums [splits, num_rows, max_rank] of one part of the inputs."""
    if PDL:
        after_predecessor()
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    line = table_ptr + (slot * num_sites + site) * LINE
    rank = tl.load(line)
    blocks = tl.cdiv(max_rank, BLOCK_R)
    first = tl.program_id(0) % blocks * BLOCK_R
    if first >= rank:
        return
    split = tl.program_id(0) // blocks
    row = tl.load(row_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    is_row = row < num_rows
    row = row.to(tl.int64)
    r = first + tl.arange(0, BLOCK_R)[None, :]
    k = split * split_inputs + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row * K + k[None, :]
    a_ptr = weights_ptr + slot * capacity + tl.multiple_of(tl.load(line + 1), ALIGNMENT)
    a_ptrs = a_ptr + r * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, split_inputs, BLOCK_K):
        x = tl.load(x_ptrs, mask=is_row & (start + k[None, :] < K), other=0.0)
        a = tl.load(a_ptrs, mask=(r < rank) & (start + k[:, None] < K), other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    target = sum_ptr + (split.to(tl.int64) * num_rows + row) * max_rank + r
    tl.store(target, total, mask=is_row & (r < rank))


@triton.jit(do_not_specialize=["site", "num_rows", "num_splits"])
def expand_kernel(
    sum_ptr, weights_ptr, table_ptr, row_ptr, tile_slot_ptr, num_tiles_ptr, y_ptr,
    num_rows, N0, N1, N2, max_rank, capacity, site, num_sites, num_splits,
    LINE: tl.constexpr, ALIGNMENT: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [num_rows, N0 + N1 + N2] += b(sum over splits). No program has outputs of two parts."""
    if PDL:
        after_predecessor()
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    block = tl.program_id(0)
    second = tl.cdiv(N0, BLOCK_N)
    third = second + tl.cdiv(N1, BLOCK_N)
    is_second, is_third = (block >= second) & (block < third), (block >= third)
    # Sums instead of branches: the compiler then knows that sizes are multiples, and loads vectors.
    part = is_second * 1 + is_third * 2
    size = N0 * (block < second) + N1 * is_second + N2 * is_third
    before = N0 * (block >= second) + N1 * is_third
    block -= second * is_second + third * is_third
    line = table_ptr + (slot * num_sites + site) * LINE + 2 + part * 3
    first, rank = tl.multiple_of(tl.load(line), RANKS), tl.load(line + 1)
    if rank == 0:
        return
    row = tl.load(row_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    is_row = row < num_rows
    row = row.to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    b_ptr = weights_ptr + slot * capacity + tl.multiple_of(tl.load(line + 2), ALIGNMENT)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        sums = sum_ptr + row * max_rank + first + r[None, :]
        for _ in range(num_splits):
            inner += tl.load(sums, mask=is_row & (r[None, :] < rank), other=0.0)
            sums += num_rows.to(tl.int64) * max_rank
        b = tl.load(b_ptr + r[:, None] * size + column, mask=(r[:, None] < rank) & (column < size), other=0.0)
        total = tl.dot(inner.to(b.dtype), b, total, input_precision="ieee")
    target = y_ptr + row * (N0 + N1 + N2) + before + column
    is_in = is_row & (column < size)
    y = tl.load(target, mask=is_in, other=0.0)
    tl.store(target, (y.to(tl.float32) + total).to(y.dtype), mask=is_in)


def shape_for(num_rows: int, dtype: torch.dtype, device: torch.device, *, is_exact: bool) -> Tile:
    """By the number of rows; in exact mode one shape serves all."""
    if dtype is torch.float32 and device.type == "cuda":
        return WIDE_NUMBERS
    return FEW_ROWS if num_rows <= FEW and not is_exact else EXACT


def splits_of(num_inputs: int) -> tuple[int, int]:
    """The number of parts of the inputs, and the inputs of each."""
    count = min(triton.cdiv(num_inputs, SPLIT_INPUTS), MAX_SPLITS)
    size = triton.cdiv(triton.cdiv(num_inputs, count), SPLIT_MULTIPLE) * SPLIT_MULTIPLE
    return triton.cdiv(num_inputs, size), size


def add_low_rank(
    x: torch.Tensor, y: torch.Tensor, slots: SlotBuffers, site: SiteOutputs, tiles: ExpertTiles, shape: Tile
) -> None:
    """y [n, out] += b(a(x)), x [n, in], with the adapters of the rows in `tiles`."""
    n, num_inputs = x.shape
    num_splits, split_inputs = splits_of(num_inputs)
    sums = torch.empty(num_splits, n, site.max_rank, dtype=torch.float32, device=x.device)
    of_tiles = slots.weights, slots.table, tiles.pairs, tiles.experts, tiles.num_tiles
    capacity, num_sites = slots.weights.shape[1], slots.table.shape[1]
    blocks = triton.cdiv(site.max_rank, BLOCK_R) * num_splits
    shrink_kernel[(blocks, len(tiles.experts))](
        x, *of_tiles, sums, n, num_inputs, site.max_rank, capacity, site.index, num_sites, split_inputs,
        LINE=LINE, ALIGNMENT=ALIGNMENT, BLOCK_M=shape.rows, BLOCK_R=shape.columns, BLOCK_K=shape.depth,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **dependent(),
    )  # fmt: skip
    outputs = (*site.parts, 0, 0)[:MAX_PARTS]
    blocks = sum(triton.cdiv(size, BLOCK_N) for size in outputs)
    expand_kernel[(blocks, len(tiles.experts))](
        sums, *of_tiles, y, n, *outputs, site.max_rank, capacity, site.index, num_sites, num_splits,
        LINE=LINE, ALIGNMENT=ALIGNMENT, RANKS=RANKS, BLOCK_M=shape.rows, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **dependent(),
    )  # fmt: skip


def reference(
    x: torch.Tensor, y: torch.Tensor, slots: SlotBuffers, site: SiteOutputs, of_rows: list[int]
) -> torch.Tensor:
    """As `add_low_rank`, in float64 but for the rounding of a(x). `of_rows`: the slot of each row; -1: none."""
    found = y.double()
    for row, slot in enumerate(of_rows):
        if slot < 0:
            continue
        rank, place, *parts = slots.table[slot, site.index].tolist()
        a = slots.weights[slot, place:][: rank * x.shape[1]].view(rank, x.shape[1])
        inner, column = (a.double() @ x[row].double()).to(x.dtype).double(), 0
        for number, size in enumerate(site.parts):
            first, part_rank, place = parts[3 * number :][:3]
            b = slots.weights[slot, place:][: part_rank * size].view(part_rank, size)
            found[row, column : column + size] += inner[first : first + part_rank] @ b.double()
            column += size
    return found
