"""Vision towers against transformers, and their independence of threads and slices."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.vision_models import (
    TOWERS,
    grid_of,
    load_vision_reference,
    make_image,
    make_vision_model,
    pixel_values,
)
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.vision.tower import VisionTower

SIZES = [(2, 2), (4, 6), (10, 4), (6, 22)]  # in patches


def load_tower(folder, backend="cpu", threads=1, dtype=torch.float32):
    checkpoint = Checkpoint(folder)
    config = parse_config(checkpoint.config).vision
    return VisionTower(checkpoint, config, make_backend(backend, threads, "exact"), dtype)


def compute(tower, image, layers_at_once=100):
    run = tower.start(image)
    num_layers = 0
    while not run.is_done:
        num_layers += layers_at_once
        run.advance_to(num_layers)
    return run.result()


@pytest.mark.parametrize("architecture", TOWERS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@torch.inference_mode()
def test_towers_match_transformers(tmp_path, architecture, backend):
    folder = make_vision_model(tmp_path, architecture)
    tower, reference = load_tower(folder, backend), load_vision_reference(folder)
    for seed, size in enumerate(SIZES):
        image = make_image(*size, seed)
        found = reference.model.visual(pixel_values(image), grid_thw=grid_of(image))
        expected = torch.stack([found.pooler_output, *getattr(found, "deepstack_features", [])])
        outputs = compute(tower, image)
        assert outputs.shape == expected.shape
        assert expected.std() > 0.1
        assert (outputs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("architecture", TOWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_tower_gives_the_same_bits_for_any_threads_and_slices(tmp_path, architecture, dtype):
    folder = make_vision_model(tmp_path, architecture)
    image = make_image(14, 22, 3)
    expected = compute(load_tower(folder, dtype=dtype), image)
    other = load_tower(folder, threads=2, dtype=dtype)
    assert torch.equal(compute(other, image, 1), expected)
    first, second = other.start(image), other.start(make_image(4, 4, 5))
    first.advance_to(2)
    second.advance_to(1)
    first.advance_to(100)
    assert torch.equal(first.result(), expected)


def changed(config, **fields):
    return config | {"vision_config": config["vision_config"] | fields}


def test_unsupported_towers_are_refused_by_field(tmp_path):
    config = json.loads((make_vision_model(tmp_path, "qwen3_vl") / "config.json").read_text())
    config = config["text_config"] | config
    parse_config(config)
    cases = {
        "vision_config: config.json must hold an object": config | {"vision_config": None},
        "vision_config.depth": changed(config, depth=0),
        "vision_config.num_heads": changed(config, num_heads=5),
        "vision_config.hidden_act": changed(config, hidden_act="relu6"),
        "vision_config.out_hidden_size": changed(config, out_hidden_size=65),
        "vision_config.num_position_embeddings: 24 is not a square": changed(config, num_position_embeddings=24),
        "must name different layers": changed(config, deepstack_visual_indexes=[1, 1]),
        "image_token_id": config | {"image_token_id": None},
        "mrope_section": config | {"rope_parameters": config["rope_parameters"] | {"mrope_section": [8, 8, 8]}},
    }
    for message, bad in cases.items():
        with pytest.raises(CheckpointError, match=message):
            parse_config(bad)


@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen3_vl"])
def test_tensors_may_be_nested_or_not(tmp_path, architecture):
    """The models on the Hub have either form; transformers writes one of them."""
    folder = make_vision_model(tmp_path, architecture)
    tensors = load_file(folder / "model.safetensors")
    found = Checkpoint(folder)
    names = set(found.tensor_names)
    assert {"model.embed_tokens.weight", "visual.patch_embed.proj.weight"} <= names
    is_nested = any(name.startswith("model.visual.") for name in tensors)
    turned = {_turned(name, is_nested=is_nested): tensor for name, tensor in tensors.items()}
    assert turned.keys() != tensors.keys()
    save_file(turned, folder / "model.safetensors")
    other = Checkpoint(folder)
    assert set(other.tensor_names) == names
    shape = found.shape("visual.blocks.0.attn.qkv.weight")
    tensor = other.tensor("visual.blocks.0.attn.qkv.weight", shape, None)
    assert torch.equal(tensor, found.tensor("visual.blocks.0.attn.qkv.weight", shape, None))


def _turned(name, *, is_nested):
    pairs = {"model.language_model.": "model.", "model.visual.": "visual."}
    for nested, short in pairs.items():
        old, new = (nested, short) if is_nested else (short, nested)
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
