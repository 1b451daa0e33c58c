"""Products of fp8 (e4m3) rows with fp8 weights: the rounding of rows, and a linear layer whose rows are independent.

Each row has its own scales, so padding and other rows do not change it. A scale belongs to `group` successive inputs:
to all inputs, or to those of a block of a block-wise quantized checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.fp8 import LARGEST, reference_widened, round_e4m3
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.linears.linear import Tile, launch

FP8 = torch.float8_e4m3fn
SMALLEST = 1e-30  # groups up to this magnitude become 0, because the inverse of the scale overflows
SMALLEST_GROUP = 32  # inputs: one step of the tensor cores
AT_ONCE = 2048  # inputs that a program rounds, if a group is shorter
WIDEST = 8192  # inputs that a program holds; it reads wider groups twice


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows in fp8 with the scales of their groups."""

    steps: torch.Tensor  # [n, in]
    scales: torch.Tensor  # float32 [n, groups]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in fp8 with the scales of each output's groups."""

    steps: torch.Tensor  # [out, in]
    scales: torch.Tensor  # float32 [groups, out]
    group: int  # inputs

    @property
    def is_grouped(self) -> bool:
        return len(self.scales) > 1

    def widened(self) -> torch.Tensor:
        """The weight [out, in] in float32."""
        spread = self.scales.T.repeat_interleave(self.group, 1)[:, : self.steps.shape[1]]
        return reference_widened(self.steps, spread)


@triton.jit
def scales_of(top, num_nan, SMALLEST: tl.constexpr):
    """The inverse of the scale and the scale of groups, from their largest magnitudes and numbers of NaN."""
    inverse = tl.where(top > SMALLEST, 448.0 / tl.maximum(top, SMALLEST), 0.0)
    # The maximum ignores NaN; the scale passes it on, so that the row fails
    return inverse, tl.where(num_nan > 0, float("nan"), top / 448.0)


@triton.jit(do_not_specialize=["NUM_GROUPS"])
def quantize_rows_kernel(
    x_ptr, steps_ptr, scale_ptr, K, NUM_GROUPS,
    GROUP: tl.constexpr, GROUPS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS_AT_ONCE + tl.arange(0, GROUPS_AT_ONCE)
    within = tl.arange(0, BLOCK)[None, :]
    top = tl.zeros([GROUPS_AT_ONCE], tl.float32)
    num_nan = tl.zeros([GROUPS_AT_ONCE], tl.int32)
    for start in range(0, GROUP, BLOCK):
        column = group[:, None] * GROUP + start + within
        x = tl.load(x_ptr + row * K + column, mask=(start + within < GROUP) & (column < K), other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(x), 1))
        num_nan += tl.sum((x != x).to(tl.int32), 1)
    inverse, scale = scales_of(top, num_nan, SMALLEST)
    for start in range(0, GROUP, BLOCK):
        column = group[:, None] * GROUP + start + within
        is_in = (start + within < GROUP) & (column < K)
        x = tl.load(x_ptr + row * K + column, mask=is_in, other=0.0).to(tl.float32)
        steps = round_e4m3(x * inverse[:, None])
        tl.store(steps_ptr + row * K + column, steps.to(steps_ptr.dtype.element_ty), mask=is_in)
    tl.store(scale_ptr + row * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


WIDEST_K = 128
EXACT = Tile(64, 128, WIDEST_K)  # for every number of rows
FEW_ROWS = Tile(64, 64, WIDEST_K)  # more programs, which read the weight at the same time
MANY_ROWS = Tile(128, 128, WIDEST_K, num_warps=8, num_stages=3)


def tile_for(num_rows: int, *, is_exact: bool) -> Tile:
    if is_exact:
        return EXACT
    return FEW_ROWS if num_rows <= FEW_ROWS.rows else MANY_ROWS


def depth_for(group: int) -> int:
    """Inputs of a tile: those of one group at most."""
    return next(depth for depth in (WIDEST_K, 64, SMALLEST_GROUP) if group % depth == 0 or depth == SMALLEST_GROUP)


def reference_rows(x: torch.Tensor, group: int) -> ScaledRows:
    """As `quantize_rows`, in torch."""
    n, in_size = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -in_size % group)).view(n, -1, group)
    top = padded.abs().amax(-1)
    inverse = torch.where(top > SMALLEST, LARGEST / top, 0.0)
    steps = (padded * inverse[..., None]).clamp(-LARGEST, LARGEST).to(FP8).view(n, -1)[:, :in_size]
    return ScaledRows(steps.contiguous(), top / LARGEST)


@kernel("quantize_rows", reference_rows)
def quantize_rows(x: torch.Tensor, group: int) -> ScaledRows:
    """x [n, in] in fp8, with one scale for each `group` inputs of a row."""
    n, in_size = x.shape
    num_groups = triton.cdiv(in_size, group)
    steps = torch.empty(n, in_size, dtype=FP8, device=x.device)
    scales = torch.empty(n, num_groups, dtype=torch.float32, device=x.device)
    if n == 0:
        return ScaledRows(steps, scales)
    block = min(triton.next_power_of_2(group), WIDEST)
    at_once = min(max(AT_ONCE // block, 1), triton.next_power_of_2(num_groups))
    quantize_rows_kernel[(n, triton.cdiv(num_groups, at_once))](
        x, steps, scales, in_size, num_groups, GROUP=group, GROUPS_AT_ONCE=at_once, BLOCK=block, SMALLEST=SMALLEST,
        num_warps=max(1, at_once * block // 512), **dependent(),
    )  # fmt: skip
    return ScaledRows(steps, scales)


def torch_scaled_linear(
    rows: ScaledRows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype, *, is_exact: bool
) -> torch.Tensor:
    """Row by row in exact mode, as in linear.py."""
    out = torch.empty(len(rows.steps), len(weight.steps), dtype=dtype, device=rows.steps.device)
    size = 1 if is_exact else max(len(out), 1)
    parts = zip(rows.steps.split(size), rows.scales.split(size), out.split(size), strict=True)
    for steps, scales, lines in parts:
        lines.copy_(reference(ScaledRows(steps, scales), weight, bias))
    return out


@kernel("scaled_linear", torch_scaled_linear)
def scaled_linear(
    rows: ScaledRows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype, *, is_exact: bool
) -> torch.Tensor:
    """rows [n, in] @ weight [out, in].T + bias in `dtype`. With `is_exact`, one tile serves every number of rows."""
    out = torch.empty(len(rows.steps), len(weight.steps), dtype=dtype, device=rows.steps.device)
    tile, group = tile_for(len(out), is_exact=is_exact), weight.group if weight.is_grouped else 0
    tile = replace(tile, depth=depth_for(group)) if group else tile
    launch(rows.steps, weight.steps, bias, out, tile, (rows.scales, weight.scales), group)
    return out


def reference(rows: ScaledRows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """As `scaled_linear`, in float64."""
    spread = rows.scales.repeat_interleave(weight.group, 1)[:, : rows.steps.shape[1]]
    product = (rows.steps.double() * spread.double()) @ weight.widened().double().T
    return product if bias is None else product + bias.double()


def quantized(weight: torch.Tensor) -> Fp8Weight:
    """A weight [out, in] in fp8, with one scale per output."""
    rows = reference_rows(weight, weight.shape[1])
    return Fp8Weight(rows.steps, rows.scales.T.contiguous(), weight.shape[1])
