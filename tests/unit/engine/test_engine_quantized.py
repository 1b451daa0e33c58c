"""Quantized checkpoints: weights against numpy, logits against transformers with the same weights, and refusals."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.quantized import (
    FORMATS,
    TOKEN_INPUTS,
    awq,
    compressed_int8,
    compressed_packed,
    fp8,
    gptq,
    quantize_model,
)
from tests.unit.engine.test_engine_models import check_against, load, prompts
from worker_svc.check_model import check_model
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.quantization_config import parse_quantization
from worker_svc.engine.checkpoint.quantized import read_weight
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.kernels.torch_linear import Int8Linear, Int8Rows

SHAPES = [(72, 104), (8, 40), (40, 200)]
LAYER = "model.layers.0.self_attn.q_proj"
W8A8 = compressed_int8("channel", TOKEN_INPUTS)


def checkpoint_of(folder, tensors):
    """A folder with the tensors of one layer."""
    (folder / "config.json").write_text("{}")
    save_file({f"{LAYER}.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def scheme_of(fields):
    return parse_quantization({"quantization_config": fields}).scheme_of(LAYER)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_equal_those_of_numpy(tmp_path, name, shape):
    tensors, weight = FORMATS[name].pack(np.random.default_rng(1), *shape)
    found = read_weight(checkpoint_of(tmp_path, tensors), LAYER, scheme_of(FORMATS[name].fields), shape)
    assert found.dtype is torch.float32
    np.testing.assert_array_equal(found.numpy(), weight)


COMPRESSED = {
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (72, 1)),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (72, 1)),
    "fp8 blocks": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 26]}, (3, 4),
    ),
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 26}, (72, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_tensors_of_the_compressed_tensors_library_are_read(tmp_path, name):
    format_name, fields, shape = COMPRESSED[name]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(72, 104, generator=generator)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fields))
    compressor = BaseCompressor.get_value_from_registry(format_name)
    state = {"weight": weight, "weight_scale": torch.rand(shape, generator=generator) / 100 + 0.01}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": format_name}
    config["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    found = read_weight(checkpoint_of(tmp_path, stored), LAYER, scheme_of(config), (72, 104))
    assert torch.equal(found, expected)


PARITY = ("gptq-int4-act-order", "awq", "fp8-block", "compressed-int8-channel", "compressed-fp8-tensor")


@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_match_transformers_with_the_same_weights(tmp_path, name, backend):
    folder = make_model(tmp_path / "model", "llama", intermediate_size=104)
    check_parity(folder, quantize_model(folder, FORMATS[name]), backend)


def test_fused_tensors_experts_and_a_quantized_head(tmp_path):
    folder = make_model(tmp_path / "phi3", "phi3", sliding_window=None)
    everything = fp8(32).fields | {"modules_to_not_convert": []}
    plain = quantize_model(
        folder, type(W8A8)(everything, fp8(32).pack), lambda name: "proj" in name or "lm_head" in name
    )
    check_parity(folder, plain, "cpu")
    folder = make_model(tmp_path / "mixtral", "mixtral", sliding_window=None)
    check_parity(folder, quantize_model(folder, gptq(4, 48)), "cpu")


def test_layers_that_config_json_does_not_list_may_be_in_a_float_type(tmp_path):
    """transformers leaves heads and routers as they are."""
    target = fp8(40)
    del target.fields["modules_to_not_convert"]
    for architecture, backend in (("llama", "reference"), ("qwen3_moe", "cpu")):
        folder = make_model(tmp_path / architecture, architecture)
        check_parity(folder, quantize_model(folder, target), backend)


def check_parity(folder, plain, backend):
    driver = Driver(load(folder, backend=backend))
    for row, prompt in enumerate(prompts([1, 33, 70])):
        driver.open(row, prompt)
    driver.step({0: 1, 1: 20, 2: 40})
    driver.step({1: 13, 2: 30, 0: 1})
    driver.decode([0, 1, 2], 3)
    assert driver.errors == []
    check_against(load_reference(plain), driver, [0, 1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_int8_weights_are_multiplied_as_they_are(kernel_build, dtype):
    generator = torch.Generator().manual_seed(0)
    for out_size, in_size in ((57, 33), (1, 3), (64, 1030)):
        steps = torch.randint(-128, 128, (out_size, in_size), generator=generator, dtype=torch.int8)
        rows = Int8Rows(steps, torch.rand(out_size, generator=generator))
        bias = torch.randn(out_size, generator=generator).to(dtype)
        x = torch.randn(70, in_size, generator=generator).to(dtype)
        found = make_backend("cpu", 2, "exact").make_int8_linear(rows, bias)(x)
        assert torch.equal(found, Int8Linear(rows, bias)(x))
        top = x.float().abs().amax(1, keepdim=True) / 127
        expected = ((x.float() / top).round() * top).double() @ (steps.double() * rows.scales.double()[:, None]).T
        tolerance = expected.abs().max() * (0.005 if dtype is torch.float32 else 0.02)
        assert (found.double() - expected - bias.double()).abs().max() < tolerance


def test_int8_with_dynamic_inputs_uses_the_int8_kernel(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "model", "qwen2")
    plain = quantize_model(folder, W8A8)
    calls = []
    real = Int8Linear.__init__
    monkeypatch.setattr(Int8Linear, "__init__", lambda self, *args: (calls.append(args), real(self, *args))[1])
    logits = {}
    for backend in ("cpu", "reference"):
        driver = Driver(load(folder, backend=backend))
        driver.open(0, prompts([40])[0])
        driver.step({0: 40})
        logits[backend] = driver.logits[0, 40]
    assert len(calls) == 2 * 4
    assert all(isinstance(args[0], Int8Rows) for args in calls)
    with torch.no_grad():
        expected = load_reference(plain)(torch.tensor([prompts([40])[0]])).logits[0, -1]
    for found in logits.values():
        assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert (logits["cpu"] - logits["reference"]).norm() < 0.01 * expected.norm()


def test_experts_of_different_types_are_computed_one_by_one(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3_moe")
    fields = W8A8.fields | {"ignore": ["lm_head", r"re:.*\.gate$", r"re:.*experts\.[13]\.", r"re:.*layers\.[01]\."]}
    plain = quantize_model(
        folder, type(W8A8)(fields, W8A8.pack), lambda name: "layers.2" in name and "mlp.gate." not in name
        and "norm" not in name and not any(f"experts.{i}." in name for i in (1, 3))
    )  # fmt: skip
    driver = Driver(load(folder))
    assert driver.runner._model._fused is None
    driver.open(0, prompts([40])[0])
    driver.step({0: 40})
    with torch.no_grad():
        expected = load_reference(plain)(torch.tensor([prompts([40])[0]])).logits[0, -1]
    assert (driver.logits[0, 40] - expected).norm() < 0.05 * expected.norm()


def change(fields, path, value):
    """A copy of a configuration with one field changed, named by its path."""
    fields = copy.deepcopy(fields)
    *parents, last = path.split(".")
    target = fields
    for parent in parents:
        target = target[parent]
    target[last] = value
    return fields


GROUP = "config_groups.group_0."
REFUSED = {
    "method": (gptq(4, 32), "quant_method", "bitsandbytes", "compressed-tensors, fp8, gptq, awq"),
    "gptq bits": (gptq(4, 32), "bits", 3, "supported: 4, 8"),
    "gptq marlin": (gptq(4, 32), "checkpoint_format", "marlin", "supported: gptq, gptq_v2"),
    "gptq marlin flag": (gptq(4, 32), "is_marlin_format", True, "supported: False"),
    "gptq overrides": (gptq(4, 32), "dynamic", {"-:.*": {}}, "not supported"),
    "gptq group": (gptq(4, 32), "group_size", 0, "positive integer"),
    "awq bits": (awq(32), "bits", 8, "supported: 4"),
    "awq layout": (awq(32), "version", "gemv", "supported: gemm"),
    "awq backend": (awq(32), "backend", "llm-awq", "supported: autoawq"),
    "awq symmetric": (awq(32), "zero_point", False, "supported: True"),
    "awq list": (awq(32), "modules_to_not_convert", "lm_head", "list of names"),
    "fp8 scheme": (fp8(32), "activation_scheme", "per_head", "supported: dynamic, static"),
    "fp8 e5m2": (fp8(32), "fmt", "e5m2", "supported: e4m3"),
    "fp8 block": (fp8(32), "weight_block_size", [128], "two positive integers"),
    "sparse": (W8A8, "format", "marlin-24", "supported: int-quantized"),
    "nvfp4": (W8A8, "format", "nvfp4-pack-quantized", "supported: int-quantized"),
    "2:4": (W8A8, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format"),
    "rotations": (W8A8, "transform_config", {"config_groups": {"a": {}}}, "not supported"),
    "kv scales": (W8A8, "kv_cache_scheme", {"num_bits": 8}, "not supported"),
    "pattern": (W8A8, "ignore", ["re:("], "not a valid regular expression"),
    "no groups": (W8A8, "config_groups", {}, "object of objects"),
    "static inputs": (W8A8, GROUP + "input_activations.dynamic", False, "supported: True"),
    "outputs": (W8A8, GROUP + "output_activations", {"num_bits": 8}, "not supported"),
    "asymmetric": (W8A8, GROUP + "weights.symmetric", False, "supported: True"),
    "weight bits": (W8A8, GROUP + "weights.num_bits", 4, "supported: 8"),
    "weights": (W8A8, GROUP + "weights", None, "must be an object"),
    "inputs": (W8A8, GROUP + "input_activations", True, "must be an object"),
    "sparsity": (W8A8, "sparsity_config", "2:4", "must be an object"),
    "strategy": (W8A8, GROUP + "weights.strategy", "attn_head", "supported: tensor, channel, group, block"),
    "packed bits": (compressed_packed(4, 32), GROUP + "weights.num_bits", 3, "supported: 4, 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_with_its_value(name):
    target, path, value, supported = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        parse_quantization({"quantization_config": change(target.fields, path, value)})
    for part in ("quantization_config." + path, supported):
        assert part in str(caught.value)


def test_a_configuration_that_is_no_object_is_refused():
    assert parse_quantization({}) is parse_quantization({"quantization_config": None}) is None
    with pytest.raises(CheckpointError, match="must be a JSON object"):
        parse_quantization({"quantization_config": "int8"})


BAD_TENSORS = {
    "qweight shape": ("gptq-int4", "qweight", lambda x: x[1:]),
    "qweight dtype": ("gptq-int4", "qweight", lambda x: x.float()),
    "zeros shape": ("gptq-int4", "qzeros", lambda x: x[:, 1:]),
    "scales shape": ("gptq-int4", "scales", lambda x: x[:-1]),
    "scales dtype": ("awq", "scales", lambda x: x.to(torch.int16)),
    "scales infinite": ("awq", "scales", lambda x: x * float("inf")),
    "group too high": ("gptq-int4-act-order", "g_idx", lambda x: x + 1),
    "group negative": ("gptq-int4-act-order", "g_idx", lambda x: x - 1),
    "group dtype": ("gptq-int4", "g_idx", lambda x: x.float()),
    "int8 dtype": ("compressed-int8-channel", "weight", lambda x: x.to(torch.uint8)),
    "fp8 type": ("fp8-block", "weight", lambda x: x.view(torch.int8).view(torch.float8_e5m2)),
    "block scales": ("fp8-block", "weight_scale_inv", lambda x: x.T.contiguous()[:1]),
    "original shape": ("compressed-int4", "weight_shape", lambda x: x + 1),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_bad_tensor_is_named(tmp_path, name):
    format_name, suffix, corrupt = BAD_TENSORS[name]
    tensors, _ = FORMATS[format_name].pack(np.random.default_rng(1), 72, 104)
    checkpoint = checkpoint_of(tmp_path, tensors | {suffix: corrupt(tensors[suffix]).contiguous()})
    with pytest.raises(CheckpointError, match=rf"tensor {LAYER}\.{suffix} "):
        read_weight(checkpoint, LAYER, scheme_of(FORMATS[format_name].fields), (72, 104))


def test_folders_are_checked_before_they_are_loaded(tmp_path, rewrite_config):
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    quantize_model(folder, FORMATS["compressed-int8-channel"])
    check_model(folder)
    rewrite_config(folder, quantization_config=gptq(2, 32).fields)
    with pytest.raises(CheckpointError, match=r"quantization_config\.bits: 2"):
        check_model(folder)
    rewrite_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"\.weight is stored as I8"):
        check_model(folder)
    with pytest.raises(CheckpointError, match=r"tensors are unexpected, first .*weight_scale"):
        load(folder)


def test_backends_and_models_with_quantized_weights(tmp_path, rewrite_config):
    folder = make_model(tmp_path / "llama", "llama")
    rewrite_config(folder, quantization_config=W8A8.fields)
    config = json.loads((folder / "config.json").read_text())
    check_features(parse_config(config).features(), "cuda")
    with pytest.raises(CheckpointError, match="quantized checkpoints of GPT-2 are not supported"):
        parse_config(config | {"architectures": ["GPT2LMHeadModel"]})


def test_the_revision_covers_scales_and_configuration(tmp_path, rewrite_config):
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    quantize_model(folder, FORMATS["compressed-int8-channel"])
    revisions = [load(folder).info.revision]
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.weight_scale"][0] *= 1.5
    save_file(tensors, folder / "model.safetensors")
    revisions.append(load(folder).info.revision)
    rewrite_config(folder, quantization_config=W8A8.fields)
    revisions.append(load(folder).info.revision)
    assert len(set(revisions)) == 3


def test_unpacked_weights_can_be_rounded_to_int8(tmp_path):
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    plain = quantize_model(folder, FORMATS["gptq-int4"])
    found = []
    for path in (folder, plain):
        driver = Driver(load(path, quantize="int8"))
        driver.open(0, prompts([20])[0])
        driver.step({0: 20})
        found.append(driver.logits[0, 20])
    assert torch.equal(*found)


def packed_in_mxfp4(unpacked, packed):
    """Writes random experts in MXFP4 to `packed`, and as transformers converts them to `unpacked`."""
    shutil.copytree(unpacked, packed)
    tensors, rng = load_file(unpacked / "model.safetensors"), np.random.default_rng(0)
    quantized = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors[name].shape
        blocks = torch.from_numpy(rng.integers(0, 256, (count, outputs, inputs // 32, 16)).astype(np.uint8))
        scales = torch.from_numpy(rng.integers(121, 126, (count, outputs, inputs // 32)).astype(np.uint8))
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=tensors[name].dtype).contiguous()
    save_file(tensors, unpacked / "model.safetensors", {"format": "pt"})
    save_file(quantized, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    fields = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_experts_in_mxfp4_have_the_weights_of_transformers(tmp_path, backend):
    unpacked, packed = make_model(tmp_path / "unpacked", "gpt_oss", intermediate_size=128), tmp_path / "packed"
    packed_in_mxfp4(unpacked, packed)
    driver = Driver(load(packed, backend=backend))
    driver.open(0, prompts([40])[0])
    driver.prefill(0)
    driver.decode([0], 3)
    check_against(load_reference(unpacked), driver, [0])
    if backend == "reference":
        return
    found = [layer.feed_forward.experts for layer in driver.runner._model.parts.layers]
    linears = [linear for experts in found for linear in (*experts.gate_up, *experts.down)]
    num_weights = 2 * 5 * 3 * 64 * 128  # 2 layers with 5 experts
    assert sum(linear.packed.nbytes for linear in linears) == 4.25 / 8 * num_weights
    assert driver.runner._model._fused is not None
