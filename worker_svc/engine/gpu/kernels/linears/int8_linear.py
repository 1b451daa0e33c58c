"""Products of int8 rows with int8 weights: the rounding of rows, and a linear layer.

Each row has its own scale, so other rows do not change it. Sums are integers: no tile and no order of additions changes
a result, and exact mode needs no tile of its own. The results are those of the int8 layers of CPUs.
"""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.linear import launch
from worker_svc.engine.gpu.kernels.linears.scaled_linear import WIDEST, tile_for
from worker_svc.engine.kernels.torch_linear import INT8_SMALLEST, Int8Rows, int8_steps


@triton.jit
def int8_rows_kernel(x_ptr, steps_ptr, scale_ptr, K, BLOCK: tl.constexpr, SMALLEST: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], tl.float32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32))
        top = tl.maximum(top, size)  # ignores NaN
        num_bad += ((size != size) | (size == float("inf"))).to(tl.int32)
    largest = tl.max(top, 0)
    inverse = tl.where(largest > SMALLEST, tl.div_rn(127.0, tl.maximum(largest, SMALLEST)), 0.0)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
        step = (x * inverse + 12582912.0) - 12582912.0  # 1.5 * 2^23: float32 values there are 1 apart
        tl.store(steps_ptr + row * K + column, step.to(tl.int8), mask=column < K)
    # A row with NaN or infinity fails
    tl.store(scale_ptr + row, tl.where(tl.sum(num_bad, 0) > 0, float("nan"), tl.div_rn(largest, 127.0)))


def torch_int8_rows(x: torch.Tensor) -> Int8Rows:
    steps, scales = int8_steps(x)
    is_bad = ~x.float().isfinite().all(1)
    return Int8Rows(steps.nan_to_num().to(torch.int8), scales.masked_fill(is_bad, torch.nan))


@kernel("int8_rows", torch_int8_rows)
def int8_rows(x: torch.Tensor) -> Int8Rows:
    """The rows of x [n, in] in int8. The scale of a row with NaN or infinity is NaN."""
    n, in_size = x.shape
    rows = Int8Rows(
        torch.empty(n, in_size, dtype=torch.int8, device=x.device),
        torch.empty(n, dtype=torch.float32, device=x.device),
    )
    if n:
        block = min(triton.next_power_of_2(in_size), WIDEST)
        int8_rows_kernel[(n,)](  # a fused multiply-add would round differently from torch
            x, rows.steps, rows.scales, in_size, BLOCK=block, SMALLEST=INT8_SMALLEST, num_warps=max(1, block // 512),
            enable_fp_fusion=False, **dependent(),
        )  # fmt: skip
    return rows


def torch_int8_linear(rows: Int8Rows, weight: Int8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    sums = (rows.steps.double() @ weight.steps.double().T).float()  # exact: integers below 2^53
    y = sums * (rows.scales[:, None] * weight.scales)
    return (y if bias is None else y + bias.float()).to(dtype)


@kernel("int8_linear", torch_int8_linear)
def int8_linear(rows: Int8Rows, weight: Int8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rows [n, in] @ weight [out, in].T + bias in `dtype`."""
    out = torch.empty(len(rows.steps), len(weight.steps), dtype=dtype, device=rows.steps.device)
    scales = rows.scales, weight.scales
    launch(rows.steps, weight.steps, bias, out, tile_for(len(out), is_exact=False), scales, enable_fp_fusion=False)
    return out
