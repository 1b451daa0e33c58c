"""Residual addition, a norm, and the rounding of its result to fp8 in one launch: the results of `add_norm` and
`quantize_rows`."""

from __future__ import annotations

import torch

from worker_svc.engine.backend import Norm
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.fp8 import round_e4m3
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.scaled_linear import FP8, SMALLEST, ScaledRows, reference_rows, scales_of
from worker_svc.engine.gpu.kernels.norm import arguments_of, normed_row, reference

WIDEST = 8192  # inputs that a program holds


@triton.jit
def norm_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, steps_ptr, scale_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, NUM_GROUPS: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, SMALLEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS: groups of BLOCK inputs, of which NUM_GROUPS exist."""
    row = tl.program_id(0).to(tl.int64) * N
    column = tl.arange(0, BLOCK)
    is_in = column < N
    weight = tl.load(weight_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    if PDL:
        after_predecessor()
    bias = weight
    if KIND == 2:
        bias = tl.load(bias_ptr + column, mask=is_in, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row + column, mask=is_in, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=is_in, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row + column, x, mask=is_in)
    normed = normed_row(x, weight, bias, is_in, eps, N, KIND).to(x.dtype).to(tl.float32)
    groups = tl.reshape(normed, [GROUPS, BLOCK // GROUPS])
    inverse, scale = scales_of(tl.max(tl.abs(groups), 1), tl.sum((groups != groups).to(tl.int32), 1), SMALLEST)
    steps = tl.reshape(round_e4m3(groups * inverse[:, None]), [BLOCK])
    tl.store(steps_ptr + row + column, steps.to(steps_ptr.dtype.element_ty), mask=is_in)
    group = tl.arange(0, GROUPS)
    tl.store(scale_ptr + tl.program_id(0).to(tl.int64) * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


def serves(dim: int, group: int) -> bool:
    """Whether the kernel rounds rows of `dim` inputs in groups of this length."""
    return dim <= WIDEST and (group >= dim or group == triton.next_power_of_2(group))


def torch_add_norm_rows(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, group: int) -> ScaledRows:
    total, normed = reference(x, residual, norm)
    x.copy_(total)
    return reference_rows(normed, group)


@kernel("norm_rows", torch_add_norm_rows, writes="x")
def add_norm_rows(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, group: int) -> ScaledRows:
    """x [n, dim] += residual (if any). Returns the norm of x in fp8, with a scale for each `group` inputs of a row."""
    n, dim = x.shape
    block, num_groups = triton.next_power_of_2(dim), triton.cdiv(dim, group)
    rows = ScaledRows(
        torch.empty(n, dim, dtype=FP8, device=x.device),
        torch.empty(n, num_groups, dtype=torch.float32, device=x.device),
    )
    weight, bias, eps, kind = arguments_of(norm, x)
    norm_rows_kernel[(n,)](
        x, x if residual is None else residual, weight, bias, rows.steps, rows.scales, eps,
        N=dim, BLOCK=block, GROUPS=1 if num_groups == 1 else block // group, NUM_GROUPS=num_groups,
        ADD=residual is not None, KIND=kind, SMALLEST=SMALLEST, num_warps=min(8, max(1, block // 512)),
        **dependent(),
    )  # fmt: skip
    return rows
