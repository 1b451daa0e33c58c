"""Errors of bad model folders name the tensor or field; facts about good ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.models import make_model
from worker_svc.engine.checkpoint.model_folder import BUNDLE_FILES, MAX_TENSORS, CheckpointError, tensor_sums
from worker_svc.engine.checkpoint.tensors import Checkpoint, WeightsDigest
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.engine_info import choose_max_model_len, revision_of
from worker_svc.engine.kernels.build import ABI_VERSION, SOURCES, load_kernels
from worker_svc.engine.model_runner import ModelRunner


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "some-model", "qwen3", num_hidden_layers=1)


def load(folder, **settings):
    return ModelRunner(EngineConfig(folder, **({"num_blocks": 8, "threads": 1} | settings)))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


K_PROJ = "model.layers.0.self_attn.k_proj.weight"

BAD_TENSORS = {
    "missing": (lambda t: t.pop(K_PROJ), [K_PROJ, "missing"]),
    "shape": (lambda t: t.update({K_PROJ: torch.zeros(5, 64)}), [K_PROJ, "[5, 64]", "[32, 64]"]),
    "unexpected": (lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(3)}), ["extra.weight", "[3]"]),
    "no head": (lambda t: t.pop("lm_head.weight"), ["lm_head.weight"]),
    "quantized": (lambda t: t.update({K_PROJ: torch.zeros(32, 64, dtype=torch.int8)}), [K_PROJ, "int8"]),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensor_is_named(folder, name):
    change, parts = BAD_TENSORS[name]
    change_tensors(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for part in parts:
        assert part in str(caught.value)


BAD_CONFIGS = {
    "architectures": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; the nearest are "),
    "no architectures": ({"architectures": None}, "architectures: not set"),
    "quantization": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "hidden_size": ({"hidden_size": None}, "hidden_size"),
    "hidden_act": ({"hidden_act": "relu6"}, "hidden_act: 'relu6'"),
    "rope type": ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "rope_type: 'ntk'"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    "partial rotary": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd heads": ({"head_dim": 15}, "head_dim"),
    "layers": ({"num_hidden_layers": 2, "layer_types": None}, "model.layers.1."),
    "layer types": ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types: 1 entries for 2 layers"),
    "sizes": ({"intermediate_size": 97}, "gate_proj.weight has shape [96, 64], but config.json requires [97, 64]"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_config_is_named(folder, rewrite_config, name):
    fields, message = BAD_CONFIGS[name]
    rewrite_config(folder, **fields)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert message in str(caught.value)


def test_folder_problems_are_named(tmp_path, folder):
    with pytest.raises(CheckpointError, match="not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x08" + bytes(30))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load(folder)


def test_a_separate_head_with_tied_embeddings_is_refused(tmp_path):
    folder = make_model(tmp_path, "llama", tie_word_embeddings=True, num_hidden_layers=1)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(folder)  # equal to the embedding
    change_tensors(folder, lambda t: t["lm_head.weight"].add_(1.0))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load(folder)


def test_missing_shard_is_named(tmp_path):
    folder = make_model(tmp_path, "llama", max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    content = load_file(shard)
    name = sorted(content)[0]
    save_file({k: v for k, v in content.items() if k != name}, shard)
    with pytest.raises(CheckpointError, match=name):
        load(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder)


def test_revision_depends_on_each_file_that_changes_a_token(folder, rewrite_config):
    """Defaults of unset fields, ids that end an output, and the text side: equal requests have other tokens."""
    config = EngineConfig(folder, "float32", block_size=16, num_blocks=8)

    def revision(digest="weights"):
        return revision_of(config, Checkpoint(folder), "float32", "numerics", digest, 128)

    seen = [revision(), revision("updated")]
    assert revision() == seen[0] != revision("updated")
    rewrite_config(folder, "generation_config.json", temperature=1.6)
    seen.append(revision())
    rewrite_config(folder, "generation_config.json", eos_token_id=[2, 5])
    seen.append(revision())
    (folder / "additional_chat_templates").mkdir()
    for name in (*BUNDLE_FILES, "additional_chat_templates/rag.jinja"):
        if name != "config.json":
            (folder / name).write_text("{}")
            seen.append(revision())
    assert len(set(seen)) == len(seen)
    (folder / "README.md").write_text("no token depends on it")
    assert revision() == seen[-1]


def test_a_pool_that_holds_a_window_does_not_cap_the_length(tmp_path):
    folder = make_model(tmp_path, "mistral", sliding_window=64)
    assert load(folder).info.max_model_len == 1024  # the model's length: the pool holds more than a window
    model = parse_config(json.loads((folder / "config.json").read_text()))
    assert choose_max_model_len(EngineConfig(folder, num_blocks=8), model, 8) == 1024


def test_without_a_compiler_plain_torch_serves(folder, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert load(folder).info.backend == "reference"
    assert "no C++ compiler found" in caplog.text


def test_processes_that_start_together_compile_the_kernels_once(monkeypatch, tmp_path):
    compiler, cache, calls = tmp_path / "c++", tmp_path / "cache", tmp_path / "calls"
    library = load_kernels()._name  # the result of the compiler below
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >>{calls}\nfor target; do :; done\n'
        f'case "$*" in *-shared*) exec cp {library} "$target";; *" -c "*) exec touch "$target";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(cache))
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(load_kernels) for _ in range(3)]:
            assert future.result().quire_abi_version() == ABI_VERSION
    assert len(list(cache.iterdir())) == 1  # one library and no leftovers
    load_kernels()
    words = calls.read_text().split()
    assert sorted(Path(word).name for word in words if word.endswith(".cpp")) == sorted(s.name for s in SOURCES)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 12), ("block_size", 512), ("num_blocks", 0), ("max_num_seqs", 0), ("dtype", "float16"),
     ("determinism", "sometimes"), ("threads", 0), ("quantize", "int4")],
)  # fmt: skip
def test_bad_setting_is_named(tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        EngineConfig(tmp_path, **{field: value})


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 1.5), ("top_k", "all"), ("min_p", True)])
def test_bad_generation_config_is_named(folder, rewrite_config, name, value):
    rewrite_config(folder, "generation_config.json", **{name: value})
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name} is {value!r}"):
        load(folder)


def test_revision_covers_every_weight(folder):
    before = load(folder).info
    change_tensors(folder, lambda t: t[K_PROJ].view(-1)[-1:].mul_(1.0001))
    after = load(folder).info
    assert after.weights_digest != before.weights_digest
    assert after.revision != before.revision


def test_weights_digest_does_not_depend_on_files_or_threads(tmp_path):
    def digest(folder, threads):
        checkpoint = Checkpoint(folder)
        checkpoint.start_digest(threads)
        return checkpoint.weights_digest()

    whole = make_model(tmp_path / "whole", "llama")
    sharded = make_model(tmp_path / "sharded", "llama", max_shard_size="60KB")
    assert not (sharded / "model.safetensors").exists()
    assert digest(whole, 1) == digest(whole, 3) == digest(sharded, 2) == load(whole).info.weights_digest


def test_weights_digest_covers_names_shapes_and_dtypes():
    def digest(tensors):
        digest = WeightsDigest(1)
        for name, tensor in tensors.items():
            digest.add(name, tensor)
        return digest.result()

    x = torch.arange(12.0)
    variants = [
        {"a": x}, {"b": x}, {"a": x.view(3, 4)}, {"a": x.view(torch.int32)}, {"a": x[:6], "b": x[6:]},
        {"a": x, "b": x[:0]},
    ]  # fmt: skip
    assert len({digest(tensors) for tensors in variants}) == len(variants)
    assert digest({"b": x, "a": x[:6]}) == digest({"a": x[:6], "b": x})


def test_gpt2_with_the_tensor_names_of_its_first_repository_is_loaded(tmp_path):
    """The Hub's gpt2 was saved without its head, so its tensors lack `transformer.`; it also stores masks."""
    folder = make_model(tmp_path / "gpt2", "gpt2")

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    change_tensors(folder, rename)
    assert load(folder).info.vocab_size


def write_header(path: Path, entries: dict[str, object], data: bytes = b"") -> None:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


@pytest.fixture(params=["fifo", "device", "folder", "many tensors", "large header"])
def no_weights(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A path that is no file of weights, and the words that refuse it."""
    path = tmp_path / "update.safetensors"
    if request.param == "fifo":
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a reader that does not ask what it reads goes on
        os.write(writer, bytes(64))
        yield path, "not a regular file"
        os.close(writer)
        return
    if request.param == "device":
        path.symlink_to("/dev/zero")
        yield path, "not a regular file"
    elif request.param == "folder":
        path.mkdir()
        yield path, "not a regular file"
    elif request.param == "many tensors":
        write_header(path, {f"t{i}": entry(0, 0) for i in range(MAX_TENSORS + 1)})
        yield path, f"has {MAX_TENSORS + 1} tensors|has a header of"
    else:
        write_header(path, {"__metadata__": {"a": "b" * (12 << 20)}, "t": entry(0, 1)}, b"x")
        yield path, "has a header of"


def test_what_is_no_file_of_weights_is_refused_before_the_library_reads_it(
    folder: Path, no_weights: tuple[Path, str]
) -> None:
    path, words = no_weights
    for read in (lambda: Checkpoint(folder, [path]), lambda: tensor_sums(path)):
        with pytest.raises(CheckpointError, match=words):
            read()


def test_tensors_of_an_update_lie_side_by_side_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "update.safetensors"
    write_header(path, {"b": entry(0, 2), "a": entry(2, 4)}, b"abcd")
    assert [one.name for one in tensor_sums(path)] == ["a", "b"]
    for wrong in (entry(1, 3), entry(3, 4), entry(2, 1 << 60), entry(2, 1)):
        write_header(path, {"b": entry(0, 2), "a": wrong}, b"abcd")
        with pytest.raises(CheckpointError, match="tensor a has bytes"):
            tensor_sums(path)
