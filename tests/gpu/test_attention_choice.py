"""--attention: flash-attn behind its real signatures, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.gpu import fake_flash_attn
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_mixed
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)


def test_flash_attention_matches_transformers(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    driver = DeviceDriver(load(folder, attention="flash", block_size=256, num_blocks=8))
    assert driver.runner.info.backend == "cuda/flash"
    assert driver.runner.info.block_size == 256
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_flash_attention_needs_its_block_size(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    with pytest.raises(BackendUnavailableError, match=r"block_size that 256 divides, got 16.*--attention triton"):
        load(folder, attention="flash")


def test_flash_attention_needs_its_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(BackendUnavailableError, match="flash-attn cannot be imported"):
        load(folder, attention="flash", block_size=256)
    # Its successor leaves a folder of the same name without the functions.
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(BackendUnavailableError, match="has no flash_attn_varlen_func"):
        load(folder, attention="flash", block_size=256)


@pytest.mark.parametrize("name", ["flash", "torch"])
def test_what_depends_on_the_batch_is_not_called_exact(folder, name):
    with pytest.raises(BackendUnavailableError, match=f"attention {name} cannot be exact"):
        load(folder, attention=name, determinism="exact", block_size=256)


def test_auto_is_our_kernel_here(folder):
    assert load(folder).info.backend == "cuda/triton"


def test_head_sizes_without_a_tile_are_refused(tmp_path):
    make_model(tmp_path, "llama", **(SMALL | HEADS_4_2 | {"head_dim": 8}))
    with pytest.raises(BackendUnavailableError, match="head_dim 8 is not from 16 to 256"):
        load(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("dtype", "float16"), ("kv_cache_dtype", "fp8")])
def test_what_only_a_gpu_computes_is_refused_elsewhere(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"backend with {field}={value} must be one of cuda, got 'cpu'"):
        EngineConfig(tmp_path, **{field: value})


def test_flash_attention_reads_no_8_bits(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    with pytest.raises(BackendUnavailableError, match="reads no kv_cache_dtype fp8; use --attention triton"):
        load(folder, attention="flash", block_size=256, kv_cache_dtype="fp8")


def test_bfloat16_is_refused_in_the_interpreter(folder):
    with pytest.raises(BackendUnavailableError, match="interpreter multiplies bfloat16 wrongly"):
        load(folder, dtype="bfloat16")
