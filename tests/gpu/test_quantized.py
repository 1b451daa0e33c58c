"""Quantized checkpoints on the GPU engine: logits against transformers with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.builders import relative_error
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_forced, run_mixed, worst_error
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.quantized import FORMATS, fp8, quantize_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu import runner, weights
from worker_svc.engine.gpu.kernels.scaled_linear import reference_rows
from worker_svc.engine.gpu.linears import DeviceLinears

# Padding rows hold uninitialized memory; numpy warns about it where a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CONVERTED = ("gptq-int4-act-order", "awq", "fp8-block", "compressed-int8-channel")  # fp8 in blocks of 48 inputs


@pytest.mark.parametrize("name", CONVERTED)
def test_formats_without_a_kernel_are_converted_at_load(tmp_path, name):
    folder = make_model(tmp_path / "model", "llama", **SMALL, **HEADS_4_2)
    plain = quantize_model(folder, FORMATS[name])
    driver = DeviceDriver(load(folder))
    run_mixed(driver)
    check_against(load_reference(plain), driver, [0, 1, 2])


FP8 = {"tensor": fp8(None), "channel": FORMATS["compressed-fp8-channel"], "blocks": fp8(24)}  # blocks of 32 inputs
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


@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
@pytest.mark.parametrize("name", FP8)
def test_fp8_weights_are_multiplied_as_they_are_stored(tmp_path, monkeypatch, name, determinism):
    folder = make_model(tmp_path / "model", "qwen3", **SMALL, **HEADS_4_2)
    plain = quantize_model(folder, FP8[name])
    found = forced(folder, determinism=determinism)
    layer = found.runner._compute._model._layers[0]
    assert layer.qkv.weight.steps.dtype is layer.feed_forward.down.weight.steps.dtype is torch.float8_e4m3fn
    assert "fp8 weights" in found.runner.info.numerics
    use_rounded_inputs(monkeypatch, GROUPS[name])
    assert worst_error(found, forced(plain, determinism=determinism)) < FLIPPED


def test_weights_rounded_to_fp8_at_load(tmp_path):
    folder = make_model(tmp_path / "model", "qwen2", **SMALL, **HEADS_4_2)
    rounded, whole = forced(folder, quantize="fp8"), forced(folder)
    assert rounded.runner.info.quantize == "fp8"
    assert rounded.runner.info.revision != whole.runner.info.revision
    layer = rounded.runner._compute._model._layers[1].feed_forward.down
    assert relative_error(layer.widened(), whole.runner._compute._model._layers[1].feed_forward.down.weight) < 0.04
    assert 0 < worst_error(rounded, whole) < 0.2


def test_devices_without_fp8(tmp_path, monkeypatch):
    """A checkpoint is converted there; rounding to fp8 is refused."""
    for module in (runner, weights):
        monkeypatch.setattr(module, "has_fp8", lambda device: False)
    folder = make_model(tmp_path / "model", "qwen3", **SMALL, **HEADS_4_2)
    with pytest.raises(BackendUnavailableError, match=r"quantize fp8 needs a GPU of compute capability 8\.9"):
        load(folder, quantize="fp8")
    quantize_model(folder, FP8["blocks"])
    loaded = load(folder)
    assert loaded._compute._model._layers[0].qkv.weight.dtype is torch.float32
    assert "fp8" not in loaded.info.numerics
