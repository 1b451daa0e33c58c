"""Decoders with windows, soft caps and other norms, rotations and feed-forward parts, against transformers."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.gpu import fake_flash3, fake_flash_attn
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, run_mixed, small_prompts
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import check_against
from worker_svc.engine.backend import BackendUnavailableError

# Padding rows hold uninitialized memory, and padding lines of a tile may see no key.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MODELS = {
    "mistral": ("mistral", HEADS_4_2 | {"sliding_window": 7}),
    "qwen2-window": ("qwen2", HEADS_4_2 | {
        "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1, "hidden_size": 64,
    }),
    "phi3": ("phi3", HEADS_4_2 | {"hidden_size": 64, "partial_rotary_factor": 0.75, "sliding_window": 11}),
    "gemma2": ("gemma2", HEADS_4_2 | {"sliding_window": 7}),
    "gemma3": ("gemma3", HEADS_4_2 | {
        "sliding_window": 7, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "olmo2": ("olmo2", HEADS_4_2 | {"hidden_size": 64}),
    "granite": ("granite", HEADS_4_2 | {"hidden_size": 64}),
    "smollm3": ("smollm3", HEADS_4_2 | {"hidden_size": 64, "no_rope_layers": [1, 0]}),
    "cohere2": ("cohere2", HEADS_4_2 | {"hidden_size": 64, "sliding_window": 7, "sliding_window_pattern": 2}),
    "arcee": ("arcee", HEADS_4_2 | {"hidden_size": 64}),
    "glm4": ("glm4", HEADS_4_2 | {"hidden_size": 64}),
    "ministral3": ("ministral3", HEADS_4_2 | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5,
    }}),
    "gpt2": ("gpt2", {"vocab_size": 97, "n_embd": 64, "n_inner": 40}),
}  # fmt: skip


def make(folder, name):
    architecture, overrides = MODELS[name]
    return make_model(folder, architecture, **(overrides if architecture == "gpt2" else SMALL | overrides))


def run(driver):
    """Most rows become longer than the windows."""
    run_mixed(driver, longest=22)


# The others run in torch: windows, norms and rotations of the kernels are compared with it in tests of each kernel.
INTERPRETED = ("gemma3", "cohere2", "gpt2")


@pytest.mark.parametrize(("name", "kernels"), [
    *((name, "triton" if name in INTERPRETED else "torch") for name in MODELS),
    *(pytest.param(name, "triton", marks=pytest.mark.deep) for name in MODELS if name not in INTERPRETED),
])  # fmt: skip
def test_mixed_batches_match_transformers(tmp_path, name, kernels):
    folder = make(tmp_path, name)
    driver = DeviceDriver(load(folder, block_size=4, kernels=kernels))
    run(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gpt2", marks=pytest.mark.deep)])
def test_exact_mode_matches_transformers(tmp_path, name):
    folder = make(tmp_path, name)
    driver = DeviceDriver(load(folder, determinism="exact"))
    run(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_blocks_behind_the_window_are_not_read(tmp_path):
    """The scheduler frees them, and other rows write to them."""
    folder = make(tmp_path, "mistral")
    runner = load(folder, block_size=4)
    assert runner.info.attention_window == 7
    assert runner.info.max_model_len == 1024  # the model's length: sequences may be longer than the pool
    driver = DeviceDriver(runner)
    (prompt,) = small_prompts([22])
    driver.open(0, prompt)
    for num_tokens in (13, 9, 1, 1, 1):
        driver.step({0: num_tokens})
        num_kept = 1 + -(-6 // 4)  # the block that it writes to, and those that the window reaches
        with torch.inference_mode():
            for block in driver.rows[0].blocks[: (driver.rows[0].computed - 1) // 4 + 1 - num_kept]:
                runner._pool.tensors[0][:, :, block] = torch.nan
    check_against(load_reference(folder), driver, [0])


def test_windows_that_no_sequence_leaves_are_dropped(tmp_path):
    runner = load(make(tmp_path, "mistral"), max_model_len=7)
    assert runner.info.attention_window is None
    assert runner._compute._model.config.window is None


@pytest.mark.parametrize(("attention", "block_size"), [
    ("flash", 256), ("flash3", 4), pytest.param("torch", 4, marks=pytest.mark.deep),
])  # fmt: skip
def test_other_attention_matches_transformers(tmp_path, monkeypatch, attention, block_size):
    """Gemma 2 has a scale, a soft cap, and layers with and without a window."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash3)
    folder = make(tmp_path, "gemma2")
    driver = DeviceDriver(load(folder, attention=attention, block_size=block_size, num_blocks=16))
    assert driver.runner.info.backend == f"cuda/{attention}"
    run(driver)
    check_against(load_reference(folder), driver, [0, 1, 2])


def test_an_fp8_cache_of_offset_norms(tmp_path):
    """The scales follow from the weights of the norms, which are around 0."""
    folder = make(tmp_path, "gemma3")
    runner = load(folder, dtype="float16", kv_cache_dtype="fp8")
    scales = torch.stack(runner._compute._model.kv_scales)
    assert (scales > 2**-6).all()
    assert (scales < 2).all()


def test_an_fp8_cache_needs_a_norm_before_attention(tmp_path):
    with pytest.raises(BackendUnavailableError, match="kv_cache_dtype fp8 needs the norm before attention"):
        load(make(tmp_path, "olmo2"), kv_cache_dtype="fp8")
