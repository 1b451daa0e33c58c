"""Cases of a feed-forward part of experts, for models that have some. Its weights have few inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bench.gpu.checks.case import TOLERANCES, Case, Outputs, Setup
from worker_svc.engine.backend import Routing
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.decoder.layer import FeedForward
from worker_svc.engine.gpu.kernels import activation, route
from worker_svc.engine.gpu.kernels.linears import expert_linear, scaled_linear
from worker_svc.engine.gpu.kernels.linears.expert_linear import ExpertWeights
from worker_svc.engine.gpu.kernels.linears.scaled_linear import FP8, Fp8Weight
from worker_svc.engine.gpu.layers.experts import StackedExperts, compute_experts
from worker_svc.engine.gpu.layers.linears import DeviceLinears

NUM_TOKENS = 5
MORE_TOKENS = (expert_linear.FEW_ROWS.rows + 1, expert_linear.EXACT.rows + 1)  # tokens by expert: other tile shapes
HIDDEN, INNER = expert_linear.EXACT.columns + 16, expert_linear.EXACT.columns // 2 + 16  # two tiles of outputs each
Rounding = Callable[[torch.Tensor], torch.Tensor]


def expert_cases(setup: Setup) -> Iterator[Case]:
    """All kernels of the part with the numbers of experts of the model, and with more tokens if they have other tiles,
    in the formats of the model's weights.
    """
    found = next((layer.experts for layer in setup.model.layers if layer.experts is not None), None)
    if found is None:
        return
    routing, has_correction = found.routing, found.has_correction
    sizes = [(NUM_TOKENS, routing.num_experts)]
    if not setup.is_exact:
        sizes += [(num_tokens, routing.top_k) for num_tokens in MORE_TOKENS]  # every expert gets all tokens
    for is_fp8 in [False, True] if "fp8" in setup.formats else [False]:
        for num_tokens, num_experts in sizes:
            groups = {} if num_experts == routing.num_experts else {"num_groups": 1}
            part = replace(routing, num_experts=num_experts, **groups)
            experts = _experts(setup, part, has_correction=has_correction, is_fp8=is_fp8)
            yield _case(setup, experts, num_tokens)


def _experts(setup: Setup, routing: Routing, *, has_correction: bool, is_fp8: bool) -> StackedExperts:
    gate_up = setup.random(routing.num_experts, 2 * INNER, HIDDEN, seed=2) * HIDDEN**-0.5
    down = setup.random(routing.num_experts, HIDDEN, INNER, seed=3) * INNER**-0.5
    linears = DeviceLinears(setup.determinism, setup.dtype)
    gate_up_views, down_views = ([linears.make_linear(part, None) for part in weight] for weight in (gate_up, down))
    correction = 0.1 * setup.random(routing.num_experts, seed=4).float() if has_correction else None
    shared = None
    if routing.shared != "none":
        weights = (setup.random(*size, seed=5) * size[1] ** -0.5 for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
        shared = FeedForward(*(linears.make_linear(weight, None) for weight in weights))
    return StackedExperts(
        *(gate_up_views, down_views, routing, correction, True),
        *(_weights(setup, gate_up, is_fp8), _weights(setup, down, is_fp8), setup.is_exact),
        shared=shared,
    )


def _weights(setup: Setup, weight: torch.Tensor, is_fp8: bool) -> ExpertWeights:
    biases = setup.random(*weight.shape[:2], seed=6) if setup.model.architecture.has_expert_bias else None
    if not is_fp8:
        return ExpertWeights(weight, biases=biases)
    parts = [scaled_linear.quantized(part) for part in weight]
    steps, scales = torch.stack([part.steps for part in parts]), torch.stack([part.scales for part in parts])
    return ExpertWeights(steps, scales, weight.shape[2], biases)


def reference_routes(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None) -> route.Routes:
    """The routes that the kernel must find, in torch."""
    wide = logits[:, : routing.num_experts].double()
    scores = wide.sigmoid() if routing.is_sigmoid else wide.softmax(-1)
    keys = torch_ops.in_top_groups(scores if correction is None else scores + correction, routing)
    chosen = keys.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    top = scores.gather(1, chosen)
    shares = top / top.sum(-1, keepdim=True) if routing.is_normalized else top
    return route.Routes(chosen.int(), (shares * routing.scale).float())


def _case(setup: Setup, experts: StackedExperts, num_tokens: int) -> Case:
    routing, activation_name = experts.routing, setup.model.activation
    x, logits = setup.random(num_tokens, HIDDEN), setup.random(num_tokens, routing.num_logits, seed=1)
    routes = reference_routes(logits, routing, experts.correction)
    is_fp8 = experts.down_weights.scales is not None

    def run(first: int, last: int) -> Outputs:
        part = x[first:last].clone(), logits[first:last].clone()
        chosen = route.route(part[1], routing, experts.correction)
        return {
            "experts": chosen.experts, "shares": chosen.shares,
            "output": compute_experts(*part, experts, activation_name),
        }  # fmt: skip

    return Case(
        "experts",
        f"{routing.num_experts} experts, {routing.top_k} per token, [{num_tokens}, {HIDDEN}], "
        f"{FP8 if is_fp8 else setup.dtype}",
        range(num_tokens + 1),
        run,
        {
            "experts": routes.experts,
            "shares": routes.shares,
            "output": _reference(x, routes, experts, activation_name) + _shared(x, logits, experts, activation_name),
        },
        # the inner numbers may be rounded to the other neighbour
        {"shares": 1e-4, "output": TOLERANCES[FP8] if is_fp8 else 2 * TOLERANCES[setup.dtype]},
    )


def _reference(x: torch.Tensor, routes: route.Routes, experts: StackedExperts, name: str) -> torch.Tensor:
    """The sums of the tokens' experts, in float64 but for the activation."""
    both = experts.gate_up_weights, experts.down_weights
    gate_up, down = map(_widened, both)
    biases = [torch.zeros(len(gate_up)) if one.biases is None else one.biases.double() for one in both]
    round_rows: Rounding = torch.Tensor.double if experts.down_weights.scales is None else _rounded
    found = []
    for row, chosen, shares in zip(round_rows(x), routes.experts.tolist(), routes.shares.double(), strict=True):
        outputs = (gate_up[expert] @ row + biases[0][expert] for expert in chosen)
        inner = [round_rows(activation.reference(output[None], name))[0] for output in outputs]
        terms = [down[expert] @ part + biases[1][expert] for expert, part in zip(chosen, inner, strict=True)]
        found.append((torch.stack(terms) * shares[:, None]).sum(0))
    return torch.stack(found)


def _shared(x: torch.Tensor, logits: torch.Tensor, experts: StackedExperts, name: str) -> torch.Tensor | float:
    """The output of the shared expert, as `_reference`."""
    if experts.shared is None:
        return 0.0
    gate_up, down = (part.widened().double() for part in (experts.shared.gate_up, experts.shared.down))
    output = activation.reference(x.double() @ gate_up.T, name) @ down.T
    return output * logits[:, -1:].double().sigmoid() if experts.routing.shared == "gated" else output


def _widened(weights: ExpertWeights) -> torch.Tensor:
    """The weights in float64."""
    if weights.scales is None:
        return weights.steps.double()
    pairs = zip(weights.steps, weights.scales, strict=True)
    return torch.stack([Fp8Weight(steps, scales, weights.group).widened() for steps, scales in pairs]).double()


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """x in fp8 with one scale per row, in float64."""
    rows = scaled_linear.reference_rows(x, x.shape[1])
    return rows.steps.double() * rows.scales.double()
