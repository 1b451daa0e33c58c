"""The case of a feed-forward part of experts, for models that have some. Its weights have few inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from worker_svc.engine.gpu.checks.case import TOLERANCES, Case, Outputs, Setup
from worker_svc.engine.gpu.experts import StackedExperts, compute_experts
from worker_svc.engine.gpu.kernels import activation, expert_linear, route
from worker_svc.engine.gpu.kernels.expert_linear import ExpertWeights
from worker_svc.engine.gpu.linears import DeviceLinears

NUM_TOKENS = 5
HIDDEN, INNER = expert_linear.EXACT.columns + 16, expert_linear.EXACT.columns // 2 + 16  # two tiles of outputs each


def expert_cases(setup: Setup) -> Iterator[Case]:
    """All kernels of the part, with the numbers of experts of the model."""
    found = next((layer.experts for layer in setup.model.layers if layer.experts is not None), None)
    if found is None:
        return
    x, logits = setup.random(NUM_TOKENS, HIDDEN), setup.random(NUM_TOKENS, found.num_experts, seed=1)
    gate_up = setup.random(found.num_experts, 2 * INNER, HIDDEN, seed=2) * HIDDEN**-0.5
    down = setup.random(found.num_experts, HIDDEN, INNER, seed=3) * INNER**-0.5
    linears = DeviceLinears("best_effort", setup.dtype)
    gate_up_views, down_views = ([linears.make_linear(part, None) for part in weight] for weight in (gate_up, down))
    experts = StackedExperts(
        gate_up_views, down_views, found.top_k, found.is_normalized, ExpertWeights(gate_up), ExpertWeights(down),
        setup.is_exact,
    )  # fmt: skip
    routes = route.reference(logits, found.top_k, is_normalized=found.is_normalized)
    expected = _reference(x, routes, gate_up, down, setup.model.activation)

    def run(first: int, last: int) -> Outputs:
        part = x[first:last].clone(), logits[first:last].clone()
        chosen = route.route(part[1], found.top_k, is_normalized=found.is_normalized)
        return {
            "experts": chosen.experts, "shares": chosen.shares,
            "output": compute_experts(*part, experts, setup.model.activation),
        }  # fmt: skip

    yield Case(
        "experts",
        f"{found.num_experts} experts, {found.top_k} per token, [{NUM_TOKENS}, {HIDDEN}], {setup.dtype}",
        range(NUM_TOKENS + 1),
        run,
        {"experts": routes.experts, "shares": routes.shares, "output": expected},
        {"shares": 1e-4, "output": 2 * TOLERANCES[setup.dtype]},
    )


def _reference(
    x: torch.Tensor, routes: route.Routes, gate_up: torch.Tensor, down: torch.Tensor, name: str
) -> torch.Tensor:
    """The sums of the tokens' experts, in float64 but for the activation."""
    found = []
    for row, chosen, shares in zip(x.double(), routes.experts.tolist(), routes.shares.double(), strict=True):
        inner = [activation.reference((gate_up[expert].double() @ row)[None], name)[0].double() for expert in chosen]
        terms = [down[expert].double() @ part for expert, part in zip(chosen, inner, strict=True)]
        found.append((torch.stack(terms) * shares[:, None]).sum(0))
    return torch.stack(found)
