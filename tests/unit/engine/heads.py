"""Checkpoints with heads that propose drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.models import make_model
from worker_svc.engine.checkpoint.families import architecture_of


def weaken(tensors: dict[str, torch.Tensor]) -> None:
    """Lets the output of a token depend mostly on its own embedding."""
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.03


def add_mtp(folder: Path, *, agrees: bool = False, seed: int = 5) -> Path:
    """Adds a random layer that predicts a further token, as the architecture of the checkpoint names it.

    With `agrees` the output of a token depends mostly on its own embedding, in the model and in this layer.
    """
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    (file,) = folder.glob("*.safetensors")
    tensors, random = load_file(file), torch.Generator().manual_seed(seed)
    mtp = architecture_of(config).mtp
    last = next(name for name in sorted(tensors, reverse=True) if name.endswith("self_attn.o_proj.weight"))
    last, own = last.removesuffix("self_attn.o_proj.weight"), mtp.layer.format(layers)
    embedding_norm, state_norm, fc, final_norm = (
        f"{name.format(layers)}.weight" for name in (mtp.embedding_norm, mtp.state_norm, mtp.projection, mtp.final_norm)
    )
    for name in [name for name in tensors if name.startswith(last)]:
        tensor = tensors[name]
        order = torch.randperm(tensor.shape[-1], generator=random)
        tensors[own + name.removeprefix(last)] = tensor[..., order].contiguous()
    norms = embedding_norm, state_norm, final_norm
    tensors |= {name: torch.rand(hidden, generator=random) + 0.5 for name in norms}
    projection = torch.randn(hidden, 2 * hidden, generator=random) * (2 * hidden) ** -0.5
    if agrees:
        projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        tensors |= {name: torch.ones(hidden) for name in norms}
        weaken(tensors)
    tensors[fc] = projection
    save_file(tensors, file, {"format": "pt"})
    return folder


def make_eagle(folder: Path, target: Path, *, agrees: bool = False, seed: int = 6, **fields: Any) -> Path:
    """Writes a random EAGLE-3 head for a model of three layers or more, with three quarters of its vocabulary. With
    `agrees` its output depends mostly on the embedding of the token, as that of a weakened model."""
    config = json.loads((target / "config.json").read_text())
    (file,) = target.glob("*.safetensors")
    tensors, random = load_file(file), torch.Generator().manual_seed(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": hidden, "intermediate_size": 48, "num_attention_heads": heads, "num_key_value_heads": heads,
        "vocab_size": vocab,
        "draft_vocab_size": vocab * 3 // 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]},
    }  # fmt: skip
    size = own["draft_vocab_size"]
    ids = torch.randperm(vocab, generator=random)[:size].sort().values

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=random) * inputs**-0.5

    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    found = {f"midlayer.{name}.weight": torch.rand(hidden, generator=random) + 0.5 for name in names}
    found |= {f"midlayer.self_attn.{part}_proj.weight": matrix(hidden, 2 * hidden) for part in "qkv"}
    found |= {f"midlayer.mlp.{part}_proj.weight": matrix(48, hidden) for part in ("gate", "up")}
    found |= {
        "midlayer.self_attn.o_proj.weight": matrix(hidden, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, 48),
        "norm.weight": torch.rand(hidden, generator=random) + 0.5,
        "fc.weight": matrix(hidden, 3 * hidden),
        "lm_head.weight": tensors["lm_head.weight"].float()[ids] if agrees else matrix(size, hidden),
        "d2t": ids - torch.arange(size),
        "t2d": torch.isin(torch.arange(vocab), ids),
    }
    if agrees:  # attention sees its own token, and passes its embedding on
        same = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        found |= {f"midlayer.self_attn.{part}_proj.weight": same * (1 if part == "v" else 8) for part in "qkv"}
        found["midlayer.self_attn.o_proj.weight"] = torch.eye(hidden)
        found |= {name: torch.ones(hidden) for name in found if "norm" in name}
        found |= {name: found[name] * 0.01 for name in ("fc.weight", "midlayer.mlp.down_proj.weight")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(own | fields))
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_mtp_model(folder: Path, architecture: str = "glm4_moe", *, agrees: bool = False) -> Path:
    return add_mtp(make_model(folder, architecture), agrees=agrees)
