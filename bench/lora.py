"""LoRA adapters with random matrices, as PEFT writes them, for models of the Qwen3 architecture without experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.workloads import Model, weight_shapes


def linears_of(model: Model) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers that an adapter changes, by name."""
    shapes = ((name, shape) for name, shape in weight_shapes(model).items() if name.endswith("_proj"))
    return {f"model.{name}": (shape[0], shape[1]) for name, shape in shapes}


def make_adapter(folder: Path, model: Model, rank: int, seed: int, *, spread: float = 0.02) -> Path:
    """An adapter of all linear layers, unless it exists. `spread`: standard deviation of its numbers."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in linears_of(model).items():
        path = f"base_model.model.{name}"
        tensors[f"{path}.lora_A.weight"] = spread * torch.randn(rank, inputs, generator=generator)
        tensors[f"{path}.lora_B.weight"] = spread * torch.randn(outputs, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in linears_of(model)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
