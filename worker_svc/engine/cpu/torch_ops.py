"""Operations of the decoder in torch that both CPU backends use. Their result for a row depends on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker_svc.engine.backend import ExpertLinears, Norm
from worker_svc.engine.kernels import exact_ops

GatedActivation = Callable[[torch.Tensor, torch.Tensor, str], None]


def experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    experts: ExpertLinears,
    gated_activation: GatedActivation,
    activation: str,
    out: torch.Tensor,
) -> None:
    """`Backend.experts`, expert by expert."""
    shares, chosen = route(router_logits, experts)
    terms = x.new_empty(len(x), experts.top_k, out.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        gate_up = experts.gate_up[expert](x[rows])
        activated = gate_up.new_empty(len(rows), gate_up.shape[1] // 2)
        gated_activation(gate_up, activated, activation)
        terms[rows, ranks] = experts.down[expert](activated)
    total = torch.zeros(out.shape)
    for rank in range(experts.top_k):
        total += terms[:, rank].float() * shares[:, rank, None]
    out.copy_(total)


def route(router_logits: torch.Tensor, experts: ExpertLinears) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares, float32 [n, top_k], and indices [n, top_k] of the experts of each token, the largest share first. Of
    equal ones the lower index comes first."""
    logits = router_logits.float()
    weights = exact_ops.exp(logits - logits.amax(-1, keepdim=True))
    order = torch.sort(weights, dim=-1, descending=True, stable=True)
    top, chosen = order.values[:, : experts.top_k], order.indices[:, : experts.top_k]
    return top / exact_ops.ordered_sum(top if experts.is_normalized else weights), chosen


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of float32 x."""
    if activation == "silu":
        return x / (1.0 + exact_ops.exp(-x))
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
