"""Exact mode: the logits of a row are the same bits for any batch, chunks, threads and processor."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.unit.engine.driver import GREEDY, Driver, seeded
from tests.unit.engine.models import make_model
from tests.unit.engine.test_engine_models import prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu import backend as cpu_backend
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.rotary import Rotary
from worker_svc.engine.model_runner import ModelRunner

VOCAB = 211


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner_factory(request, tmp_path_factory):
    """Runners of one model whose inner sizes are not powers of two."""
    folder = make_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        hidden_size=160,
        intermediate_size=352,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=40,
        num_hidden_layers=3,
    )

    def make(**settings):
        fields = {"num_blocks": 256, "max_num_seqs": 40, "threads": 1} | settings
        return ModelRunner(EngineConfig(folder, request.param, **fields))

    return make


def alone(runner, prompt, steps, sampling):
    driver = Driver(runner)
    runner.reset_rows()
    driver.open(0, prompt, sampling)
    driver.prefill(0)
    driver.decode([0], steps)
    return driver


def assert_same(expected, row, driver, other_row):
    assert driver.rows[other_row].tokens == expected.rows[row].tokens
    for (r, position), logits in expected.logits.items():
        if r == row and (other_row, position) in driver.logits:
            assert torch.equal(driver.logits[other_row, position], logits)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_chunks_change_nothing(runner_factory, backend):
    runner = runner_factory(backend=backend)
    (prompt,) = prompts([301])
    expected = alone(runner, prompt, 3, seeded(1))
    for row, chunk in enumerate((1, 7, 16, 100) if backend == "cpu" else (33, 100), start=1):
        driver = Driver(runner)
        runner.reset_rows()
        driver.open(row, prompt, seeded(1))
        driver.prefill(row, chunk)
        driver.decode([row], 3)
        assert_same(expected, 0, driver, row)


@pytest.mark.parametrize("threads", [1, 2])
def test_other_rows_change_nothing(runner_factory, threads):
    runner = runner_factory()
    prompt, *others = prompts([37, *np.random.default_rng(3).integers(1, 60, 31).tolist()])
    expected = alone(runner, prompt, 8, seeded(7))
    crowded = runner_factory(threads=threads)
    driver = Driver(crowded)
    for row, other in enumerate(others):
        driver.open(row, other, seeded(row))
    half = list(range(16))
    driver.step({row: len(others[row]) for row in half})
    driver.open(39, prompt, seeded(7))
    driver.step({**dict.fromkeys(half, 1), 39: 30})
    driver.step({20: len(others[20]), 39: 7, **dict.fromkeys(half, 1)})
    for extra in range(8):
        row = 21 + extra
        driver.step({row: len(others[row]), 39: 1, **dict.fromkeys(half[extra:], 1)})
    assert driver.errors == []
    assert_same(expected, 0, driver, 39)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", ["phi3", "gemma2", "gemma3n", "gemma4", "qwen3_moe", "mixtral", "olmo2", "gpt2"]
)
def test_each_architecture_is_exact(tmp_path, architecture, dtype):
    """Other rows, chunks and threads change no bit of a row, in one call for all layers where the model allows it."""
    folder = make_model(tmp_path, architecture)
    runners = [
        ModelRunner(EngineConfig(folder, dtype, num_blocks=256, max_num_seqs=40, threads=threads)) for threads in (1, 2)
    ]
    assert all((runner._model._fused is None) == (architecture == "gemma3n") for runner in runners)
    wanted, *others = prompts([50, 3, 70, 20])
    expected = alone(runners[0], wanted, 4, GREEDY)
    driver = Driver(runners[1])
    for row, prompt in enumerate([others[0], wanted, *others[1:]]):
        driver.open(row, prompt)
    driver.step({0: 3, 1: 7, 2: 40, 3: 20})
    driver.step({0: 1, 1: 43, 2: 30, 3: 1})
    driver.decode([3, 1, 0, 2], 4)
    assert_same(expected, 0, driver, 1)


def test_prefix_hit_and_recompute_change_nothing(runner_factory):
    runner = runner_factory()
    (prompt,) = prompts([100])
    expected = alone(runner, prompt, 12, seeded(5))
    driver = Driver(runner)
    runner.reset_rows()
    driver.open(1, prompt[:80])
    driver.prefill(1, 33)
    driver.open(2, prompt, seeded(5), shared=driver.rows[1].blocks[:5])
    driver.prefill(2)
    driver.decode([2], 4)
    output = driver.close(2).output
    driver.open(3, prompt, seeded(5), output=output)
    driver.prefill(3, 50)
    driver.decode([1, 3], 7)
    assert_same(expected, 0, driver, 3)


def test_one_call_for_all_layers_equals_the_operations_one_by_one(runner_factory):
    runner = runner_factory()
    (prompt,) = prompts([75])
    expected = alone(runner, prompt, 5, seeded(3))
    runner._model._fused = None
    driver = Driver(runner)
    runner.reset_rows()
    driver.open(1, prompt, seeded(3))
    driver.prefill(1, 31)  # chunks whose hidden states are not used
    driver.decode([1], 5)
    assert_same(expected, 0, driver, 1)


@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_block_size_changes_nothing(runner_factory, block_size):
    (prompt,) = prompts([90])
    expected = alone(runner_factory(), prompt, 3, seeded(5))
    driver = alone(runner_factory(block_size=block_size, num_blocks=4096 // block_size), prompt, 3, seeded(5))
    assert_same(expected, 0, driver, 0)


def test_stale_blocks_change_nothing(runner_factory):
    """Stale values in a block are never read."""
    runner = runner_factory()
    (prompt,) = prompts([50])
    expected = alone(runner, prompt, 5, seeded(2))
    for tensor in runner._pool.tensors:
        tensor.fill_(float("nan"))
    assert_same(expected, 0, alone(runner, prompt, 5, seeded(2)), 0)


SHAPES = [(1024, 256), (256, 768), (57, 33), (96, 40), (1000, 2000), (64, 8192), (31, 3)]
ROWS = [(0, 1), (1, 1), (7, 1), (1, 2), (0, 3), (3, 5), (1, 11), (0, 12), (5, 17), (2, 64), (0, 131), (1, 300)]


def make_layer(out_size, in_size, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype)
    return weight, bias, torch.randn(301, in_size, generator=generator).to(dtype)


def assert_rows_do_not_depend_on_their_number(linear, x):
    expected = linear(x)
    for start, rows in ROWS:
        assert torch.equal(linear(x[start : start + rows].contiguous()), expected[start : start + rows]), (start, rows)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_linear_rows_do_not_depend_on_their_number(kernel_build, out_size, in_size, dtype, quantize):
    if kernel_build == "tiles" and out_size * in_size > 4096:
        pytest.skip("tiles in software take too long; test_tiles.py has smaller layers")
    weight, bias, x = make_layer(out_size, in_size, dtype)
    results = []
    for threads in (1, 2):
        linear = make_backend("cpu", threads, "exact", quantize).make_linear(weight, bias)
        assert_rows_do_not_depend_on_their_number(linear, x)
        results.append(linear(x))
    assert torch.equal(*results)
    expected = F.linear(x.double(), weight.double(), bias.double())
    tolerance = {None: 1e-5, "int8": 0.03}[quantize] + (0.005 if dtype is torch.bfloat16 else 0)
    assert (results[0] - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_size", "in_size"), [(256, 768), (57, 33), (300, 2000), (31, 3)])
def test_fixed_point_rows_do_not_depend_on_their_number(out_size, in_size, dtype):
    weight, bias, x = make_layer(out_size, in_size, dtype)
    linear = make_backend("reference", 1, "exact").make_linear(weight, bias)
    torch.set_num_threads(2)
    expected = linear(x)
    torch.set_num_threads(1)
    assert torch.equal(linear(x), expected)
    assert_rows_do_not_depend_on_their_number(linear, x)
    rounding = 1e-7 if dtype is torch.float32 else 0.005
    precise = F.linear(x.double(), weight.double(), bias.double())
    assert (expected - precise).abs().max() <= rounding * precise.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vector_width_and_optimiser_change_no_result(kernel_builds, monkeypatch, dtype):
    """Both builds fuse multiply-adds and have no instruction for pairs of bfloat16."""
    weight, bias, x = make_layer(96, 250, dtype)
    results = []
    for name in ("avx2", "avx512"):
        kernels = kernel_builds(name)
        monkeypatch.setattr(cpu_backend, "load_kernels", lambda kernels=kernels: kernels)
        results.append(make_backend("cpu", 1, "exact").make_linear(weight, bias)(x))
    assert torch.equal(*results)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_a_model_is_exact_on_every_processor(kernel_build, tmp_path, dtype, quantize):
    """Alone, in chunks, in a batch and after a shared prefix, also with kernels compiled for older processors."""
    folder = make_model(tmp_path, "qwen3", intermediate_size=128, num_hidden_layers=1, head_dim=24)
    settings = {"num_blocks": 256, "max_num_seqs": 40, "quantize": quantize}
    runner = ModelRunner(EngineConfig(folder, dtype, threads=1, **settings))
    prompt, *others = prompts([60, 3, 17, 40])
    expected = alone(runner, prompt, 4, seeded(7))
    crowd = Driver(ModelRunner(EngineConfig(folder, dtype, threads=2, **settings)))
    for row, other in enumerate(others):
        crowd.open(row, other, seeded(row))
    crowd.open(5, prompt, seeded(7))
    crowd.step({0: 3, 1: 17, 5: 21})
    crowd.step({5: 38, 2: 40, 0: 1})
    crowd.step({2: 1, 5: 1, 1: 1})
    crowd.open(6, prompt, seeded(7), shared=crowd.rows[5].blocks[:3])
    crowd.prefill(6, 5)
    crowd.decode([2, 5, 0, 6], 4)
    assert crowd.errors == []
    assert_same(expected, 0, crowd, 5)
    assert_same(expected, 0, crowd, 6)


def test_rotary_tables_do_not_depend_on_their_length_or_threads():
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, 40, 2).float() / 40)
    torch.set_num_threads(2)
    longest = Rotary(inv_freq).table(70_001)
    torch.set_num_threads(1)
    for length in (1, 17, 4095, 60_000):
        table = Rotary(inv_freq).table(length)
        assert torch.equal(table.cos, longest.cos[:length])
        assert torch.equal(table.sin, longest.sin[:length])
    angles = torch.arange(70_001).float()[:, None] * inv_freq
    assert (longest.cos - angles.double().cos()).abs().max() < 3.1e-8
    assert (longest.sin - angles.double().sin()).abs().max() < 3.1e-8


def test_best_effort_serves_on_a_processor_without_avx512(tmp_path):
    """With oneDNN restricted to AVX2, in a process of its own: the variables take effect when torch is imported."""
    folder = make_model(tmp_path, "qwen3")
    code = f"""
import torch
from tests.unit.engine.driver import Driver
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.kernels.torch_linear import PackedLinear
from worker_svc.engine.model_runner import ModelRunner
from pathlib import Path
for dtype in ("float32", "bfloat16"):
    config = EngineConfig(Path({str(folder)!r}), dtype, num_blocks=16, backend="reference", determinism="best_effort")
    runner = ModelRunner(config)
    assert isinstance(runner._model.parts.head, PackedLinear)
    driver = Driver(runner)
    driver.open(0, list(range(30)))
    driver.prefill(0)
    driver.decode([0], 3)
    assert len(driver.rows[0].output) == 4 and driver.errors == []
"""
    masks = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | masks, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
