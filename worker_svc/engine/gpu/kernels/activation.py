"""Gated activation of the MLP: activation(gate) * up, from fused rows [gate | up]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BLOCK = 1024


@triton.jit
def gated_activation_kernel(gate_up_ptr, out_ptr, N, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < N
    gate = tl.load(gate_up_ptr + row * 2 * N + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + column, mask=is_in, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # tanh(y) = 2 / (1 + exp(-2y)) - 1, because the interpreter lacks libdevice.tanh
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    tl.store(out_ptr + row * N + column, (gate * up).to(out_ptr.dtype.element_ty), mask=is_in)


def gated_activation(gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    """out [n, dim] = activation(gate) * up, for gate_up [n, 2 * dim]."""
    n, dim = out.shape
    gated_activation_kernel[(n, triton.cdiv(dim, BLOCK))](
        gate_up, out, dim, BLOCK=BLOCK, KIND=ACTIVATIONS.index(activation), num_warps=4, **dependent()
    )


def reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gate * up).to(gate_up.dtype)
