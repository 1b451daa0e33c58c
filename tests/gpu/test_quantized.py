"""Quantized checkpoints on the GPU engine: logits against transformers with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.builders import relative_error
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_forced, run_mixed, worst_error
from tests.unit.engine.driver import Driver
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.quantized import FORMATS, awq, compressed_packed, fp8, gptq, quantize_model
from tests.unit.engine.test_engine_models import check_against
from tests.unit.engine.test_engine_quantized import W8A8
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.checkpoint.quantized import order_of
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.linears.scaled_linear import reference_rows
from worker_svc.engine.gpu.layers import weights
from worker_svc.engine.gpu.layers.experts import compute_experts
from worker_svc.engine.gpu.layers.linears import DeviceLinears, Int4Linear, has_int4
from worker_svc.engine.gpu.start import setup
from worker_svc.engine.model_runner import ModelRunner

# Padding rows hold uninitialized memory; numpy warns about it where a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def deep(*cases):
    """Cases that only the deep tests run."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.deep) for case in cases]


CONVERTED = (
    "gptq-int4-act-order",
    "fp8-block",
    *deep("gptq-int8", "compressed-int8-channel"),
)  # fp8 in blocks of 48 inputs


@pytest.mark.parametrize("name", CONVERTED)
def test_formats_without_a_kernel_are_converted_at_load(tmp_path, name):
    folder = make_model(tmp_path / "model", "llama", **SMALL, **HEADS_4_2)
    plain = quantize_model(folder, FORMATS[name])
    driver = DeviceDriver(load(folder))
    run_mixed(driver)
    check_against(load_reference(plain), driver, [0, 1, 2])


FP8 = {
    "tensor": FORMATS["fp8-static"],
    "channel": FORMATS["compressed-fp8-channel"],
    "blocks": fp8(24),
}  # blocks of 32 inputs
GROUPS = {"tensor": None, "channel": None, "blocks": 32}
FLIPPED = 5e-3  # error if a few inputs are rounded to the other neighbour


def use_rounded_inputs(monkeypatch, group=None):
    """Layers in a float type round their inputs as the fp8 layers do, in torch. The head does not."""
    make = DeviceLinears.make_linear

    def make_rounding(self, weight, bias):
        layer = make(self, weight, bias)
        if len(weight) == SMALL["vocab_size"]:
            return layer

        def product(x, weight, bias):
            rows = reference_rows(x, group or x.shape[1])
            spread = rows.scales.repeat_interleave(group or x.shape[1], 1)[:, : x.shape[1]]
            return F.linear(rows.steps.float() * spread, weight, bias)

        return replace(layer, product=product)

    monkeypatch.setattr(DeviceLinears, "make_linear", make_rounding)


def forced(folder, **settings):
    driver = DeviceDriver(load(folder, **settings))
    run_forced(driver)
    return driver


@pytest.mark.parametrize(
    ("name", "determinism"),
    [
        ("tensor", "best_effort"),
        ("blocks", "exact"),
        *deep(("tensor", "exact"), ("channel", "exact"), ("blocks", "best_effort")),
    ],
)
def test_fp8_weights_are_multiplied_as_they_are_stored(tmp_path, monkeypatch, name, determinism):
    folder = make_model(tmp_path / "model", "qwen3", **SMALL, **HEADS_4_2)
    plain = quantize_model(folder, FP8[name])
    found = forced(folder, determinism=determinism)
    layer = found.runner._compute._model.parts.layers[0]
    assert layer.qkv.weight.steps.dtype is layer.feed_forward.down.weight.steps.dtype is torch.float8_e4m3fn
    assert "fp8 weights" in found.runner.info.numerics
    use_rounded_inputs(monkeypatch, GROUPS[name])
    assert worst_error(found, forced(plain, determinism=determinism)) < FLIPPED


def test_weights_rounded_to_fp8_at_load(tmp_path):
    folder = make_model(tmp_path / "model", "qwen2", **SMALL, **HEADS_4_2)
    rounded, whole = forced(folder, quantize="fp8"), forced(folder)
    assert rounded.runner.info.quantize == "fp8"
    assert rounded.runner.info.revision != whole.runner.info.revision
    layer = rounded.runner._compute._model.parts.layers[1].feed_forward.down
    assert relative_error(layer.widened(), whole.runner._compute._model.parts.layers[1].feed_forward.down.weight) < 0.04
    assert 0 < worst_error(rounded, whole) < 0.2


def test_devices_without_fp8(tmp_path, monkeypatch):
    """A checkpoint is converted there; rounding to fp8 is refused."""
    for module in (setup, weights):
        monkeypatch.setattr(module, "has_fp8", lambda device: False)
    folder = make_model(tmp_path / "model", "qwen3", **SMALL, **HEADS_4_2)
    with pytest.raises(BackendUnavailableError, match=r"quantize fp8 needs a GPU of compute capability 8\.9"):
        load(folder, quantize="fp8")
    quantize_model(folder, FP8["blocks"])
    loaded = load(folder)
    assert loaded._compute._model.parts.layers[0].qkv.weight.dtype is torch.float32
    assert "fp8" not in loaded.info.numerics


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int8_weights_are_multiplied_as_they_are_stored(tmp_path, kernels):
    """The CPU's int8 layers have the same inputs up to the rounding of other layers."""
    folder = make_model(tmp_path / "model", "llama", **SMALL | HEADS_4_2 | {"num_hidden_layers": 1})
    quantize_model(folder, W8A8)
    driver = DeviceDriver(load(folder, determinism="exact", kernels=kernels))
    layer = driver.runner._compute._model.parts.layers[0]
    assert layer.qkv.weight.steps.dtype is layer.feed_forward.down.weight.steps.dtype is torch.int8
    assert "int8 weights" in driver.runner.info.numerics
    run_forced(driver)
    on_cpu = Driver(ModelRunner(EngineConfig(folder, backend="reference", num_blocks=64, max_num_seqs=5)))
    run_forced(on_cpu)
    assert worst_error(driver, on_cpu) < FLIPPED


def test_weights_rounded_to_int8_at_load(tmp_path):
    folder = make_model(tmp_path / "model", "qwen2", **SMALL, **HEADS_4_2)
    rounded, whole = forced(folder, quantize="int8", kernels="torch"), forced(folder, kernels="torch")
    assert (rounded.runner.info.quantize, "int8 weights" in rounded.runner.info.numerics) == ("int8", True)
    assert rounded.runner.info.revision != whole.runner.info.revision
    layers = [driver.runner._compute._model.parts.layers[1].feed_forward.down for driver in (rounded, whole)]
    assert relative_error(layers[0].widened(), layers[1].weight) < 0.01
    assert 0 < worst_error(rounded, whole) < 0.05
    experts = make_model(tmp_path / "experts", "mixtral", **SMALL, **HEADS_4_2)
    with pytest.raises(BackendUnavailableError, match="quantize int8 does not serve experts on a GPU; use --quantize"):
        load(experts, quantize="int8")


INT4 = {
    "gptq": gptq(4, 32), "gptq act-order": gptq(4, 64, order=True), "gptq one group": gptq(4, -1, symmetric=True),
    "awq": awq(64), "compressed": compressed_packed(4, 128),
    "compressed act-order": compressed_packed(4, 32, order=True),
}  # fmt: skip
SIZES = SMALL | HEADS_4_2 | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


ALL_INT4 = [(name, mode) for name in INT4 for mode in ("exact", "best_effort")]
CHOSEN_INT4 = [("gptq act-order", "exact"), ("awq", "best_effort"), ("compressed", "exact")]


@pytest.mark.parametrize(
    ("name", "determinism"), [*CHOSEN_INT4, *deep(*[case for case in ALL_INT4 if case not in CHOSEN_INT4])]
)
def test_int4_weights_are_multiplied_as_they_are_stored(tmp_path, name, determinism):
    folder = make_model(tmp_path / "model", "llama", **(SIZES | {"num_hidden_layers": 1, "attention_bias": True}))
    plain = quantize_model(folder, INT4[name])
    driver = DeviceDriver(load(folder, determinism=determinism))
    layer = driver.runner._compute._model.parts.layers[0]
    kept = [layer.o, layer.feed_forward.down]
    # with act-order, layers whose inputs have other groups are converted
    kept += [] if "order" in name else [layer.qkv, layer.feed_forward.gate_up]
    assert all(isinstance(linear, Int4Linear) for linear in kept)
    assert "int4 weights" in driver.runner.info.numerics
    run_mixed(driver)
    check_against(load_reference(plain), driver, [0, 1, 2])


def test_an_fp8_cache_with_int4_weights(tmp_path):
    """Its scales come from the weights."""
    folder = make_model(tmp_path / "model", "llama", **SIZES)
    plain = quantize_model(folder, INT4["awq"])
    found, expected = (load(path, kv_cache_dtype="fp8")._compute._model.kv_scales for path in (folder, plain))
    assert all(torch.equal(*scales) for scales in zip(found, expected, strict=True))


def test_what_an_int4_kernel_does_not_serve_is_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "has_int4", lambda dtype, device: False)
    folder = make_model(tmp_path / "model", "llama", **(SIZES | {"num_hidden_layers": 1}))
    quantize_model(folder, INT4["awq"])
    loaded = load(folder)
    assert loaded._compute._model.parts.layers[0].qkv.weight.dtype is torch.float32
    assert "int4" not in loaded.info.numerics
    cuda = torch.device("cuda")
    assert not has_int4(torch.float32, cuda)
    assert has_int4(torch.float16, cuda)


SHARDED = {
    "int8 channel": W8A8,
    "fp8 tensor": fp8(None), "fp8 channel": FORMATS["compressed-fp8-channel"], "fp8 blocks": fp8(24), "int4": awq(64),
    "int4 one group": gptq(4, -1), "int4 act-order": gptq(4, 64, order=True),
}  # fmt: skip


def shard(folder, rank, size):
    """A layer and the head of one rank."""
    checkpoint = Checkpoint(folder)
    config = parse_config(checkpoint.config)
    linears, cpu = DeviceLinears("exact", torch.float32), torch.device("cpu")
    loader = weights.ShardLoader(checkpoint, config, linears, torch.float32, cpu, Group(rank, size))
    return loader.layer(0), loader.head(), loader.formats


@pytest.mark.parametrize("name", SHARDED)
def test_ranks_hold_the_parts_of_quantized_weights(tmp_path, name):
    """Joined, they are the weight of a float checkpoint: outputs of gate, up and the head, inputs of o and down."""
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    folder = make_model(tmp_path / "model", "llama", **(sizes | {"vocab_size": 96}))
    target = replace(SHARDED[name], fields=SHARDED[name].fields | {"modules_to_not_convert": [], "ignore": []})
    plain = quantize_model(folder, target, lambda name: name.endswith(("proj.weight", "lm_head.weight")))
    layer, head, _ = shard(plain, 0, 1)
    parts, heads, formats = zip(*(shard(folder, rank, 2) for rank in (0, 1)), strict=True)
    assert formats == ({name.split()[0]},) * 2
    for whole, found in (
        (layer.o, [part.o.widened() for part in parts]),
        (layer.feed_forward.down, [part.feed_forward.down.widened() for part in parts]),
    ):
        assert torch.allclose(torch.cat(found, 1), whole.weight, atol=1e-6)
    halves = [part.feed_forward.gate_up.widened().chunk(2) for part in parts]
    joined = torch.cat([half[kind] for kind in (0, 1) for half in halves])
    assert torch.allclose(joined, layer.feed_forward.gate_up.weight, atol=1e-6)
    assert torch.allclose(torch.cat([part.widened() for part in heads]), head.weight, atol=1e-6)


def test_ranks_hold_the_parts_of_experts(tmp_path):
    folder = make_model(tmp_path / "model", "mixtral", **(SIZES | {"num_hidden_layers": 1, "num_local_experts": 3}))
    plain = quantize_model(
        folder, replace(fp8(24), fields=fp8(24).fields | {"modules_to_not_convert": ["gate", "lm_head"]})
    )
    experts = shard(plain, 0, 1)[0].feed_forward.experts
    parts = [shard(folder, rank, 2)[0].feed_forward for rank in (0, 1)]
    for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        halves = [part.experts.gate_up[number].widened().chunk(2) for part in parts]
        assert torch.allclose(torch.cat([half[kind] for kind in (0, 1) for half in halves]), gate_up.weight, atol=1e-6)
        joined = torch.cat([part.experts.down[number].widened() for part in parts], 1)
        assert torch.allclose(joined, down.weight, atol=1e-6)
    assert torch.equal(parts[0].router.weight, parts[1].router.weight)


@pytest.mark.parametrize("form", [forms.TRITON, forms.TORCH], ids=["triton", "torch"])
def test_ranks_hold_whole_experts_if_each_gets_equally_many(tmp_path, form):
    """The sum of what the ranks compute is what one rank computes; an odd intermediate size needs not be divided."""
    sizes = SIZES | {"num_hidden_layers": 1, "num_local_experts": 4, "intermediate_size": 49}
    folder = make_model(tmp_path / "model", "mixtral", **sizes)
    x = torch.randn(9, sizes["hidden_size"], generator=torch.Generator().manual_seed(3))
    outputs = []
    for rank, size in ((0, 1), (0, 2), (1, 2), (2, 4)):
        part = shard(folder, rank, size)[0].feed_forward
        with forms.using(form):
            outputs.append(compute_experts(x, part.logits(x), part.experts, "silu"))
        assert len(part.experts.down) == 4 // size
        assert {linear.weight.shape[1] for linear in part.experts.down} == {49}
    torch.testing.assert_close(outputs[1] + outputs[2], outputs[0])
    assert not torch.equal(outputs[3], outputs[2])


def test_inputs_are_sorted_only_by_equal_groups_of_one_size():
    groups, other = torch.tensor([1, 0, 0, 1]), torch.tensor([0, 1, 1, 0])
    assert order_of([groups, groups], 2).tolist() == [1, 2, 0, 3]
    assert len(order_of([torch.tensor([0, 0, 1, 1])], 2)) == 0
    assert order_of([groups, other], 2) is None
    assert order_of([torch.tensor([0, 0, 0, 1])], 2) is None
