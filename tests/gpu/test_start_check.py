"""The start-up check: correct kernels pass, and a kernel that fails is replaced, with a warning that names it."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import partial, wraps

import pytest

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_mixed
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.gpu import check
from worker_svc.engine.gpu.check import Comparison, _tensors
from worker_svc.engine.gpu.kernels import attention, forms, norm, rope_store
from worker_svc.engine.gpu.kernels.forms import Forms
from worker_svc.engine.gpu.kernels.linears import scaled_linear
from worker_svc.engine.gpu.kernels.sampler import candidates, sample
from worker_svc.engine.gpu.start.setup import Setup

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _as_where_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(Setup, "is_compiled", True)
    monkeypatch.setattr(check, "PROMPTS", (5, 1, 20, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL | HEADS_4_2 | {"num_hidden_layers": 1})


@pytest.mark.parametrize("settings", [
    pytest.param({"determinism": "exact"}, id="exact"),
    pytest.param(
        {"kv_cache_dtype": "fp8", "quantize": "fp8", "max_adapters": 2, "max_adapter_rank": 4}, id="fp8 and adapters",
        marks=pytest.mark.deep,
    ),
])  # fmt: skip
def test_correct_kernels_pass(folder, caplog, settings):
    runner = load(folder, **settings)
    assert "torch" not in runner.info.numerics
    assert runner.info.backend == "cuda/triton"
    assert caplog.text == ""
    driver = DeviceDriver(runner)
    run_mixed(driver)
    if "quantize" not in settings:
        check_against(load_reference(folder), driver, [0, 1, 2])


class Faults:
    """Torch forms in place of kernels, which take seconds in the interpreter. Those of `names` have a fault."""

    def __init__(self, names, fault):
        self._names, self._fault = names, fault
        self.were_called = set()

    def launch(self, kernel, /, *args, **kwargs):
        self.were_called.add(kernel.name)
        if kernel.name in self._names and self._fault == "does not run":
            raise RuntimeError("no kernel image is available")
        found = kernel.torch_form(*args, **kwargs)
        if kernel.name in self._names:
            given = inspect.signature(kernel.launch).bind(*args, **kwargs).arguments
            written = [given[name] for name in kernel.writes]
            changed = next(x for x in _tensors((written, found)) if x.numel()).view(-1)
            if self._fault == "tiles have other bits" and forms.chosen().has_one_tile:
                return found
            if self._fault in ("depends on other rows", "tiles have other bits"):
                changed *= 1 + 1e-8 * len(changed)
            else:
                changed[len(changed) // 2] += 1
        return found

    def plant(self, monkeypatch):
        for kind in (Forms, Comparison):
            original = kind.call

            def call(chosen, kernel, /, *args, original=original, **kwargs):
                launch = wraps(kernel.launch)(partial(self.launch, kernel))
                return original(chosen, replace(kernel, launch=launch), *args, **kwargs)

            monkeypatch.setattr(kind, "call", call)


KERNELS = (
    *("norm", "rope_store", "attention", "linear", "gated_activation", "prepare", "deltas", "sample", "thresholds"),
    *("mask_banned", "process", "bad_words", "record_tokens"),
)


@pytest.mark.parametrize(
    "names", [KERNELS, *(pytest.param((name,), marks=pytest.mark.deep, id=name) for name in KERNELS)]
)
@pytest.mark.parametrize("fault", ["is wrong", "does not run"])
def test_every_kernel_that_fails_is_replaced(folder, monkeypatch, caplog, names, fault):
    faults = Faults(names, fault)
    faults.plant(monkeypatch)
    runner = load(folder, determinism="exact")
    assert faults.were_called >= set(KERNELS)
    for name in names:
        replaces = "attention torch is used instead" if name == "attention" else f"plain torch replaces {name}"
        assert re.search(rf"{replaces}[^:]*: {name} failed", caplog.text)
    replaced = runner.info.numerics.rpartition("torch for ")[2].split() if names != ("attention",) else []
    assert sorted(replaced) == sorted(set(names) - {"attention"})
    assert runner.info.backend == ("cuda/torch" if "attention" in names else "cuda/triton")
    driver = DeviceDriver(runner)
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


FAULTS = [
    ("rope_store", rope_store, "cos_ptr + position", "cos_ptr + (position + 1)"),
    ("norm", norm, "residual.to(tl.float32)", "tl.where(column == 31, 0.0, residual.to(tl.float32))"),
    ("sample", sample, "tl.store(token_ptr + sample, token)", "tl.store(token_ptr + sample, token + (sample == 1))"),
    (
        "thresholds", candidates, "    tl.store(lowest_ptr + sample, lowest)\n\n\nclass",
        "    tl.store(lowest_ptr + sample, lowest + 0.1)\n\n\nclass",
    ),
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(("name", "module", "old", "new"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_kernel_that_fails_is_replaced(folder, plant_mutant, caplog, name, module, old, new):
    plant_mutant(module, old, new)
    runner = load(folder)
    assert runner.info.numerics.endswith(f"torch for {name}")
    assert f"plain torch replaces {name}, which is slower: {name} failed the start-up check" in caplog.text
    driver = DeviceDriver(runner)
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_a_kernel_that_fails_ends_the_start_if_triton_is_required(folder, monkeypatch):
    Faults(["norm"], "is wrong").plant(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"norm failed the start-up check .*the largest difference is"):
        load(folder, kernels="triton")


@pytest.mark.deep
def test_a_kernel_that_does_not_run_is_replaced(folder, monkeypatch, caplog):
    monkeypatch.setattr(scaled_linear, "launch", None)
    assert load(folder, quantize="fp8", determinism="exact").info.numerics.endswith("torch for scaled_linear")
    assert "scaled_linear failed in the start-up check" in caplog.text


@pytest.mark.deep
def test_attention_that_fails_is_replaced(folder, plant_mutant, caplog):
    plant_mutant(attention, "key[None, :] <= query_position[:, None]", "key[None, :] < query_position[:, None]")
    runner = load(folder)
    assert runner.info.backend == "cuda/torch"
    assert "attention torch is used instead: attention failed the start-up check" in caplog.text
    driver = DeviceDriver(runner)
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_exact_mode_replaces_kernels_whose_rows_depend_on_each_other(folder, monkeypatch, caplog):
    Faults(["gated_activation"], "depends on other rows").plant(monkeypatch)
    assert load(folder, determinism="best_effort").info.backend == "cuda/triton"
    runner = load(folder, determinism="exact")
    assert "rows depend on the number of rows" in caplog.text
    assert runner.info.numerics.endswith("torch for all kernels")
    driver = DeviceDriver(runner)
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_exact_mode_has_one_linear_tile_where_tiles_have_other_bits(folder, monkeypatch, caplog):
    Faults(["linear"], "tiles have other bits").plant(monkeypatch)
    runner = load(folder, determinism="exact")
    assert "linear layers have one tile, which is slower" in caplog.text
    assert "torch" not in runner.info.numerics
    assert runner.info.numerics.endswith(", one tile")
    driver = DeviceDriver(runner)
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])
