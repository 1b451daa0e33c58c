"""A linear layer whose rows are independent: one tile shape for every number of rows, and K summed in one order.

Libraries choose tiles and splits of K by the number of rows, so exact mode cannot use them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent, early_bytes, prefetch_rows

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64  # 64 rows: one row uses the same MMA instruction as thousands
WARPS, STAGES = 4, 4
WIDE_BLOCK_K, WIDE_WARPS, WIDE_STAGES = 32, 8, 3  # float32 on a GPU: see tiles.py


@triton.jit(do_not_specialize=["M", "most_bytes"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, most_bytes,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        prefetch_rows(weight_ptr, K, N, most_bytes, BLOCK_N)
    if PDL:
        after_predecessor()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64) * K + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64) * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=(row < M) & (start + k[None, :] < K), other=0.0)
        weight = tl.load(weight_ptrs, mask=(column < N) & (start + k[:, None] < K), other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * N + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(row < M) & (column < N))


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Row by row, because libraries compute a row in a way that depends on the number of rows."""
    out = x.new_empty(len(x), len(weight))
    for row, line in zip(x.split(1), out.split(1), strict=True):
        line.copy_(F.linear(row, weight, bias))
    return out


@kernel("linear", torch_linear)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] @ weight [out, in].T + bias."""
    n, in_size = x.shape
    out_size = weight.shape[0]
    out = x.new_empty(n, out_size)
    if n == 0:
        return out
    is_wide = x.is_cuda and x.dtype is torch.float32
    block_k, warps, stages = (WIDE_BLOCK_K, WIDE_WARPS, WIDE_STAGES) if is_wide else (BLOCK_K, WARPS, STAGES)
    programs = triton.cdiv(out_size, BLOCK_N), triton.cdiv(n, BLOCK_M)
    linear_kernel[programs](
        x, weight, weight if bias is None else bias, out, n, out_size, in_size, early_bytes(weight, programs[0]),
        BIAS=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
        **dependent(),
    )  # fmt: skip
    return out
