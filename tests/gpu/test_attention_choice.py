"""--attention: flash-attn with its real signatures, and refused combinations."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from tests.gpu import fake_flash_attn
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_mixed
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu import check
from worker_svc.engine.gpu.start import attention_choice as choice
from worker_svc.engine.gpu.start.setup import Setup

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **SMALL, **HEADS_4_2)


def test_flash_attention_matches_transformers(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    driver = DeviceDriver(load(folder, attention="flash", block_size=256, num_blocks=8))
    assert driver.runner.info.backend == "cuda/flash"
    assert driver.runner.info.block_size == 256
    with torch.inference_mode():
        driver.runner._compute.warm_up(8)  # no rows are open, as on a GPU before the pool is sized
    run_mixed(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_flash_attention_needs_its_block_size(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    with pytest.raises(BackendUnavailableError, match=r"a multiple of 256, got 16; use .*--attention triton"):
        load(folder, attention="flash")


def test_flash_attention_needs_its_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(BackendUnavailableError, match="flash-attn cannot be imported"):
        load(folder, attention="flash", block_size=256)
    # flash-attn 4 installs a folder of the same name without the functions.
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(BackendUnavailableError, match="has no flash_attn_varlen_func"):
        load(folder, attention="flash", block_size=256)


@pytest.mark.parametrize("name", ["flash", "flash3", "torch"])
def test_batch_dependent_attention_is_refused_in_exact_mode(folder, name):
    with pytest.raises(BackendUnavailableError, match=f"attention {name} cannot be exact"):
        load(folder, attention=name, determinism="exact", block_size=256)


def one_key_short(q, k_cache, v_cache, *, cache_seqlens, **rest):
    return fake_flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=(cache_seqlens - 1).clamp_min(1), **rest
    )


def aligned_to_the_top_left(q, k, v, *, cu_seqlens_q, **rest):
    """The mask of versions before 2.1: query i sees keys up to i."""
    out = fake_flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens_q, **rest)
    counts, lens = cu_seqlens_q.diff().tolist(), rest["cu_seqlens_k"].diff().tolist()
    scale = rest["softmax_scale"]
    for first, count, length, table in zip(cu_seqlens_q.tolist(), counts, lens, rest["block_table"], strict=False):
        if count < length:
            for i in range(count):
                out[first + i] = fake_flash_attn._attend(q[first + i : first + i + 1], k, v, table, i + 1, scale)[0]
    return out


def only_16_bits(*_, **__):
    raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


@pytest.mark.parametrize(("name", "broken", "message"), [
    ("flash_attn_with_kvcache", one_key_short, "the largest difference is"),
    pytest.param("flash_attn_varlen_func", aligned_to_the_top_left, "largest difference", marks=pytest.mark.deep),
    pytest.param("flash_attn_varlen_func", only_16_bits, "only support fp16", marks=pytest.mark.deep),
])  # fmt: skip
def test_flash_attention_is_checked_at_start_up(folder, monkeypatch, caplog, name, broken, message):
    broken_package = ModuleType("flash_attn")
    vars(broken_package).update(vars(fake_flash_attn), **{name: broken})
    monkeypatch.setitem(sys.modules, "flash_attn", broken_package)
    monkeypatch.setattr(Setup, "is_compiled", True)
    monkeypatch.setattr(check, "PROMPTS", (5, 1, 20, 9))
    assert load(folder, attention="flash", block_size=256, num_blocks=8).info.backend == "cuda/triton"
    assert "attention triton is used instead: attention failed" in caplog.text
    assert message in caplog.text


def test_auto_uses_flash_attention_that_passes_its_check(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setattr(choice, "preferred_library", lambda setup: "flash")
    assert load(folder, attention="auto", block_size=256, num_blocks=8).info.backend == "cuda/flash"


def test_auto_is_triton_without_a_gpu(folder):
    assert load(folder).info.backend == "cuda/triton"


def test_head_sizes_without_a_tile_are_attended_in_torch(tmp_path):
    make_model(tmp_path, "llama", **(SMALL | HEADS_4_2 | {"head_dim": 8}))
    info = load(tmp_path).info
    assert (info.backend, info.numerics.rpartition(", ")[2]) == ("cuda/torch", "torch for attention")
    assert "plain torch replaces attention, which is slower: head_dim 8 is outside 16 to 256" in info.degradations
    with pytest.raises(BackendUnavailableError, match="head_dim 8 is outside 16 to 256; use --kernels auto"):
        load(tmp_path, kernels="triton")


@pytest.mark.parametrize(("field", "value"), [("dtype", "float16"), ("kv_cache_dtype", "fp8")])
def test_gpu_only_dtypes_are_refused_by_other_backends(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"backend with {field}={value} must be one of cuda, got 'cpu'"):
        EngineConfig(tmp_path, **{field: value})


def test_flash_attention_with_an_fp8_cache_is_refused(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    with pytest.raises(BackendUnavailableError, match="cannot read kv_cache_dtype fp8; use --attention triton"):
        load(folder, attention="flash", block_size=256, kv_cache_dtype="fp8")


def test_bfloat16_is_refused_in_the_interpreter(folder):
    with pytest.raises(BackendUnavailableError, match="interpreter multiplies bfloat16 wrongly"):
        load(folder, dtype="bfloat16")
