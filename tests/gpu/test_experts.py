"""Experts on the GPU engine: routing, tiles and products against torch, and whole models against transformers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.gpu.checks.experts import reference_routes
from tests.gpu.builders import DEVICE, relative_error
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_forced, run_mixed, worst_error
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.quantized import fp8, gptq, quantize_model
from tests.unit.engine.test_engine_models import check_against
from tests.unit.engine.test_engine_quantized import packed_in_mxfp4
from worker_svc.engine.backend import ExpertLinears, Routing
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.decoder.layer import FeedForward
from worker_svc.engine.gpu.kernels import activation, route
from worker_svc.engine.gpu.kernels.linears import expert_linear
from worker_svc.engine.gpu.kernels.linears.expert_linear import ExpertWeights
from worker_svc.engine.gpu.kernels.linears.scaled_linear import Fp8Weight, quantized
from worker_svc.engine.gpu.layers.experts import StackedExperts, compute_experts, torch_experts
from worker_svc.engine.gpu.layers.linears import DeviceLinears

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def random(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("has_correction", [True, False])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(5, 2, True),
        Routing(128, 8, True, scale=2.5),
        Routing(4, 4, True, shared="whole"),
        Routing(1, 1, True),
        Routing(9, 3, True, is_sigmoid=True, num_groups=3, top_groups=2, shared="gated"),
        Routing(48, 6, True, is_sigmoid=True, num_groups=6, top_groups=2, group_best=3, scale=0.5),
        Routing(6, 2, True, num_groups=6, top_groups=3, group_best=1),
    ],
)
def test_experts_are_chosen_as_in_torch(routing, has_correction, is_normalized):
    routing = replace(routing, is_normalized=is_normalized)
    logits = random(9, routing.num_logits)
    logits[3] = 0.25  # all are equal: the lowest indices
    correction = random(routing.num_experts, seed=1) if has_correction else None
    found = route.route(logits, routing, correction)
    expected = reference_routes(logits, routing, correction)
    assert torch.equal(found.experts, expected.experts)
    assert torch.allclose(found.shares, expected.shares, atol=1e-6)
    shares, chosen = torch_ops.route(logits.cpu(), routing, None if correction is None else correction.cpu())
    assert torch.equal(found.experts.cpu(), chosen[:, : routing.top_k].int())
    assert torch.allclose(found.shares.cpu(), shares[:, : routing.top_k], atol=1e-6)


def test_rows_of_padding_choose_experts_that_exist():
    logits = random(4, 6)
    logits[0], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    found = route.route(logits, Routing(6, 3, True), None)
    for row in found.experts.tolist():
        assert len(set(row)) == 3
        assert all(0 <= expert < 6 for expert in row)
    assert found.shares[3].sum().item() == pytest.approx(1)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 70, 700])
def test_tiles_hold_each_pair_once_with_its_expert(monkeypatch, num_tokens, tile_rows):
    monkeypatch.setattr(route, "BLOCK", 256)
    chosen = np.random.default_rng(0).integers(0, 7, (num_tokens, 2), dtype=np.int32)
    chosen[chosen == 4] = 5  # an expert without pairs
    tiles = route.group(torch.from_numpy(chosen).to(DEVICE), 7, tile_rows)
    lines = tiles.pairs.view(-1, tile_rows)[: int(tiles.num_tiles)].tolist()
    seen = []
    for line, expert in zip(lines, tiles.experts.tolist(), strict=False):
        pairs = [pair for pair in line if pair < tiles.num_pairs]
        assert line == pairs + [tiles.num_pairs] * (tile_rows - len(pairs))
        assert pairs
        assert {int(chosen.flat[pair]) for pair in pairs} == {expert}
        seen += pairs
    assert sorted(seen) == list(range(tiles.num_pairs))
    assert len(lines) <= len(tiles.experts)


def make_experts(
    num_experts, hidden, inner, top_k, *, determinism="exact", dtype=torch.float32, scales=None, kind="none"
):
    """`scales`: row or group, for experts in fp8. `kind`: of the shared expert."""
    linears = DeviceLinears(determinism, dtype)
    weights, views = [], []
    for seed, (out_size, in_size) in enumerate([(2 * inner, hidden), (hidden, inner)]):
        parts = [random(out_size, in_size, seed=10 * seed + i, dtype=dtype) * in_size**-0.5 for i in range(num_experts)]
        if scales is None:
            weights.append(ExpertWeights(torch.stack(parts)))
            views.append([linears.make_linear(part, None) for part in weights[-1].steps])
            continue
        group = 32 if scales == "group" else in_size
        rows = [fp8_weight(part, group) for part in parts]
        stacked = (torch.stack([getattr(row, field) for row in rows]) for field in ("steps", "scales"))
        weights.append(ExpertWeights(*stacked, group))
        views.append([linears.make_fp8_linear(row, None) for row in rows])
    routing = Routing(num_experts, top_k, True, shared=kind)
    shared = None
    if kind != "none":
        sizes = (random(2 * inner + 16, hidden, seed=3, dtype=dtype), random(hidden, inner + 8, seed=4, dtype=dtype))
        shared = FeedForward(*(linears.make_linear(weight * weight.shape[1] ** -0.5, None) for weight in sizes))
    return StackedExperts(*views, routing, None, True, *weights, determinism == "exact", shared=shared)


def fp8_weight(weight, group):
    if group == weight.shape[1]:
        return quantized(weight)
    parts = [quantized(part) for part in weight.split(group, 1)]
    return Fp8Weight(torch.cat([part.steps for part in parts], 1), torch.cat([part.scales for part in parts]), group)


def activated(gate_up, out, name):
    out.copy_(activation.reference(gate_up, name))


def with_shared(experts):
    """The linear layers of the experts, the shared one last."""
    if experts.shared is None:
        return experts.gate_up, experts.down
    return [*experts.gate_up, experts.shared.gate_up], [*experts.down, experts.shared.down]


@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
@pytest.mark.parametrize("scales", [None, "row", "group"])
@pytest.mark.parametrize("kind", ["none", "whole", "gated"])
def test_sums_of_experts_match_torch(determinism, scales, kind):
    experts = make_experts(6, 64, 96, 3, determinism=determinism, scales=scales, kind=kind)
    x, logits = random(9, 64), random(9, experts.routing.num_logits, seed=1)
    found = compute_experts(x, logits, experts, "silu")
    expected = torch.empty_like(x)
    whole = ExpertLinears(*with_shared(experts), experts.routing, None, is_gated=True)
    torch_ops.experts(x, logits, whole, SimpleNamespace(gated_activation=activated), "silu", expected)
    assert relative_error(torch_experts(x, logits, experts, "silu"), expected) < (1e-6 if scales is None else 0.01)
    assert relative_error(found, expected) < (1e-6 if scales is None else 0.01)


@pytest.mark.parametrize("shape", [expert_linear.FEW_ROWS, expert_linear.MANY_ROWS])
def test_all_tile_shapes_give_the_same_sums(monkeypatch, shape):
    experts = make_experts(3, 48, 40, 2, dtype=torch.float16)
    x, logits = random(40, 48, dtype=torch.float16), random(40, 3, seed=1)
    exact = compute_experts(x, logits, experts, "gelu_tanh")
    monkeypatch.setattr("worker_svc.engine.gpu.layers.experts.shape_for", lambda *_, **__: shape)
    assert relative_error(compute_experts(x, logits, experts, "gelu_tanh"), exact) < 1e-3


def test_shapes_follow_the_pairs_of_an_expert():
    cpu = torch.device("cpu")
    chosen = [
        expert_linear.shape_for(pairs, 8, torch.float16, cpu, is_exact=False).rows for pairs in (2, 128, 129, 512, 513)
    ]
    assert chosen == [16, 16, 64, 64, 128]
    assert expert_linear.shape_for(2, 8, torch.float16, cpu, is_exact=True) == expert_linear.EXACT


def test_a_token_has_the_same_bits_alone_in_exact_mode():
    experts = make_experts(4, 64, 40, 2, kind="gated")
    x, logits = random(150, 64), random(150, 5, seed=1)
    whole = compute_experts(x, logits, experts, "silu")
    for row in (0, 149):
        assert torch.equal(compute_experts(x[row : row + 1], logits[row : row + 1], experts, "silu")[0], whole[row])


MODELS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 5, "sliding_window": None},
}
SCORED = ("qwen2_moe", "glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe", "granite_moe_shared", "gpt_oss")


@pytest.fixture
def folder(tmp_path, request):
    if request.param in SCORED:
        return make_model(tmp_path / "model", request.param)
    return make_model(tmp_path / "model", request.param, **SMALL, **HEADS_4_2, **MODELS[request.param])


@pytest.mark.parametrize(
    ("folder", "determinism", "kernels"),
    [
        ("qwen3_moe", "exact", "triton"),
        ("mixtral", "best_effort", "triton"),
        pytest.param("qwen3_moe", "best_effort", "triton", marks=pytest.mark.deep),
        pytest.param("mixtral", "exact", "triton", marks=pytest.mark.deep),
        *((name, "exact", "torch") for name in SCORED),
        *(pytest.param(name, "exact", "triton", marks=pytest.mark.deep) for name in SCORED),
    ],
    indirect=["folder"],
)
def test_models_of_experts_match_transformers(folder, determinism, kernels):
    driver = DeviceDriver(load(folder, determinism=determinism, kernels=kernels))
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_experts_in_fp8_and_in_a_converted_format(folder, tmp_path):
    whole = DeviceDriver(load(folder))
    rounded = DeviceDriver(load(folder, quantize="fp8"))
    for driver in (whole, rounded):
        run_forced(driver)
    experts = rounded.runner._compute._model.parts.layers[0].feed_forward.experts
    assert experts.down_weights.steps.dtype is torch.float8_e4m3fn
    assert 0 < worst_error(rounded, whole) < 0.3
    plain = quantize_model(folder, gptq(4, 8))
    driver = DeviceDriver(load(folder))
    run_mixed(driver)
    check_against(load_reference(plain), driver, [0, 1, 2])


@pytest.mark.parametrize("folder", ["qwen3_moe"], indirect=True)
def test_stored_fp8_experts(folder):
    fields = fp8(None).fields | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}
    plain = quantize_model(folder, replace(fp8(None), fields=fields))
    found, expected = DeviceDriver(load(folder)), DeviceDriver(load(plain))
    for driver in (found, expected):
        run_forced(driver)
    experts = found.runner._compute._model.parts.layers[0].feed_forward.experts
    assert experts.gate_up_weights.steps.dtype is torch.float8_e4m3fn
    layer = expected.runner._compute._model.parts.layers[0].feed_forward.experts
    for number, view in enumerate(experts.gate_up):
        assert torch.allclose(view.widened(), layer.gate_up_weights.steps[number], rtol=1e-6)
    assert 0 < worst_error(found, expected) < 0.3


def test_experts_in_mxfp4_are_widened(tmp_path):
    unpacked, packed = make_model(tmp_path / "unpacked", "gpt_oss", intermediate_size=128), tmp_path / "packed"
    packed_in_mxfp4(unpacked, packed)
    driver = DeviceDriver(load(packed))
    run_mixed(driver)
    check_against(load_reference(unpacked), driver, [0, 1, 2])
