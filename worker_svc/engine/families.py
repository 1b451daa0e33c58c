"""The supported architectures.

All share one decoder: RMSNorm before attention and before a gated MLP, rotary positions, grouped query heads. The table
lists their differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker_svc.engine.model_folder import CheckpointError


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences of one family from the common decoder. None: config.json decides."""

    has_qk_norm: bool = False
    has_qkv_bias: bool | None = None  # None: `attention_bias`
    has_o_bias: bool | None = None  # None: `attention_bias`
    has_mlp_bias: bool | None = False  # None: `mlp_bias`
    is_window_opt_in: bool = True  # the window applies only with `use_sliding_window`


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(has_qk_norm=True),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True, has_o_bias=False),
    "LlamaForCausalLM": Architecture(has_mlp_bias=None),
    "MistralForCausalLM": Architecture(has_qkv_bias=False, has_o_bias=False, is_window_opt_in=False),
}


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture in config.json. Raises CheckpointError if it is not supported."""
    names = config.get("architectures") or []
    found = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if found is None:
        raise CheckpointError(
            f"architectures: {', '.join(map(str, names)) or 'not set'} is not supported; "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise CheckpointError("quantization_config: quantized checkpoints are not supported; use the original weights")
    return found
