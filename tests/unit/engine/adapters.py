"""LoRA adapters with random weights, as PEFT writes them, and the same adapters merged into the model by PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.unit.engine.models import load_reference

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
ALL: dict[str, list[str] | str] = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    # Keys of some layers are their values, or those of another layer
    **{name: ["o_proj", *FEED_FORWARD] for name in ("gemma3n", "gemma4", "gemma4_moe")},
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mistral3": r".*\.language_model\..*_proj",  # the image tower has modules of the same names
    # Adapters of experts, of shared ones and of latents are not computed.
    **dict.fromkeys(("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "dots1", "ernie4_5_moe", "llama4"), ATTENTION),
    **dict.fromkeys(("mellum", "solar_open"), ATTENTION),
    **{name: ["o_proj"] for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
}


def targets_of(architecture: str) -> list[str] | str:
    """The modules of an architecture whose adapters are computed."""
    return ALL.get(architecture, [*ATTENTION, *FEED_FORWARD])


def make_adapter(
    model_dir: Path,
    folder: Path,
    *,
    seed: int = 0,
    target_modules: list[str] | str,
    strength: float = 0.5,
    **fields: Any,
) -> Path:
    """Writes an adapter of a model to `folder`, with matrices that change the logits by about `strength`."""
    config = LoraConfig(
        **({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"} | fields), target_modules=target_modules
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_reference(model_dir), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            elif ".lora_B." in name:
                parameter.normal_(0.0, strength * parameter.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(str(folder))
    return folder


def load_merged(model_dir: Path, folder: Path) -> torch.nn.Module:
    """The model with the adapter merged into its weights by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_reference(model_dir), str(folder)).merge_and_unload()
    return model.eval()
