"""Residual addition and RMSNorm. One row per program, so a row does not depend on the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N
    column = tl.arange(0, BLOCK)
    is_in = column < N
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    if PDL:
        after_predecessor()
    x = tl.load(x_ptr + row + column, mask=is_in, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=is_in, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row + column, x, mask=is_in)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)  # rounded before the weight, as in transformers
    tl.store(out_ptr + row + column, (normed * weight).to(x.dtype), mask=is_in)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """x [n, dim] += residual (if any), out = RMSNorm(x) * weight."""
    n, dim = x.shape
    block = triton.next_power_of_2(dim)
    rms_norm_kernel[(n,)](
        x, x if residual is None else residual, weight, out, eps,
        N=dim, BLOCK=block, ADD=residual is not None, num_warps=min(8, max(1, block // 512)),
        **dependent(),
    )  # fmt: skip


def reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its RMSNorm."""
    total = x if residual is None else x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, (wide * scale).to(x.dtype) * weight
