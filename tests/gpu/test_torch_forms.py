"""`--kernels torch`: the whole GPU runner in plain torch, on a CPU, without Triton's interpreter; and the machines on
which a worker falls back to it."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

import worker_svc.engine
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, MODELS, SMALL, run_forced, run_mixed, worst_error
from tests.unit.engine.driver import Driver
from tests.unit.engine.models import RECURRENT, load_reference, make_config, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import BackendUnavailableError, NoDeviceError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.engines import load_runner
from worker_svc.engine.gpu import kernels
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import language
from worker_svc.engine.gpu.layers.weights import shard_config
from worker_svc.engine.gpu.start.setup import Degradations, kernels_in_torch, usable_kernels


@pytest.fixture(autouse=True)
def _no_kernel_is_launched(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("a kernel of Triton was launched")

    monkeypatch.setattr(type(triton.jit(lambda: None)), "__getitem__", refuse)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
def test_mixed_batches_match_transformers(tmp_path, name, determinism):
    architecture, block_size, overrides = MODELS[name]
    folder = make_model(tmp_path, architecture, **(SMALL | overrides))
    settings = {"block_size": block_size, "num_blocks": 256 // block_size, "determinism": determinism}
    driver = DeviceDriver(load(folder, kernels="torch", **settings))
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


# Families with parts that no kernel computes; those in EVERY_PART have all of them
FAMILIES = (
    *RECURRENT, "deepseek_v2", "deepseek_v3", "youtu", "glm4_moe_lite", "gemma3n", "gemma4", "gemma4_moe", "hunyuan",
    "llama4",
)  # fmt: skip
EVERY_PART = ("qwen3_5_moe", "falcon_h1", "nemotron_h", "lfm2", "deepseek_v3", "gemma3n", "gemma4_moe", "llama4")


@pytest.mark.parametrize(("name", "dtype"), [
    *(pytest.param(name, "float32", marks=() if name in EVERY_PART else pytest.mark.deep) for name in FAMILIES),
    *(pytest.param(name, "bfloat16", marks=pytest.mark.deep) for name in FAMILIES),
])  # fmt: skip
def test_bits_of_every_family_are_the_same_alone_in_chunks_and_computed_again(tmp_path, name, dtype):
    folder = make_model(tmp_path, name, vocab_size=97, seed=1)
    runner = load(folder, kernels="torch", determinism="exact", dtype=dtype)
    crowd = DeviceDriver(runner)
    run_mixed(crowd)
    if dtype == "float32":
        check_against(load_reference(folder), crowd, [0, 1, 2])
    runner.reset_rows()
    alone = DeviceDriver(runner)
    for row, state in crowd.rows.items():
        prompt, output = state.tokens[: state.prompt_len], state.output
        alone.open(row, prompt)
        alone.prefill(row, 5)
        alone.decode([row], len(output) - 1)
        assert alone.close(row).output == output
        alone.open(row, prompt, output=output[:-1])  # it was preempted
        alone.logits[row, -1] = alone.logits.pop((row, len(state.tokens) - 1))
        alone.prefill(row, 4)
        assert torch.equal(alone.logits[row, len(state.tokens) - 1], alone.logits.pop((row, -1)))
        alone.close(row)
    assert alone.errors == []
    assert all(torch.equal(alone.logits[key], logits) for key, logits in crowd.logits.items())


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("qwen3_next", "gemma4") else pytest.mark.deep) for name in FAMILIES
])  # fmt: skip
def test_every_family_matches_transformers_in_best_effort(tmp_path, name):
    folder = make_model(tmp_path, name, vocab_size=97, seed=1)
    driver = DeviceDriver(load(folder, kernels="torch"))
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


@pytest.mark.parametrize(("name", "kernels", "reason"), [
    ("hunyuan", ["rope_store"], "norms of queries and keys after the rotation"),
    ("llama4", ["attention", "rope_store", "experts"], "chunks of attention"),
    ("nemotron_h", ["experts"], "experts without gate"),
    ("youtu", ["attention"], "latent attention (MLA)"),
])  # fmt: skip
def test_a_part_without_a_kernel_runs_in_torch_and_is_named(name, kernels, reason):
    model, noted = parse_config(make_config(name)), Degradations()
    assert set(kernels_in_torch(model, "auto", noted)) == set(kernels)
    assert f"plain torch replaces {kernels[0]}, which is slower: the model has {reason}" in noted
    with pytest.raises(BackendUnavailableError, match=r"Triton has no form of .*; use --kernels auto"):
        kernels_in_torch(model, "triton", noted)


@pytest.mark.parametrize("name", ["qwen3_5", "youtu", "gemma4"])
def test_models_that_are_not_divided_are_refused_by_name(name):
    with pytest.raises(BackendUnavailableError, match="cannot be divided among GPUs; use tensor_parallel_size 1"):
        shard_config(parse_config(make_config(name)), Group(0, 2))


def test_bfloat16_is_as_close_to_transformers_as_its_roundings(tmp_path):
    """The interpreter cannot multiply bfloat16, torch forms can."""
    folder = make_model(tmp_path, "qwen3", **SMALL, **HEADS_4_2)
    drivers = [DeviceDriver(load(folder, kernels="torch", dtype=dtype)) for dtype in ("bfloat16", "float32")]
    for driver in drivers:
        run_forced(driver)
    assert drivers[0].runner.info.dtype == "bfloat16"
    assert 0 < worst_error(*drivers) < 0.03


@pytest.fixture
def without_triton(monkeypatch):
    """The engine, imported where Triton is not installed."""

    def forget():
        for name in [name for name in sys.modules if name.startswith("worker_svc.engine.gpu")]:
            del sys.modules[name]

    kept = {name: module for name, module in sys.modules.items() if name.startswith("worker_svc.engine.gpu")}
    monkeypatch.setattr(worker_svc.engine, "gpu", None, raising=False)  # set back at the end
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    forget()
    yield
    forget()
    sys.modules.update(kept)


@pytest.mark.usefixtures("without_triton")
def test_a_worker_without_triton_serves(tmp_path, caplog):
    from worker_svc.engine.gpu.runner import DeviceRunner
    from worker_svc.engine.gpu.start import setup

    folder = make_model(tmp_path, "qwen3", **SMALL, **HEADS_4_2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.triton.knobs.runtime, "interpret", True)  # no device is needed
        driver = DeviceDriver(load(folder, DeviceRunner))
    assert "plain torch replaces all kernels, which is slower: triton cannot be imported" in caplog.text
    assert driver.runner.info.numerics.endswith("torch for all kernels")
    (reason,) = driver.runner.info.degradations
    assert reason.startswith("plain torch replaces all kernels, which is slower: triton cannot be imported")
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


@pytest.mark.parametrize(("capability", "error", "reason"), [
    ((7, 5), None, "the GPU has compute capability 7.5, Triton's kernels need 8.0"),
    ((9, 0), RuntimeError("Failed to find C compiler. Please specify\nmore"),
     "triton cannot launch kernels here: Failed to find C compiler. Please specify"),
])  # fmt: skip
def test_a_gpu_that_cannot_launch_kernels_of_triton_serves_in_torch(monkeypatch, caplog, capability, error, reason):
    def target():
        if error is not None:
            raise error

    monkeypatch.setattr(language, "target", target)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    config = EngineConfig(Path("model"), backend="cuda")
    assert usable_kernels(config, device, degradations := Degradations()) == "torch"
    assert degradations == [f"plain torch replaces all kernels, which is slower: {reason}"]
    assert f"plain torch replaces all kernels, which is slower: {reason}" in caplog.text
    with pytest.raises(BackendUnavailableError, match=f"{reason}; use --kernels auto"):
        usable_kernels(replace(config, kernels="triton"), device, Degradations())


def test_a_gpu_that_launches_kernels_of_triton_uses_them(monkeypatch):
    monkeypatch.setattr(language, "target", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = EngineConfig(Path("model"), backend="cuda")
    assert usable_kernels(config, torch.device("cuda", 0), Degradations()) == "auto"


def plant_old_driver(patch):
    """A driver that this torch cannot use."""
    patch.setattr(torch.version, "cuda", "13.0")
    error = RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")
    patch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(error))
    return "no CUDA device was found: The NVIDIA driver on your system is too old (found version 11040). (torch "


def plant_unusable_gpu(patch):
    """A GPU for which this torch was not compiled."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")
    patch.setattr(torch.cuda, "set_device", lambda device: (_ for _ in ()).throw(error))
    return "cuda:0 cannot be used: CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize("plant", [plant_old_driver, plant_unusable_gpu])
def test_a_machine_without_a_usable_gpu_serves_on_the_cpu(tmp_path, caplog, plant):
    """The settings are those of a GPU; tokens are those of the CPU engine in exact mode."""
    folder = make_model(tmp_path, "qwen3", **SMALL, **HEADS_4_2)
    fields = {"num_blocks": 16, "max_num_seqs": 5, "max_num_batched_tokens": 8192}
    config = EngineConfig(
        folder, backend="cuda", dtype="float16", kv_cache_dtype="fp8", block_size=64, tensor_parallel_size=2, **fields
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", False)
        reason = plant(patch)
        driver = Driver(load_runner(config, lambda _: None))
        for refused in (replace(config, kernels="triton"), replace(config, nnodes=2)):
            with pytest.raises(NoDeviceError) as error:
                load_runner(refused, lambda _: None)
            assert str(error.value).startswith(reason)
            assert str(error.value).endswith("; use --backend cpu")
    info = driver.runner.info
    assert (info.backend, info.dtype, info.kv_cache_dtype, info.max_num_batched_tokens) == (
        "cpu",
        "bfloat16",
        "auto",
        1024,
    )
    assert info.numerics.startswith("cpu, ")
    (found,) = info.degradations
    unused = "without dtype float16, without kv_cache_dtype fp8"
    assert found.startswith(f"the CPU engine serves, {unused}, which is much slower: {reason}")
    assert found in caplog.text
    run_mixed(driver)
    expected = Driver(load_runner(EngineConfig(folder, dtype="bfloat16", block_size=64, **fields), lambda _: None))
    run_mixed(expected)
    assert [row.tokens for row in driver.rows.values()] == [row.tokens for row in expected.rows.values()]


def functions_of(path):
    tree = ast.parse(path.read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", sorted(Path(kernels.__path__[0]).rglob("*.py")), ids=lambda path: path.stem)
def test_both_forms_of_a_kernel_have_the_same_arguments(path):
    functions = functions_of(path)
    for function in functions.values():
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "kernel":
                form = functions[ast.unparse(call.args[1])]
                names = [[arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)] for one in (function, form)]
                assert names[0] == names[1]
                defaults = [list(map(ast.unparse, one.args.defaults)) for one in (function, form)]
                assert defaults[0] == defaults[1]
