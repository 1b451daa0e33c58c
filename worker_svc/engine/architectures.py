"""The fields of config.json that the decoder needs, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.families import Architecture, architecture_of
from worker_svc.engine.model_folder import CheckpointError

ORIGINAL_LENGTH = "original_max_position_embeddings"
DEFAULT_WINDOW = 4096  # if config.json has no sliding_window, as in transformers
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, checked."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: HeadShape
    vocab_size: int
    max_position_embeddings: int
    sliding_window: int | None
    rms_norm_eps: float
    activation: str
    is_tied: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    inv_freq: torch.Tensor  # float32 [head_dim / 2], scaling included


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """Reads config.json. Raises CheckpointError naming the field for anything that is not supported."""
    architecture = architecture_of(config)
    attention_bias = bool(config.get("attention_bias", False))
    heads = _heads(config)
    return ModelConfig(
        architecture=architecture,
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        heads=heads,
        vocab_size=_size(config, "vocab_size"),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        sliding_window=_sliding_window(config, architecture),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=attention_bias if architecture.has_qkv_bias is None else architecture.has_qkv_bias,
        has_o_bias=attention_bias if architecture.has_o_bias is None else architecture.has_o_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)) if architecture.has_mlp_bias is None else False,
        inv_freq=_inverse_frequencies(config, heads.head_dim),
    )


def _size(config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{field}: config.json must hold a positive integer, found {value!r}")
    return value


def _heads(config: dict[str, Any]) -> HeadShape:
    num_q_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") else num_q_heads
    if num_q_heads % num_kv_heads:
        raise CheckpointError(f"num_key_value_heads: {num_kv_heads} does not divide the {num_q_heads} attention heads")
    head_dim = config.get("head_dim") or _size(config, "hidden_size") // num_q_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim: rotary positions need an even number, found {head_dim}")
    return HeadShape(num_q_heads, num_kv_heads, int(head_dim))


def _activation(config: dict[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"hidden_act: {name!r} is not supported; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _sliding_window(config: dict[str, Any], architecture: Architecture) -> int | None:
    if architecture.is_window_opt_in and not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window: int | None = config.get("sliding_window", DEFAULT_WINDOW)
    return window


def _inverse_frequencies(config: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Rotary frequencies float32 [head_dim / 2], from `rope_parameters` or from `rope_theta` and `rope_scaling`.
    If both set a value, the one that transformers reads applies.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if ORIGINAL_LENGTH in config:
        rope[ORIGINAL_LENGTH] = config[ORIGINAL_LENGTH]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor: only 1 is supported, found {partial!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_SCALINGS:
        raise CheckpointError(f"rope_type: {kind!r} is not supported; use one of {', '.join(ROPE_SCALINGS)}")
    theta = _rope_number(rope if "rope_theta" in rope else {"rope_theta": 10000.0, **config}, "rope_theta")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return ROPE_SCALINGS[kind](1.0 / theta**exponents, rope)


def _rope_number(rope: dict[str, Any], field: str) -> float:
    value = rope.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{field}: config.json must hold a positive number, found {value!r}")
    return float(value)


def _scale_default(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    return inv_freq


def _scale_linear(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    return inv_freq / _rope_number(rope, "factor")


def _scale_llama3(inv_freq: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Divides the frequencies of long wavelengths by `factor`, keeps those of short ones, and interpolates the rest."""
    factor = _rope_number(rope, "factor")
    low = _rope_number(rope, "low_freq_factor")
    high = _rope_number(rope, "high_freq_factor")
    original_len = _rope_number(rope, "original_max_position_embeddings")
    wave_len = 2 * math.pi / inv_freq
    smooth = (original_len / wave_len - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    is_long, is_short = wave_len > original_len / low, wave_len < original_len / high
    return torch.where(is_long, inv_freq / factor, torch.where(is_short, inv_freq, blended))


ROPE_SCALINGS = {"default": _scale_default, "linear": _scale_linear, "llama3": _scale_llama3}
