"""A feed-forward part of experts on the device: route, group, multiply, add. No step waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from worker_svc.engine.backend import ExpertLinears, Linear
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.decoder.layer import FeedForward
from worker_svc.engine.gpu.kernels.activation import gated, torch_activate, torch_gated_activation
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.linears.expert_linear import ExpertWeights, add_experts, expert_linear, shape_for
from worker_svc.engine.gpu.kernels.linears.scaled_linear import ScaledRows, quantize_rows
from worker_svc.engine.gpu.kernels.route import group, route


@dataclass(frozen=True, slots=True)
class StackedExperts(ExpertLinears):
    """Experts whose weights are stacked, so that one launch multiplies by all of them. The linear layers of the base
    class are views of the stacked weights. `first`: the number of the first one; a rank may hold some whole experts."""

    gate_up_weights: ExpertWeights
    down_weights: ExpertWeights
    is_exact: bool
    first: int = 0
    shared: FeedForward | None = None

    def numbered_here(self, experts: torch.Tensor) -> torch.Tensor:
        """Numbers of experts among those of this rank; others are below 0, or beyond the last one."""
        return experts - self.first if self.first else experts

    def pair(self, number: int) -> tuple[Linear, Linear] | None:
        if number == self.routing.num_experts:
            return None if self.shared is None else (self.shared.gate_up, self.shared.down)
        here = number - self.first
        return (self.gate_up[here], self.down[here]) if 0 <= here < len(self.gate_up) else None

    @property
    def are_all_here(self) -> bool:
        return len(self.gate_up) == self.routing.num_experts


def torch_experts(
    x: torch.Tensor, router_logits: torch.Tensor, experts: StackedExperts, activation: str
) -> torch.Tensor:
    out = torch.empty_like(x)
    torch_ops.experts(x, router_logits, experts, InTorch(), activation, out)
    return out


class InTorch:
    """The activations in torch."""

    gated_activation = staticmethod(torch_gated_activation)
    activation = staticmethod(torch_activate)


@kernel("experts", torch_experts)
def compute_experts(
    x: torch.Tensor, router_logits: torch.Tensor, experts: StackedExperts, activation: str
) -> torch.Tensor:
    """The sum of the outputs of each token's experts, for x [n, hidden] and logits [n, num_logits]. Of a rank's shard,
    the sum over ranks is still missing."""
    routing, num_here = experts.routing, len(experts.gate_up_weights.steps)
    dense = experts.shared
    shared = None if dense is None else dense.down(gated(dense.gate_up(x), activation))
    routes = route(router_logits, routing, experts.correction)
    if experts.scales is not None:
        routes = replace(routes, shares=routes.shares * experts.scales[routes.experts.long()])
    chosen = experts.numbered_here(routes.experts)
    shape = shape_for(chosen.numel(), routing.num_experts, x.dtype, x.device, is_exact=experts.is_exact)
    tiles = group(chosen, num_here, shape.rows)
    inner = expert_linear(
        _inputs(x, experts.gate_up_weights), experts.gate_up_weights, tiles, shape, x.dtype, activation
    )
    terms = expert_linear(_inputs(inner, experts.down_weights), experts.down_weights, tiles, shape, x.dtype, None)
    if not experts.are_all_here:  # nothing was written for the others
        terms.masked_fill_(((chosen < 0) | (chosen >= num_here)).view(-1, 1), 0.0)
    return add_experts(terms, routes, shared, router_logits, is_gated=routing.shared == "gated")


def _inputs(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor | ScaledRows:
    return x if weights.scales is None else quantize_rows(x, weights.group)
