"""Residual addition and a norm: RMSNorm or LayerNorm. One row per program, so a row does not depend on the others."""

from __future__ import annotations

import torch

from worker_svc.engine.backend import Norm
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

KINDS = {"rms": 0, "rms_offset": 1, "layer": 2}
NO_NORM = 3


@triton.jit
def normed_row(x, weight, bias, is_in, eps, N: tl.constexpr, KIND: tl.constexpr):
    """The norm of a row in float32, for its weight in float32, or x without a norm. Only LayerNorm reads the bias."""
    wide = x.to(tl.float32)
    if KIND == 2:
        wide = tl.where(is_in, wide - tl.sum(wide, 0) / N, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    if KIND == 0:
        normed = normed.to(x.dtype).to(tl.float32) * weight  # rounded before the weight, as in transformers
    elif KIND == 1:
        normed = normed * (1.0 + weight)
    elif KIND == 2:
        normed = normed * weight + bias
    else:
        normed = wide
    return normed


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N
    column = tl.arange(0, BLOCK)
    is_in = column < N
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    bias = weight
    if KIND == 2:
        bias = tl.load(bias_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    if PDL:
        after_predecessor()
    x = tl.load(x_ptr + row + column, mask=is_in, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=is_in, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row + column, x, mask=is_in)
    normed = normed_row(x, weight, bias, is_in, eps, N, KIND)
    tl.store(out_ptr + row + column, normed.to(x.dtype), mask=is_in)


def arguments_of(norm: Norm | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """Weight, bias, eps and KIND of a norm. Where it has none, x takes the place of weight or bias, and is not used."""
    if norm is None:
        return x, x, 0.0, NO_NORM
    return norm.weight, norm.weight if norm.bias is None else norm.bias, norm.eps, KINDS[norm.kind]


def torch_add_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
    total, found = reference(x, residual, norm)
    x.copy_(total)
    out.copy_(found)


@kernel("norm", torch_add_norm, writes="x out")
def add_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
    """x [n, dim] += residual (if any), out = norm of x, or x if there is no norm. `out` may be x."""
    n, dim = x.shape
    block = triton.next_power_of_2(dim)
    weight, bias, eps, kind = arguments_of(norm, x)
    norm_kernel[(n,)](
        x, x if residual is None else residual, weight, bias, out, eps,
        N=dim, BLOCK=block, ADD=residual is not None, KIND=kind,
        num_warps=min(8, max(1, block // 512)), **dependent(),
    )  # fmt: skip


def reference(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its norm."""
    total = x if residual is None else x + residual
    return total, normed(total, norm)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """`norm` of x [.., dim]. None: x."""
    if norm is None:
        return x
    wide = x.float()
    if norm.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.kind == "rms":
        return scaled.to(x.dtype) * norm.weight
    if norm.kind == "rms_offset":
        return (scaled * (1.0 + norm.weight.float())).to(x.dtype)
    bias = 0.0 if norm.bias is None else norm.bias.float()
    return (scaled * norm.weight.float() + bias).to(x.dtype)
