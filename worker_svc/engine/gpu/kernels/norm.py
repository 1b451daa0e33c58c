"""Residual addition and a norm: RMSNorm or LayerNorm. One row per program, so a row does not depend on the others.
`add_norm_rows` also rounds the result to fp8, as `quantize_rows` does, in the same launch.
"""

from __future__ import annotations

import torch

from worker_svc.engine.backend import Norm
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.fp8 import round_e4m3
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.scaled_linear import FP8, SMALLEST, ScaledRows, reference_rows, scales_of

KINDS = {"rms": 0, "rms_offset": 1, "layer": 2}
NO_NORM = 3
WIDEST = 8192  # inputs that a program holds, if their norm is rounded


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
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, scale_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, NUM_GROUPS: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, SMALLEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS: groups of BLOCK inputs, of which NUM_GROUPS exist, in fp8; 0: the norm is not rounded to fp8."""
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
    normed = normed_row(x, weight, bias, is_in, eps, N, KIND).to(x.dtype)
    if GROUPS == 0:
        tl.store(out_ptr + row + column, normed, mask=is_in)
    else:
        groups = tl.reshape(normed.to(tl.float32), [GROUPS, BLOCK // GROUPS])
        inverse, scale = scales_of(tl.max(tl.abs(groups), 1), tl.sum((groups != groups).to(tl.int32), 1), SMALLEST)
        steps = tl.reshape(round_e4m3(groups * inverse[:, None]), [BLOCK])
        tl.store(out_ptr + row + column, steps.to(out_ptr.dtype.element_ty), mask=is_in)
        group = tl.arange(0, GROUPS)
        tl.store(scale_ptr + tl.program_id(0).to(tl.int64) * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor | ScaledRows, group: int = 0
) -> None:
    """`group`: inputs that share a scale in `out`; 0: it is not in fp8."""
    (n, dim), weight, eps, kind = x.shape, x, 0.0, NO_NORM  # x takes the place of a weight or bias that is not used
    block, num_groups = triton.next_power_of_2(dim), triton.cdiv(dim, group) if group else 0
    if norm is not None:
        weight, eps, kind = norm.weight, norm.eps, KINDS[norm.kind]
    bias = weight if norm is None or norm.bias is None else norm.bias
    results = (out.steps, out.scales) if isinstance(out, ScaledRows) else (out, out)
    norm_kernel[(n,)](
        x, x if residual is None else residual, weight, bias, *results, eps, N=dim, BLOCK=block,
        GROUPS=block // group if num_groups > 1 else num_groups, NUM_GROUPS=num_groups, ADD=residual is not None,
        KIND=kind, SMALLEST=SMALLEST, num_warps=min(8, max(1, block // 512)), **dependent(),
    )  # fmt: skip


def torch_add_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
    total, found = reference(x, residual, norm)
    x.copy_(total)
    out.copy_(found)


@kernel("norm", torch_add_norm, writes="x out")
def add_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
    """x [n, dim] += residual (if any), out = norm of x, or x if there is no norm. `out` may be x."""
    _launch(x, residual, norm, out)


def can_round(dim: int, group: int) -> bool:
    """Whether the kernel rounds rows of `dim` inputs in groups of this length."""
    return dim <= WIDEST and (group >= dim or group == triton.next_power_of_2(group))


def torch_add_norm_rows(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, group: int) -> ScaledRows:
    total, found = reference(x, residual, norm)
    x.copy_(total)
    return reference_rows(found, group)


@kernel("norm_rows", torch_add_norm_rows, writes="x")
def add_norm_rows(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, group: int) -> ScaledRows:
    """x [n, dim] += residual (if any). Returns the norm of x in fp8, with a scale for each `group` inputs of a row."""
    scales = torch.empty(len(x), triton.cdiv(x.shape[1], group), dtype=torch.float32, device=x.device)
    rows = ScaledRows(torch.empty(x.shape, dtype=FP8, device=x.device), scales)
    _launch(x, residual, norm, rows, group)
    return rows


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
