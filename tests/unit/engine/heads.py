"""Checkpoints with heads that propose drafts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.models import make_model


def add_mtp(folder: Path, *, agrees: bool = False, seed: int = 5) -> Path:
    """Adds a random layer that predicts a further token, as GLM-4.5 and DeepSeek V3 name it.

    With `agrees` the output of a token depends mostly on its own embedding, in the model and in this layer.
    """
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    (file,) = folder.glob("*.safetensors")
    tensors, random = load_file(file), torch.Generator().manual_seed(seed)
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in tensors if name.startswith(last)]:
        tensor = tensors[name]
        order = torch.randperm(tensor.shape[-1], generator=random)
        tensors[own + name.removeprefix(last)] = tensor[..., order].contiguous()
    norms = {"enorm", "hnorm", "shared_head.norm"}
    tensors |= {f"{own}{name}.weight": torch.rand(hidden, generator=random) + 0.5 for name in norms}
    projection = torch.randn(hidden, 2 * hidden, generator=random) * (2 * hidden) ** -0.5
    if agrees:
        projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        tensors |= {f"{own}{name}.weight": torch.ones(hidden) for name in norms}
        tensors["model.norm.weight"] = torch.ones(hidden)
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = tensors[name] * 0.03
    tensors[f"{own}eh_proj.weight"] = projection
    save_file(tensors, file, {"format": "pt"})
    return folder


def make_mtp_model(folder: Path, architecture: str = "glm4_moe", *, agrees: bool = False) -> Path:
    return add_mtp(make_model(folder, architecture), agrees=agrees)
