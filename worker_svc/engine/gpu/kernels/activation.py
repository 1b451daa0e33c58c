"""Activations of the MLP, from fused rows [gate | up]: activation(gate) * up, or without a gate; and soft caps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.cpu.torch_ops import SWIGLU_ALPHA, SWIGLU_LIMIT
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
GATED = (*ACTIVATIONS, "clamped_swiglu")  # the last one changes both halves
BLOCK = 1024


@triton.jit
def activation_of(x, KIND: tl.constexpr):
    """The activation of float32 numbers; KIND is an index of ACTIVATIONS."""
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:
        x = tl.where(x < 0.0, 0.0, x * x)
    else:  # tanh(y) = 2 / (1 + exp(-2y)) - 1, because the interpreter lacks libdevice.tanh
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    return x


@triton.jit
def gated_of(gate, up, KIND: tl.constexpr):
    """activation(gate) * up of float32 numbers; KIND is an index of GATED."""
    if KIND == 4:  # as in torch_ops.py; NaN stays NaN
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return activation_of(gate, KIND) * up


@triton.jit
def gated_activation_kernel(gate_up_ptr, out_ptr, N, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < N
    gate = tl.load(gate_up_ptr + row * 2 * N + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + column, gated_of(gate, up, KIND).to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def activation_kernel(x_ptr, N, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        after_predecessor()
    x_ptr += tl.program_id(0).to(tl.int64) * N
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < N, other=0.0)
    tl.store(x_ptr + column, activation_of(x.to(tl.float32), KIND).to(x.dtype), mask=column < N)


@triton.jit
def soft_cap_kernel(x_ptr, cap, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        after_predecessor()
    x_ptr += tl.program_id(0).to(tl.int64) * N
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + column, mask=column < N, other=0.0)
    capped = cap * (1.0 - 2.0 / (1.0 + tl.exp(x.to(tl.float32) * (2.0 / cap))))
    tl.store(x_ptr + column, capped.to(x.dtype), mask=column < N)


LEAST_GATE = -88.0  # gates of padding may be less, where torch_ops is not 0


def torch_gated_activation(gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(torch_ops.gated(gate, up, activation).where(gate > LEAST_GATE, gate * 0.0 * up))


def torch_activate(x: torch.Tensor, activation: str) -> None:
    x.copy_(torch_ops.activate(x.float(), activation).where(x > LEAST_GATE, x * 0.0))


def torch_soft_cap(x: torch.Tensor, cap: float) -> None:
    x.copy_(torch_ops.soft_cap(x.float(), cap))


@kernel("gated_activation", torch_gated_activation, writes="out")
def gated_activation(gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """out [n, dim] = activation(gate) * up, for gate_up [n, 2 * dim]."""
    n, dim = out.shape
    gated_activation_kernel[(n, triton.cdiv(dim, BLOCK))](
        gate_up, out, dim, BLOCK=BLOCK, KIND=GATED.index(activation), num_warps=4, **dependent()
    )


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`gated_activation` into new memory [n, dim]."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    gated_activation(gate_up, out, activation)
    return out


@kernel("activation", torch_activate, writes="x")
def activate(x: torch.Tensor, activation: str) -> None:
    """x [n, dim] = activation(x)."""
    n, dim = x.shape
    activation_kernel[(n, triton.cdiv(dim, BLOCK))](
        x, dim, BLOCK=BLOCK, KIND=ACTIVATIONS.index(activation), num_warps=4, **dependent()
    )


@kernel("soft_cap", torch_soft_cap, writes="x")
def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x [n, dim] = cap * tanh(x / cap)."""
    n, dim = x.shape
    soft_cap_kernel[(n, triton.cdiv(dim, BLOCK))](x, cap, dim, BLOCK=BLOCK, num_warps=4, **dependent())


def reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`gated_activation`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * F.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)).to(gate_up.dtype)
    return (_activated(gate, activation) * up).to(gate_up.dtype)


def reference_activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`activate`."""
    return _activated(x.float(), activation).to(x.dtype)


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
