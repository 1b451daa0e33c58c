"""Whole models against transformers: fp32 logits within 1e-4, and the same greedy tokens for any batches and chunks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from step_protocol.types import Pooling, PoolingKind, PoolingTask
from tests.unit.engine.driver import Driver
from tests.unit.engine.models import ARCHITECTURES, load_reference, make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name: (architecture, block size, overrides)
MODELS = {
    "qwen3-gqa2": ("qwen3", 16, {}),
    "qwen3-gqa1-tied": ("qwen3", 8, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3-gqa8-wide-heads": ("qwen3", 16, {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}),
    "qwen3-biased": ("qwen3", 4, {"attention_bias": True}),
    "qwen3-head-dim-128": ("qwen3", 32, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}),
    "qwen2-gqa4": ("qwen2", 16, {"num_key_value_heads": 1}),
    "qwen2-tied": ("qwen2", 1, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-gqa4": ("llama", 16, {"num_key_value_heads": 1}),
    "llama-llama3-rope": ("llama", 64, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": ("llama", 16, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic-rope": (
        "llama",
        16,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-odd-sizes": (
        "llama",
        2,
        {"head_dim": 20, "hidden_size": 60, "intermediate_size": 70, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-gelu": ("llama", 16, {"hidden_act": "gelu"}),
    "mistral-gqa4": ("mistral", 16, {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": None}),
    "olmo2-odd-heads": ("olmo2", 16, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 60}),
    "olmo2-odd-sizes": (
        "olmo2",
        4,
        {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 70, "intermediate_size": 74},
    ),
    "cwm-mlp-bias": ("cwm", 16, {"mlp_bias": True}),
    "lfm2-moe-without-bias": ("lfm2_moe", 16, {"use_expert_bias": False}),
    # whole panels, so that one native call computes the pass
    "llama4-in-one-call": ("llama4", 16, {"intermediate_size": 64, "intermediate_size_mlp": 96}),
    "ernie4-moe-in-one-call": ("ernie4_5_moe", 8, {"moe_intermediate_size": 32}),
    "gemma4-moe-in-one-call": ("gemma4_moe", 16, {"moe_intermediate_size": 64}),
    "gpt-oss-in-one-call": ("gpt_oss", 16, {"intermediate_size": 64}),
    "falcon-h1-in-one-call": ("falcon_h1", 16, {"intermediate_size": 96}),
    "granite-hybrid-in-one-call": (
        "granite_hybrid_moe",
        16,
        {"intermediate_size": 32, "shared_intermediate_size": 64},
    ),
    "nemotron-h-from-and-to-mlp": (
        "nemotron_h",
        16,
        {"layers_block_type": ["mlp", "linear_attention", "full_attention", "moe"]},
    ),
    "gpt2-odd-heads": ("gpt2", 16, {"n_embd": 60}),
    "mistral-gelu-tanh": ("mistral", 256, {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None}),
}


def load(folder, block_size=16, **settings):
    fields = {"num_blocks": 1024 // block_size, "max_num_seqs": 8, "threads": 1} | settings
    return ModelRunner(EngineConfig(folder, fields.pop("dtype", "float32"), block_size=block_size, **fields))


def prompts(lengths, vocab=211, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]


def check_against(reference, driver, rows):
    """Every logit row that was sampled, and every token, against one pass of transformers over the whole sequence."""
    for row in rows:
        state = driver.rows[row]
        with torch.no_grad():
            expected = reference(torch.tensor([state.tokens])).logits[0]
        for position in range(state.prompt_len, len(state.tokens)):
            logits = driver.logits[row, position]
            assert (logits - expected[position - 1]).abs().max() < 1e-4
            assert state.tokens[position] == int(expected[position - 1].argmax())


@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_match_transformers(tmp_path, name):
    architecture, block_size, overrides = MODELS[name]
    folder = make_model(tmp_path, architecture, **overrides)
    driver = Driver(load(folder, block_size))
    for row, prompt in enumerate(prompts([1, 33, 150, 16])):
        driver.open(row, prompt)
    driver.step({0: 1, 2: 40, 1: 20})
    driver.step({0: 1, 1: 13, 2: 7})
    driver.step({2: 90, 0: 1, 1: 1, 3: 16})
    driver.step({3: 1, 2: 13, 0: 1})
    driver.decode([3, 1, 0, 2], 6)
    assert driver.errors == []
    check_against(load_reference(folder), driver, [0, 1, 2, 3])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
def test_prefix_and_block_reuse_match_transformers(tmp_path, architecture, backend):
    folder = make_model(tmp_path, architecture)
    reference = load_reference(folder)
    driver = Driver(load(folder, num_blocks=12, backend=backend))
    first, second, third = prompts([70, 9, 60])
    driver.open(0, first)
    driver.prefill(0, 32)
    driver.decode([0], 3)
    driver.open(1, first[:64] + second, shared=driver.rows[0].blocks[:4])
    driver.step({0: 1, 1: 9})
    driver.decode([1, 0], 8)
    check_against(reference, driver, [0, 1])
    driver.close(1, keep_blocks=True)
    driver.close(0)
    driver.open(2, third)
    driver.open(0, second)
    driver.step({2: 60, 0: 9})
    driver.decode([2, 0], 10)
    assert driver.errors == []
    check_against(reference, driver, [0, 2])


def test_preempted_row_returns_with_its_tokens(tmp_path):
    folder = make_model(tmp_path)
    driver = Driver(load(folder))
    (prompt,) = prompts([40])
    driver.open(0, prompt)
    driver.prefill(0)
    driver.decode([0], 5)
    whole = driver.close(0).tokens
    driver.open(3, prompt, output=whole[40:43])
    driver.prefill(3, 17)
    driver.decode([3], 2)
    assert driver.rows[3].tokens == whole


def test_sharded_checkpoint(tmp_path):
    single = make_model(tmp_path / "single", "llama")
    sharded = make_model(tmp_path / "sharded", "llama", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    tokens = []
    for folder in (single, sharded):
        driver = Driver(load(folder))
        driver.open(0, prompts([30])[0])
        driver.prefill(0)
        driver.decode([0], 5)
        tokens.append(driver.rows[0].tokens)
    assert tokens[0] == tokens[1]
    check_against(load_reference(sharded), driver, [0])


def test_a_tower_may_be_named_as_part_of_the_model(tmp_path):
    folder = make_model(tmp_path, "gemma3_vl")
    reference = load_reference(folder)
    file = folder / "model.safetensors"
    tensors = {name.replace("language_model.model.", "language_model."): one for name, one in load_file(file).items()}
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file(
        {f"model.{name}".replace("model.language_model.lm_head", "lm_head"): one for name, one in tensors.items()}, file
    )
    driver = Driver(load(folder))
    driver.open(0, prompts([40])[0])
    driver.prefill(0)
    driver.decode([0], 2)
    check_against(reference, driver, [0])


@pytest.mark.parametrize("name", ["InternLM3ForCausalLM", "IQuestCoderForCausalLM"])
def test_names_of_llamas_that_transformers_computes_as_llama(tmp_path, rewrite_config, name):
    has_bias = name == "InternLM3ForCausalLM"
    folder = make_model(tmp_path, "llama", head_dim=20, attention_bias=has_bias, mlp_bias=has_bias)
    reference = load_reference(folder)
    rewrite_config(folder, architectures=[name], **({"qkv_bias": True, "bias": True} if has_bias else {}))
    driver = Driver(load(folder))
    driver.open(0, prompts([40])[0])
    driver.prefill(0, 16)
    driver.decode([0], 4)
    check_against(reference, driver, [0])


def test_missing_layer_types_of_gemma4_are_those_of_transformers(tmp_path):
    """The last layer attends to all tokens, whatever the pattern says."""
    folder = make_model(tmp_path, "gemma4", num_hidden_layers=4, layer_types=None, num_kv_shared_layers=0)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("layer_types") == [*["sliding_attention"] * 3, "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    driver = Driver(load(folder))
    driver.open(0, *prompts([60]))
    driver.prefill(0)
    check_against(load_reference(folder), driver, [0])


def test_old_rope_fields_are_read(tmp_path, rewrite_config):
    folder = make_model(tmp_path, "llama", rope_parameters=LLAMA3_ROPE)
    reference = load_reference(folder)
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    rewrite_config(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    driver = Driver(load(folder))
    driver.open(0, prompts([100])[0])
    driver.prefill(0)
    check_against(reference, driver, [0])


def test_duplicate_rope_fields_have_the_precedence_of_transformers(tmp_path, rewrite_config):
    folder = make_model(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    rewrite_config(folder, rope_scaling=LLAMA3_ROPE, original_max_position_embeddings=48)
    reference = load_reference(folder)
    driver = Driver(load(folder))
    driver.open(0, prompts([100])[0])
    driver.prefill(0)
    check_against(reference, driver, [0])


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", {"num_hidden_layers": 4}),
        ("gpt2", {"n_embd": 60, "n_layer": 4}),
        ("gpt_oss", {"intermediate_size": 64}),
        *(pytest.param(name, {}, marks=pytest.mark.deep) for name in ("cohere2", "ministral3", "hunyuan", "granite")),
    ],
)
def test_bfloat16_is_as_close_as_transformers(tmp_path, architecture, overrides):
    """The rounding error is as large as that of transformers; a planted bug would be far above it."""
    folder = make_model(tmp_path, architecture, dtype=torch.bfloat16, **overrides)
    exact, rounded = load_reference(folder), load_reference(folder, torch.bfloat16)
    runner = ModelRunner(EngineConfig(folder, "auto", num_blocks=64, max_num_seqs=8, threads=1))
    driver = Driver(runner)
    assert runner.info.dtype == "bfloat16"
    errors, bounds = [], []
    for row, prompt in enumerate(prompts([5, 40, 90, 130])):
        driver.open(row, prompt)
        driver.prefill(row, 48)
        driver.decode([row], 4)
        with torch.no_grad():
            tokens = torch.tensor([driver.rows[row].tokens])
            expected, theirs = exact(tokens).logits[0], rounded(tokens).logits[0].float()
        for position in range(len(prompt), len(prompt) + 5):
            norm = expected[position - 1].norm()
            errors.append(float((driver.logits[row, position].float() - expected[position - 1]).norm() / norm))
            bounds.append(float((theirs[position - 1] - expected[position - 1]).norm() / norm))
    assert np.mean(errors) <= 1.5 * np.mean(bounds) + 0.005
    assert max(errors) < 0.08


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_encoder_with_heads_of_an_odd_size_matches_transformers(tmp_path, dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.RobertaConfig(**sizes, intermediate_size=96, max_position_embeddings=80, type_vocab_size=1)
    transformers.RobertaModel(config).eval().save_pretrained(tmp_path)
    settings = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 128, "threads": 1}
    driver = Driver(ModelRunner(EngineConfig(tmp_path, dtype, **settings)))
    (tokens,) = prompts([40])
    driver.open(0, tokens, pooling=Pooling(PoolingTask.VECTOR, PoolingKind.CLS))
    driver.step({0: 40})
    with torch.no_grad():
        expected = transformers.RobertaModel.from_pretrained(tmp_path)(torch.tensor([tokens])).last_hidden_state[0, 0]
    assert np.abs(driver.pooled[0] - expected.numpy()).max() < (1e-4 if dtype == "float32" else 0.05)


def wrong_rotation(driver):
    table = driver.runner._model.parts.rotaries[0]
    table.cos.copy_(table.cos.roll(1, 0))
    table.sin.copy_(table.sin.roll(-1, 0))


def page_read_twice(driver):
    tables = driver.runner._rows.tables
    tables[0, 0] = tables[0, 1]


def swapped_norms(driver):
    q_norm, k_norm = (norm.weight for norm in driver.runner._model.parts.layers[0].qk_norms)
    kept = q_norm.clone()
    q_norm.copy_(k_norm)
    k_norm.copy_(kept)


def mask_off_by_one(driver):
    backend = driver.runner._backend
    attention = backend.paged_attention

    def short_sighted(q, cache, batch, out, shape):
        attention(q, cache, replace(batch, context_lens=batch.context_lens - 1), out, shape)

    backend.paged_attention = short_sighted
    driver.runner._model._fused = None  # the fused pass would skip these operations


@pytest.mark.parametrize("plant", [wrong_rotation, page_read_twice, swapped_norms, mask_off_by_one])
def test_planted_bugs_are_detected(tmp_path, plant):
    """Each bug moves logits far beyond the tolerance, because attention is peaked."""
    folder = make_model(tmp_path)
    driver = Driver(load(folder))
    driver.open(0, prompts([40])[0])
    driver.prefill(0)
    plant(driver)
    driver.decode([0], 1)
    with torch.no_grad():
        expected = load_reference(folder)(torch.tensor([driver.rows[0].tokens])).logits[0, -2]
    assert (driver.logits[0, 41] - expected).abs().max() > 1e-2
