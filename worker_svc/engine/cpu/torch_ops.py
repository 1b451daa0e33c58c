"""Operations of the decoder in torch that both CPU backends use. Their result for a row depends on nothing else."""

from __future__ import annotations

from typing import Protocol

import torch

from worker_svc.engine.backend import ExpertLinears, Norm, Routing
from worker_svc.engine.kernels import exact_ops

SMALLEST_SUM = 1e-20  # added to sums of shares, which may be 0 in float32
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


class Activations(Protocol):
    """The activations of a `Backend`."""

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None: ...

    def activation(self, x: torch.Tensor, activation: str) -> None: ...


def activated(backend: Activations, up: torch.Tensor, activation: str, *, is_gated: bool) -> torch.Tensor:
    """The activation of [gate | up], or of up alone, which is changed then."""
    if not is_gated:
        backend.activation(up, activation)
        return up
    out = up.new_empty(len(up), up.shape[1] // 2)
    backend.gated_activation(up, out, activation)
    return out


def experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    experts: ExpertLinears,
    backend: Activations,
    activation: str,
    out: torch.Tensor,
) -> None:
    """`Backend.experts`, expert by expert."""
    routing = experts.routing
    shares, chosen = route(router_logits, routing, experts.correction)
    if experts.scales is not None:
        shares = shares * experts.scales[chosen]
    terms = x.new_empty(*chosen.shape, out.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        given = x[rows]
        if routing.scales_inputs:
            given = (given.float() * shares[rows, ranks, None]).to(x.dtype)
        up = activated(backend, experts.gate_up[expert](given), activation, is_gated=experts.is_gated)
        terms[rows, ranks] = experts.down[expert](up)
    total = torch.zeros(out.shape)
    for rank in range(routing.num_used):
        term = terms[:, rank].float()
        total += term if routing.scales_inputs else term * shares[:, rank, None]
    out.copy_(total)


def route(
    router_logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares, float32 [n, num_used], and indices [n, num_used] of the experts of each token; see `Routing`."""
    logits = router_logits.float()[:, : routing.num_experts]
    scores = sigmoid(logits) if routing.is_sigmoid else exact_ops.exp(logits - logits.amax(-1, keepdim=True))
    total = torch.ones(len(logits), 1) if routing.is_sigmoid else exact_ops.ordered_sum(scores)
    keys = scores if correction is None else scores / total + correction
    keys = in_top_groups(keys, routing)
    chosen = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    top = scores.gather(1, chosen)
    shares = top / (exact_ops.ordered_sum(top) + SMALLEST_SUM if routing.is_normalized else total) * routing.scale
    if routing.shared == "none":
        return shares, chosen
    shared = sigmoid(router_logits[:, -1:].float()) if routing.shared == "gated" else torch.ones(len(logits), 1)
    last = torch.full_like(chosen[:, :1], routing.num_experts)
    return torch.cat((shares, shared), 1), torch.cat((chosen, last), 1)


def in_top_groups(keys: torch.Tensor, routing: Routing) -> torch.Tensor:
    """keys [n, num_experts], those outside of the best groups replaced by -inf."""
    if routing.num_groups == 1:
        return keys
    groups = keys.view(len(keys), routing.num_groups, -1)
    best = torch.sort(groups, dim=-1, descending=True, stable=True).values[..., : routing.group_best]
    order = torch.sort(exact_ops.ordered_sum(best)[..., 0], dim=-1, descending=True, stable=True).indices
    is_kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, order[:, : routing.top_groups], 1)
    return groups.masked_fill(~is_kept[..., None], -torch.inf).view_as(keys)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The logistic function of float32 x."""
    return 1.0 / (1.0 + exact_ops.exp(-x))


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`Backend.gated_activation` of float32 gate and up."""
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1.0) * (gate * sigmoid(SWIGLU_ALPHA * gate))


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of float32 x."""
    if activation == "silu":
        return x / (1.0 + exact_ops.exp(-x))
    if activation == "relu2":
        return x.clamp(min=0.0) ** 2
    if activation == "gelu_tanh":
        inner = 0.79788456080286536 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (exact_ops.exp(2.0 * inner) + 1.0))
    return 0.5 * x * (1.0 + exact_ops.erf(x * 0.70710678118654752))


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """`norm` of x [.., dim], in the dtype of x. None: x."""
    if norm is None:
        return x
    wide = x.float()
    if norm.kind == "layer":
        wide = wide - exact_ops.ordered_sum(wide) / x.shape[-1]
    scale = 1.0 / torch.sqrt(exact_ops.ordered_sum(wide * wide) / x.shape[-1] + norm.eps)
    if norm.kind == "rms":
        return (wide * scale).to(x.dtype) * norm.weight
    if norm.kind == "rms_offset":
        return (wide * scale * (1.0 + norm.weight.float())).to(x.dtype)
    bias = 0.0 if norm.bias is None else norm.bias.float()
    return (wide * scale * norm.weight.float() + bias).to(x.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32 x."""
    return cap * (1.0 - 2.0 / (exact_ops.exp(2.0 / cap * x) + 1.0))


def gate_outputs(out: torch.Tensor, gate: torch.Tensor) -> None:
    """`Backend.gate_outputs`."""
    out.copy_(out.float() * sigmoid(gate.float()))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) of float32 x: max(x, 0) + 2 atanh(y / (2 + y)) for y = e^-|x|."""
    y = exact_ops.exp(-x.abs())
    z = y / (y + 2.0)
    square = z * z
    total = torch.full_like(z, 1 / 17)
    for odd in (15, 13, 11, 9, 7, 5, 3):
        total = total * square + 1 / odd
    return x.clamp_min(0.0) + 2.0 * (total * square * z + z)
