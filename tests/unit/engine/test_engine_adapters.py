"""Adapters in the engine: equal to weights that PEFT merged, the same bits for any batch, and refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.adapters import load_merged, make_adapter, targets_of
from tests.unit.engine.driver import Driver
from tests.unit.engine.models import ARCHITECTURES, load_reference, make_model
from tests.unit.engine.test_engine_models import check_against, prompts
from worker_svc.engine.adapters.config import AdapterError
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner

RANKS = (1, 2, 4, 8, 16, 17, 33, 64)


def load(folder, **settings):
    fields = {"num_blocks": 64, "max_num_seqs": 16, "threads": 1, "max_adapters": 8, "dtype": "float32"} | settings
    return ModelRunner(EngineConfig(folder, **fields))


def place(runner, name, folder):
    store = runner.adapters
    digest = store.load(name, folder).digest
    store.swap(digest, kept=[entry.digest for entry in store.entries()])
    return digest


# One each of: separate and fused tensors, transposed ones, norms of outputs, experts, latents, side by side, a prefix
KINDS = ("qwen3", "phi3", "gpt2", "gemma3", "qwen3_moe", "deepseek_v3", "cohere2", "mistral3")
CASES = [(name, backend) for name in ARCHITECTURES for backend in ("cpu", "reference")]
IN_CI = {*((name, "cpu") for name in KINDS), ("phi3", "reference")}


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.deep) for case in CASES],
)
def test_an_adapter_equals_merged_weights(tmp_path, architecture, backend):
    folder = make_model(tmp_path / "model", architecture)
    adapter = make_adapter(folder, tmp_path / "adapter", r=5, lora_alpha=7, target_modules=targets_of(architecture))
    driver = Driver(load(folder, backend=backend))
    digest = place(driver.runner, "one", adapter)
    first, second, third = prompts([33, 40, 9])
    driver.open(0, first, adapter=digest)
    driver.open(1, second)
    driver.open(2, third, adapter=digest)
    driver.step({0: 20, 1: 40, 2: 9})
    driver.step({1: 1, 0: 13, 2: 1})
    driver.decode([2, 0, 1], 6)
    assert driver.errors == []
    check_against(load_merged(folder, adapter), driver, [0, 2])
    check_against(load_reference(folder), driver, [1])


def test_eight_adapters_of_different_ranks_beside_base_rows(tmp_path):
    folder = make_model(tmp_path / "model", hidden_size=72, intermediate_size=96, num_attention_heads=6, head_dim=12)
    adapters = [
        make_adapter(folder, tmp_path / f"adapter{rank}", seed=rank, r=rank, target_modules=targets_of("qwen3"))
        for rank in RANKS
    ]
    driver = Driver(load(folder, threads=2))
    lengths = [3, 17, 40, 9, 12, 25, 1, 30]
    for row, (adapter, prompt) in enumerate(zip(adapters, prompts(lengths), strict=True)):
        driver.open(row, prompt, adapter=place(driver.runner, str(row), adapter))
    for row, prompt in enumerate(prompts([5, 21], seed=1), start=8):
        driver.open(row, prompt)
    driver.step({9: 10, **dict.fromkeys(range(8), 1), 8: 5})
    driver.step({9: 11, **{row: length - 1 for row, length in enumerate(lengths) if length > 1}})
    driver.decode(list(range(10)), 5)
    assert driver.errors == []
    for row, adapter in enumerate(adapters):
        check_against(load_merged(folder, adapter), driver, [row])
    check_against(load_reference(folder), driver, [8, 9])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(tmp_path, kernel_build, dtype):
    folder = make_model(tmp_path / "model", intermediate_size=128)
    adapters = [
        make_adapter(folder, tmp_path / str(rank), seed=rank, r=rank, target_modules=targets_of("qwen3"))
        for rank in (4, 40)
    ]
    alone, together = [], Driver(load(folder, dtype=dtype, threads=2))
    rows = list(zip([*adapters, None], prompts([37, 22, 30]), strict=True))
    for row, (adapter, prompt) in enumerate(rows):
        driver = Driver(load(folder, dtype=dtype))
        for each in (driver, together):
            each.open(row, prompt, adapter=b"" if adapter is None else place(each.runner, str(row), adapter))
        driver.prefill(row)
        driver.decode([row], 4)
        alone.append(driver)
    together.step({2: 9, 0: 37})
    together.step({0: 1, 1: 22, 2: 21})
    together.decode([1, 2, 0], 3)
    assert together.errors == []
    for row, driver in enumerate(alone):
        count = len(together.rows[row].tokens)
        assert together.rows[row].tokens == driver.rows[row].tokens[:count]
        for position in range(driver.rows[row].prompt_len, count):
            assert torch.equal(together.logits[row, position], driver.logits[row, position])


def test_one_call_and_single_operations_have_the_same_bits(tmp_path):
    folder = make_model(tmp_path / "model", dtype=torch.bfloat16)
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=targets_of("qwen3"))
    drivers = [Driver(load(folder, dtype="bfloat16")) for _ in range(2)]
    drivers[1].runner._model._fused = None
    for driver in drivers:
        for row, prompt in enumerate(prompts([30, 12])):
            driver.open(row, prompt, adapter=place(driver.runner, "one", adapter) if row else b"")
        driver.step({0: 20, 1: 12})
        driver.step({1: 1, 0: 10})
        driver.decode([0, 1], 3)
    assert drivers[0].logits.keys() == drivers[1].logits.keys()
    assert all(torch.equal(drivers[0].logits[key], drivers[1].logits[key]) for key in drivers[0].logits)


# -- names of other writers --------------------------------------------------------------------------------------------


def rewritten(adapter, target, rename):
    """A copy of an adapter with other tensors: `rename` maps names to names (None: without the tensor)."""
    shutil.copytree(adapter, target)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file({name: t for name, t in renamed.items() if name is not None}, target / "adapter_model.safetensors")
    return target


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A model and an adapter of it."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    return folder, make_adapter(folder, tmp_path_factory.mktemp("adapter"), target_modules=targets_of("qwen3"))


LAYER = "base_model.model.model.layers.0"
TENSORS = {
    "a layer is missing": (
        lambda name: None if f"{LAYER}.mlp.up_proj" in name else name,
        r"target_modules selects base_model.model.model.layers.0.mlp.up_proj, but the adapter has no tensors",
    ),
    "half of a pair is missing": (
        lambda name: None if name == f"{LAYER}.mlp.up_proj.lora_B.weight" else name,
        r"layers.0.mlp.up_proj has lora_A, but no lora_B",
    ),
    "another module": (
        lambda name: name.replace("layers.0.mlp.up_proj", "layers.0.mlp.w1"),
        r"the adapter changes base_model.model.model.layers.0.mlp.w1; this model has no such linear layers.*may change "
        r"self_attn.q_proj, ",
    ),
    "a layer that the model has not": (
        lambda name: name.replace("layers.1.", "layers.7."),
        r"the adapter changes .*layers.7.mlp.down_proj, .* and 4 more; this model has no such",
    ),
    "an embedding": (
        lambda name: name.replace(f"{LAYER}.mlp.up_proj.", "base_model.model.model.embed_tokens."),
        r"the adapter changes base_model.model.model.embed_tokens; only adapters of the linear layers",
    ),
    "the head": (
        lambda name: name.replace(f"{LAYER}.mlp.up_proj.", "base_model.model.lm_head."),
        r"the adapter changes base_model.model.lm_head; only adapters of the linear layers",
    ),
    "another tower": (
        lambda name: name.replace("model.layers", "visual.layers"),
        r"the adapter changes base_model.model.visual.layers.*only adapters of the linear layers",
    ),
    "DoRA": (
        lambda name: name.replace(f"{LAYER}.mlp.up_proj.lora_A.weight", f"{LAYER}.mlp.up_proj.lora_magnitude_vector"),
        r"tensor .*up_proj.lora_magnitude_vector \[8, 64\] is neither lora_A nor lora_B",
    ),
    "two prefixes": (
        lambda name: name.removeprefix("base_model.model.") if "up_proj" in name else name,
        r"the names of the adapter's tensors start with .*they must start alike",
    ),
    "nothing": (lambda name: None, r"the adapter has no tensors; it would change nothing"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_refused_tensors(tmp_path, qwen3, name):
    folder, adapter = qwen3
    rename, message = TENSORS[name]
    with pytest.raises(AdapterError, match=message):
        load(folder).adapters.load("bad", rewritten(adapter, tmp_path / "bad", rename))


CONFIGS = {
    "rank": ({"r": 4}, r"tensor .*lora_A.weight has shape \[8, 96\], but rank 4 and this model require \[4, 96\]"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 2}}, r"q_proj.lora_A.weight has shape \[8, 64\], but rank 2"),
    "too large": ({"r": 5000}, r"r: must be an integer from 1 to 1024, found 5000"),
    "targets": ({"target_modules": ["q_proj"]}, r"target_modules does not select .*, but the adapter has tensors"),
    "no module": ({"target_modules": "nothing"}, r"target_modules does not select"),
    "bad expression": ({"target_modules": "("}, r"target_modules: '\(' is not a valid regular expression"),
    "dora": ({"use_dora": True}, r"use_dora: .* uses DoRA, which is not computed; found True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, r"modules_to_save: .*replaced modules.*found \['lm_head'\]"),
    "bias": ({"bias": "all"}, r"bias: .*trained biases \('all'\)"),
    "lora_bias": ({"lora_bias": True}, r"lora_bias: .*biases of lora_B"),
    "kind": ({"peft_type": "IA3"}, r"peft_type: .*kind 'IA3'; only LORA"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights: .*'pissa_niter_4'; convert it"),
    "unknown": ({"brand_new": 3}, r"brand_new: .*unknown field to 3"),
    "alpha": ({"lora_alpha": "x"}, r"lora_alpha: must be a number, found 'x'"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_refused_configurations(tmp_path, qwen3, name):
    folder, adapter = qwen3
    fields, message = CONFIGS[name]
    shutil.copytree(adapter, tmp_path / "bad")
    path = tmp_path / "bad" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterError, match=message):
        load(folder).adapters.load("bad", tmp_path / "bad")


def test_refused_folders(tmp_path, qwen3):
    folder, adapter = qwen3
    runner = load(folder, max_adapter_rank=4)
    with pytest.raises(AdapterError, match=r"has no adapter_config.json; give a folder"):
        runner.adapters.load("bad", tmp_path)
    with pytest.raises(AdapterError, match=r"has rank 8, but this worker allows at most 4; raise --max-adapter-rank"):
        runner.adapters.load("bad", adapter)
    rewritten(adapter, tmp_path / "nan", lambda name: name)
    tensors = load_file(tmp_path / "nan" / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, tmp_path / "nan" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"contains NaN or infinity"):
        load(folder).adapters.load("bad", tmp_path / "nan")
    (tmp_path / "nan" / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is damaged"):
        runner.adapters.load("bad", tmp_path / "nan")
    (tmp_path / "nan" / "adapter_model.safetensors").unlink()
    (tmp_path / "nan" / "adapter_model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is damaged \(it is not a regular file\)"):
        runner.adapters.load("bad", tmp_path / "nan")
    (tmp_path / "nan" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is missing; only adapters in safetensors"):
        runner.adapters.load("bad", tmp_path / "nan")


def test_adapters_of_experts_are_refused(tmp_path):
    folder = make_model(tmp_path / "model", "mixtral")
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=["q_proj"])
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1."
    renamed = rewritten(adapter, tmp_path / "bad", lambda n: n.replace(f"{LAYER}.self_attn.q_proj.", name))
    with pytest.raises(AdapterError, match=r"experts.1.w1; this model has no such linear layers, or adapters of them"):
        load(folder).adapters.load("bad", renamed)


# -- the store ---------------------------------------------------------------------------------------------------------


def test_content_under_a_name_does_not_change(tmp_path, qwen3):
    folder, adapter = qwen3
    other = make_adapter(folder, tmp_path / "other", seed=5, target_modules=["q_proj"])
    store = load(folder, max_loaded_adapters=2).adapters
    assert store.load("one", adapter) == store.load("one", adapter)
    with pytest.raises(AdapterError, match=r"adapter 'one' is loaded with other content .*; unload it first"):
        store.load("one", other)
    store.load("two", other)
    with pytest.raises(AdapterError, match=r"2 adapters are loaded, the limit of --max-loaded-adapters"):
        store.load("three", adapter)
    assert store.unload("one")
    assert not store.unload("one")
    assert [entry.name for entry in store.entries()] == ["two"]
    with pytest.raises(AdapterError, match=r"name: '' is not 1 to 128 printable characters"):
        store.load("", adapter)


def test_a_row_needs_a_resident_adapter_and_keeps_it(tmp_path, qwen3):
    folder, adapter = qwen3
    driver = Driver(load(folder, max_adapters=1))
    store = driver.runner.adapters
    digest = store.load("one", adapter).digest
    driver.open(0, prompts([20])[0], adapter=digest)
    driver.step({})
    assert [error.message for error in driver.errors] == [
        f"adapter {digest.hex()} is not in use by this worker; place it first"
    ]
    driver.errors.clear()
    store.swap(digest)
    driver.open(0, prompts([20])[0], adapter=digest)
    driver.prefill(0)
    other = make_adapter(folder, tmp_path / "other", seed=5, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"1 adapters are resident, the limit of --max-adapters"):
        store.swap(store.load("two", other).digest, kept=[digest])
    store.swap(store.load("two", other).digest, kept=())
    assert store.find(digest) is None
    assert store.num_swaps == 2
    driver.decode([0], 3)
    assert driver.errors == []
    check_against(load_merged(folder, adapter), driver, [0])
    driver.close(0)
    driver.step({})
    assert not driver.runner._tables.adapters.in_use


def test_adapters_need_a_backend_that_computes_them(tmp_path, qwen3, monkeypatch):
    folder, _ = qwen3
    monkeypatch.setattr(
        "worker_svc.engine.checkpoint.features.OF_BACKEND", {"cpu": frozenset(), "reference": frozenset({"adapters"})}
    )
    with pytest.raises(CheckpointError, match=r"this model needs LoRA adapters, which backend cpu does not compute"):
        load(folder)


def test_memory_of_adapters_is_left_free(tmp_path, qwen3, monkeypatch):
    folder, _ = qwen3
    monkeypatch.setattr("worker_svc.engine.loading.available_memory", lambda: 64 << 20)
    config = EngineConfig(folder, "float32", threads=1, max_num_seqs=2)
    sizes = [
        ModelRunner(replace(config, max_adapters=count, max_adapter_rank=256)).info.num_blocks for count in (0, 8, 30)
    ]
    assert sizes[0] > sizes[1] > sizes[2]
