"""Linear layers whose rows are independent: K is summed in one order, whatever the number of rows. One kernel
multiplies numbers of float types, fp8 and int8.

Libraries choose tiles and splits of K by the number of rows, so exact mode cannot use them. Here the tile depends on it
too, but changes no bit: every tile adds the products in the order of K. That was measured on sm_90, where tiles of 16
rows use another instruction than those of 64. Where the start-up check finds other bits,
one tile serves every number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import target, tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent, early_bytes, prefetch_rows


@dataclass(frozen=True, slots=True)
class Tile:
    """The outputs of a program, and the inputs that it multiplies at once."""

    rows: int
    columns: int
    depth: int
    num_warps: int = 4
    num_stages: int = 4


TILE = Tile(64, 128, 64)  # for every number of rows
WIDE = Tile(64, 128, 32, num_warps=8, num_stages=3)  # float32 on a GPU: see tiles.py
TILES = (  # and the rows that are too few for them
    (64, Tile(128, 128, 64, num_warps=8, num_stages=3)),
    (64, Tile(128, 64, 128, num_warps=8, num_stages=3)),
    (16, Tile(64, 64, 128)), (16, Tile(64, 32, 128)),
    (0, Tile(16, 32, 128, num_stages=6)), (0, Tile(16, 16, 256)),
)  # fmt: skip
ENOUGH = 88  # programs; two thirds of the processors of an H100. With fewer, smaller tiles are faster
FEW_ROWS, FEW_BYTES = 16, 32 << 20  # a product of so few rows with such a weight is faster here than in cuBLAS
SMALL_SHARED = (86, 89, 120, 121)  # architectures with 100 KiB of shared memory


def tile_for(rows: int, columns: int) -> Tile:
    """The largest tile that is not too tall and keeps most processors busy, or the smallest."""
    fitting = (tile for too_few, tile in TILES if rows > too_few)
    counted = ((-(-rows // tile.rows) * -(-columns // tile.columns), tile) for tile in fitting)
    return next((tile for programs, tile in counted if programs >= ENOUGH), TILES[-1][1])


@triton.jit(do_not_specialize=["M", "NUM_GROUPS", "most_bytes"])
def linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, M, N, K, NUM_GROUPS, most_bytes,
    SCALED: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SCALED: rows and outputs have scales. GROUP: the inputs that share one; 0: all of them."""
    if PDL:
        prefetch_rows(weight_ptr, K, N, most_bytes, BLOCK_N)
    if PDL:
        after_predecessor()
    IS_INT8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64) * K + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64) * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if IS_INT8 else tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=(row < M) & (start + k[None, :] < K), other=0.0)
        weight = tl.load(weight_ptrs, mask=(column < N) & (start + k[:, None] < K), other=0.0)
        if GROUP > 0:
            group = start // GROUP
            x_scale = tl.load(x_scale_ptr + row * NUM_GROUPS + group, mask=row < M, other=0.0)
            scale = tl.load(scale_ptr + group * N + column, mask=column < N, other=0.0)
            total += tl.dot(x, weight) * (x_scale * scale)
        elif IS_INT8:
            total = tl.dot(x, weight, total, out_dtype=tl.int32)
        elif SCALED:  # Hopper adds fp8 products in less than float32: pass its sums on after each tile
            total = tl.dot(x, weight, total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if SCALED and GROUP == 0:
        x_scale = tl.load(x_scale_ptr + row, mask=row < M, other=0.0)
        total = total.to(tl.float32) * (x_scale * tl.load(scale_ptr + column, mask=column < N, other=0.0))
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * N + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(row < M) & (column < N))


ALIGNED_BYTES = 64


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Row by row, because libraries compute a row in a way that depends on the number of rows, and on how its address
    is aligned."""
    out = x.new_empty(len(x), len(weight))
    if missing := -x.shape[1] * x.itemsize % ALIGNED_BYTES // x.itemsize:
        x = F.pad(x, (0, missing))[:, : x.shape[1]]
    for row, line in zip(x.split(1), out.split(1), strict=True):
        line.copy_(F.linear(row, weight, bias))
    return out


@kernel("linear", torch_linear)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] @ weight [out, in].T + bias."""
    out = x.new_empty(len(x), len(weight))
    launch(x, weight, bias, out, _tile_of(x, len(weight)))
    return out


def is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _tile_of(x: torch.Tensor, columns: int) -> Tile:
    if not is_on_gpu(x):  # the interpreter multiplies with numpy, whose bits depend on the tile
        return TILE
    if x.dtype is torch.float32:
        return WIDE
    tile = TILE if forms.chosen().has_one_tile else tile_for(len(x), columns)
    return replace(tile, depth=min(tile.depth, 64)) if target().arch in SMALL_SHARED else tile


def short_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Few rows by `linear`, many by cuBLAS."""
    is_short = is_on_gpu(x) and x.itemsize == 2 and len(x) <= FEW_ROWS and weight.nbytes <= FEW_BYTES
    return linear(x, weight, bias) if is_short else F.linear(x, weight, bias)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    group: int = 0,
    **options: Any,
) -> None:
    """Writes x [n, in] @ weight [out, in].T + bias to `out`, with this tile. `scales`: of rows [n, groups], and of
    outputs [groups, out]; each belongs to `group` inputs, 0: to all."""
    (n, in_size), out_size = x.shape, len(weight)
    if not n:
        return
    programs = triton.cdiv(out_size, tile.columns), triton.cdiv(n, tile.rows)
    x_scales, of_outputs = scales or (weight, weight)
    linear_kernel[programs](
        x, x_scales, weight, of_outputs, weight if bias is None else bias, out, n, out_size, in_size,
        x_scales.shape[1] if group else 1, early_bytes(weight, programs[0]), SCALED=scales is not None, GROUP=group,
        BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options, **dependent(),
    )  # fmt: skip
