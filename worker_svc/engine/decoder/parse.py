"""config.json and the row of an architecture become a decoder as data (config.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch

from worker_svc.engine.backend import HeadShape, Routing
from worker_svc.engine.checkpoint.architecture import (
    Architecture,
    ExpertFamily,
    RecurrenceName,
)
from worker_svc.engine.checkpoint.families import architecture_of, head_of
from worker_svc.engine.checkpoint.field_types import check_types
from worker_svc.engine.checkpoint.model_folder import CheckpointError, choice_of, size_of
from worker_svc.engine.checkpoint.quantization_config import quantization_of
from worker_svc.engine.decoder.config import Experts, LatentSpec, LayerSpec, ModelConfig
from worker_svc.engine.decoder.latents import latent_scale, parse_latents
from worker_svc.engine.decoder.layer_kinds import (
    CHUNKED,
    DENSE,
    EXPERTS,
    FULL,
    KIND_NAMES,
    MLP_KINDS,
    RECURRENT,
    ROTATION_RULES,
    SLIDING,
    blocks,
    check_length,
    expert_layers,
    layer_kinds,
)
from worker_svc.engine.decoder.per_layer import kv_owners, layer_heads
from worker_svc.engine.decoder.rotary import ORIGINAL_LENGTH, QueryScaling, Rotary, mrope_axes, parse_rotary, positive
from worker_svc.engine.decoder.streams import StreamSpec
from worker_svc.engine.recurrent import Recurrence, gated_delta, mamba2, norm_eps, short_conv
from worker_svc.engine.vision.config import VisionConfig, parse_vision

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}  # fmt: skip
GROUP_METHODS = {"greedy": False, "group_limited_greedy": True, "noaux_tc": True}  # whether experts are in groups
RECURRENCES: Mapping[RecurrenceName, Callable[[Mapping[str, Any]], Recurrence]] = {
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "short_conv": short_conv,
}
CHOICES: dict[str, Mapping[str, object]] = {
    "hidden_act": ACTIVATIONS,
    "mlp_layer_types": MLP_KINDS,
    "topk_method": GROUP_METHODS,
}
OF_SOME_ROWS = frozenset({"topk_method"})  # read only by rows that have a default


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """Reads config.json. Raises CheckpointError naming the field for anything that is not supported."""
    architecture = architecture_of(config)
    check_types(config)
    config = _completed(config, architecture)
    _check_choices(config)
    latents = _latents(config, architecture)
    heads = _heads(config) if latents is None else _latent_heads(latents)
    attention_bias = bool(config.get("attention_bias", False))
    hidden_size = size_of(config, "hidden_size")
    rotaries, rotary_of = _rotaries(config, architecture, heads.head_dim if latents is None else latents.shape.rope_dim)
    rotaries = tuple(_in_style(rotary, config, architecture) for rotary in rotaries)
    layers, rotaries = _with_unrotated(_layers(config, architecture, heads, rotary_of), rotaries, config, architecture)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=size_of(config, "vocab_size"),
        max_position_embeddings=size_of(config, "max_position_embeddings"),
        layers=tuple(replace(layer, latents=latents) for layer in layers),
        rotaries=rotaries,
        norm_eps=norm_eps(config),
        qk_norm=architecture.qk_norm if config.get("use_qk_norm", True) else None,
        has_qkv_bias=attention_bias if architecture.has_qkv_bias is None else architecture.has_qkv_bias,
        has_o_bias=bool(config.get("attention_out_bias", attention_bias))
        if architecture.has_o_bias is None
        else architecture.has_o_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False))
        if architecture.has_mlp_bias is None
        else architecture.has_mlp_bias,
        activation=architecture.activation
        or choice_of(
            config.get("hidden_act") or architecture.defaults.get("hidden_act", "silu"), ACTIVATIONS, "hidden_act"
        ),
        attention_scale=_attention_scale(config, heads, latents),
        attention_soft_cap=_optional(config, "attn_logit_softcapping"),
        logit_soft_cap=_optional(config, "final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if architecture.scales_embedding else _factor(config, "embedding_multiplier"),
        residual_scale=_factor(config, "residual_multiplier"),
        logit_scale=_factor(config, "logit_scale") / _factor(config, "logits_scaling"),
        num_predicting_layers=int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        vision=_vision(config, architecture, hidden_size),
        image_token_id=_image_token(config, architecture),
        quantization=quantization_of(config, architecture),
        factors=_factors(config) if architecture.has_factors else None,
        layer_input_vocab=int(config.get("vocab_size_per_layer_input") or 0),
        layer_input_width=_layer_input_width(config, architecture),
        streams=_streams(config) if architecture.has_streams else None,
        head=head_of(config),
    )


def _check_choices(config: dict[str, Any]) -> None:
    """Raises CheckpointError for a value that would change what is computed and is not known."""
    for field, known in CHOICES.items():
        given = config.get(field)
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                choice_of(value, known, field)


def _completed(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json with our names of fields, the architecture's defaults, and without fields that it ignores."""
    for field, value in architecture.fixed.items():
        found = config.get(field, architecture.defaults.get(field, value))
        known = value if isinstance(value, tuple) else (value,)
        if (bool(found) if isinstance(value, bool) else found) not in known:
            raise CheckpointError(f"{field}: {found!r} is not supported; only {known[0]} is computed")
    defaults = architecture.defaults
    renamed = {ours: config[theirs] for ours, theirs in architecture.fields.items() if theirs in config}
    # A field of our name stands for something else then, e.g. the width of experts
    renamed |= {ours: defaults[ours] for ours in architecture.fields if ours in defaults and ours not in renamed}
    completed = {**architecture.defaults, **config, **renamed}
    if architecture.layers == "single":
        completed |= blocks(completed)
    ignored = architecture.ignored | (OF_SOME_ROWS - architecture.defaults.keys())
    return {field: value for field, value in completed.items() if field not in ignored}


def _factors(config: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """The factors of Falcon-H1, by linear layer and role."""
    gate, down = _list_of(config, "mlp_multipliers", 2)
    inside, state = _factor(config, "ssm_in_multiplier"), _list_of(config, "ssm_multipliers", 5)
    attention = _factor(config, "attention_in_multiplier")
    return {
        "qkv": (attention, attention * _factor(config, "key_multiplier"), attention),
        "o": (_factor(config, "attention_out_multiplier"),),
        "gate_up": (gate, 1.0),
        "down": (down,),
        "beside_qkv": tuple(inside * factor for factor in state),
        "beside_o": (_factor(config, "ssm_out_multiplier"),),
    }


def _list_of(config: dict[str, Any], field: str, count: int) -> list[float]:
    """Positive numbers; 1 if config.json lacks them."""
    values = config.get(field) or [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{field}: config.json must hold {count} numbers, found {values!r}")
    return [positive({field: value}, field) for value in values]


def _vision(config: dict[str, Any], architecture: Architecture, hidden_size: int) -> VisionConfig | None:
    if architecture.tower is None:
        return None
    return parse_vision(config, architecture.tower, hidden_size)


def _image_token(config: dict[str, Any], architecture: Architecture) -> int | None:
    return None if architecture.tower is None else size_of(config, "image_token_id")


def _factor(config: dict[str, Any], field: str) -> float:
    return positive({field: 1.0, **config}, field)


def _attention_scale(config: dict[str, Any], heads: HeadShape, latents: LatentSpec | None) -> float:
    if latents is not None:
        return latent_scale(latents.shape, config.get("rope_scaling") or config.get("rope_parameters") or {})
    if "attention_multiplier" in config:
        return positive(config, "attention_multiplier")
    scalar = positive({"query_pre_attn_scalar": heads.head_dim} | config, "query_pre_attn_scalar")
    return float(scalar**-0.5)


def _optional(config: dict[str, Any], field: str) -> float | None:
    return None if config.get(field) is None else positive(config, field)


def _latents(config: dict[str, Any], architecture: Architecture) -> LatentSpec | None:
    return parse_latents(config, is_interleaved=True) if architecture.has_latents else None


def _latent_heads(latents: LatentSpec) -> HeadShape:
    return HeadShape(latents.shape.num_heads, 1, latents.shape.rank + latents.shape.rope_dim)


def _heads(config: dict[str, Any]) -> HeadShape:
    num_q_heads = size_of(config, "num_attention_heads")
    num_kv_heads = size_of(config, "num_key_value_heads") if config.get("num_key_value_heads") else num_q_heads
    if num_q_heads % num_kv_heads:
        raise CheckpointError(f"num_key_value_heads: {num_kv_heads} does not divide the {num_q_heads} attention heads")
    head_dim = config.get("head_dim") or size_of(config, "hidden_size") // num_q_heads
    return HeadShape(num_q_heads, num_kv_heads, size_of({"head_dim": head_dim}, "head_dim"))


def _rotaries(
    config: dict[str, Any], architecture: Architecture, head_dim: int
) -> tuple[tuple[Rotary, ...], dict[str, int | None]]:
    """The rotations of a model, and for each type of layer the index of its rotation.

    If config.json sets a value twice, the one that transformers reads applies.
    """
    if architecture.names.position_embedding:
        return (), {FULL: None, SLIDING: None}
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if kinds := _kinds_of(rope):
        sizes = _head_dims(config, architecture, head_dim)
        parsed = tuple(parse_rotary(config, rope[kind], sizes.get(kind, head_dim)) for kind in kinds)
        return parsed, {kind: index for index, kind in enumerate(kinds)}
    if ORIGINAL_LENGTH in config:
        rope[ORIGINAL_LENGTH] = config[ORIGINAL_LENGTH]
    whole = parse_rotary(config, rope, head_dim)
    if architecture.mrope is not None:
        sections = rope.get("mrope_section", config["mrope_section"])
        whole = replace(whole, axes=mrope_axes(sections, architecture.mrope, len(whole.inv_freq)))
    if "rope_local_base_freq" not in config:
        return (whole,), {FULL: 0, SLIDING: 0, CHUNKED: 0}
    local = parse_rotary(config, {"rope_theta": positive(config, "rope_local_base_freq")}, head_dim)
    return (whole, local), {FULL: 0, SLIDING: 1}


def _kinds_of(rope: dict[str, Any]) -> list[str]:
    """The types of layers with a rotation of their own. transformers ignores what stands beside them."""
    kinds = [kind for kind, value in rope.items() if isinstance(value, dict) or kind in KIND_NAMES]
    for kind in kinds:
        choice_of(kind, KIND_NAMES, "rope_parameters")
        if not isinstance(rope[kind], dict):
            raise CheckpointError(f"rope_parameters.{kind}: config.json must hold an object, found {rope[kind]!r}")
    return kinds


def _head_dims(config: dict[str, Any], architecture: Architecture, head_dim: int) -> dict[str, int]:
    """The size of heads by type of layer, where it differs."""
    if not architecture.has_layer_shapes:
        return {}
    _, kinds = layer_kinds(config, architecture, size_of(config, "num_hidden_layers"))
    heads = layer_heads(config, _heads(config), [kind == FULL for kind in kinds])
    return {kind: one.head_dim for kind, one in zip(kinds, heads, strict=True)}


def _in_shape(config: dict[str, Any], layers: list[LayerSpec]) -> list[LayerSpec]:
    """The same layers with heads of their own shapes, and keys and values that some of them share."""
    is_full = [layer.window is None for layer in layers]
    heads, owners = layer_heads(config, layers[0].heads, is_full), kv_owners(config, is_full)
    is_wide, is_one = bool(config.get("use_double_wide_mlp")), bool(config.get("attention_k_eq_v"))
    return [
        replace(
            layer,
            heads=heads[index],
            kv_owner=owners[index],
            inner=layer.inner * (2 if is_wide and owners[index] is not None and layer.experts is None else 1),
            dense_inner=layer.dense_inner * (2 if is_wide and owners[index] is not None else 1),
            has_value_norm=True,
            has_one_key_value=is_one and is_full[index],
        )
        for index, layer in enumerate(layers)
    ]


def _layer_input_width(config: dict[str, Any], architecture: Architecture) -> int:
    if not architecture.has_layer_shapes or not config.get("hidden_size_per_layer_input"):
        return 0
    # Gemma 3n has more tokens, which stand for images and sound
    if not architecture.has_streams and size_of(config, "vocab_size_per_layer_input") < size_of(config, "vocab_size"):
        raise CheckpointError(
            f"vocab_size_per_layer_input: {config['vocab_size_per_layer_input']} is below vocab_size, "
            f"{config['vocab_size']}; every token needs an embedding per layer"
        )
    return size_of(config, "hidden_size_per_layer_input")


def _streams(config: dict[str, Any]) -> StreamSpec:
    count, active = size_of(config, "altup_num_inputs"), config["altup_active_idx"]
    if active not in range(count):
        raise CheckpointError(f"altup_active_idx: {active!r} is not one of the {count} streams of altup_num_inputs")
    return StreamSpec(count, active, bool(config["altup_correct_scale"]), size_of(config, "laurel_rank"))


def _gate_cutoffs(config: dict[str, Any], count: int) -> list[float | None]:
    """The deviations from the mean above which the wanted share of normally distributed gates is dropped."""
    given = config.get("activation_sparsity_pattern")
    if given is None:
        sparse = 10 if count > 10 else 0
        given = [0.95] * sparse + [0.0] * (count - sparse)
    if not isinstance(given, list) or len(given) != count or not all(0.0 <= share < 1.0 for share in given):
        raise CheckpointError(
            f"activation_sparsity_pattern: config.json must hold a share from 0 to below 1 for each of {count} layers, "
            f"found {given!r}"
        )
    return [NormalDist().inv_cdf(share) if share else None for share in given]


def _inners(config: dict[str, Any], architecture: Architecture, count: int, *, is_all_experts: bool) -> list[int]:
    """The width of the dense feed-forward part of each layer, or of experts without a width of their own."""
    given = config.get("intermediate_size")
    if isinstance(given, list):
        check_length("intermediate_size", given, count)
        return [size_of({"intermediate_size": width}, "intermediate_size") for width in given]
    inner = 4 * size_of(config, "hidden_size")  # GPT-2's, if n_inner is null
    if given is not None or (architecture.is_gated and not is_all_experts):
        inner = size_of(config, "intermediate_size")
    if architecture.adjusts_inner and config["block_auto_adjust_ff_dim"]:
        inner = _adjusted_inner(config, inner)
    return [inner] * count


def _layers(
    config: dict[str, Any], architecture: Architecture, heads: HeadShape, rotary_of: dict[str, int | None]
) -> tuple[LayerSpec, ...]:
    count = size_of(config, "num_hidden_layers")
    window, kinds = layer_kinds(config, architecture, count)
    has_experts = expert_layers(config, architecture)
    family = architecture.experts
    is_beside = family is not None and family.is_beside
    is_all_experts = family is not None and not is_beside and all(map(has_experts, range(count)))
    has_own_width = "moe_intermediate_size" in config
    inners = _inners(config, architecture, count, is_all_experts=is_all_experts and has_own_width)
    cutoffs = _gate_cutoffs(config, count) if architecture.has_streams else [None] * count
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in rotary_of and kind not in (RECURRENT, DENSE, EXPERTS):
            raise CheckpointError(f"layer_types: {kind!r} is not supported; use one of {', '.join(rotary_of)}")
        recurrence, has_both = None, architecture.layers == "beside"
        if architecture.recurrence is not None and (kind == RECURRENT or has_both):
            recurrence = RECURRENCES[architecture.recurrence](config)
        is_fed = architecture.layers != "single" or kind in (DENSE, EXPERTS)
        experts = _experts(config, family) if family and has_experts(index) else None
        inner = inners[index]
        expert_inner = config.get("moe_intermediate_size", inner) if experts else inner
        layers.append(
            LayerSpec(
                heads,
                rotary_of.get(kind),
                window if kind == SLIDING else None,
                expert_inner if is_fed else 0,
                experts,
                attends=kind in rotary_of,
                has_output_gate=architecture.has_output_gate and recurrence is None,
                recurrence=recurrence,
                chunk=size_of(config, "attention_chunk_size") if kind == CHUNKED else None,
                dense_inner=inner if experts and is_beside else 0,
                gate_cutoff=cutoffs[index],
            )
        )
    if architecture.has_layer_shapes:
        layers = _in_shape(config, layers)
    if not any(layer.has_mixer for layer in layers):
        raise CheckpointError("layer_types: no layer attends or keeps a state, which is not computed")
    return tuple(layers)


def _in_style(rotary: Rotary, config: dict[str, Any], architecture: Architecture) -> Rotary:
    """A rotation with what the architecture says about all its rotations."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = None
    if rope.get("llama_4_scaling_beta") is not None:
        scaling = QueryScaling(positive(rope, "llama_4_scaling_beta"), size_of(rope, ORIGINAL_LENGTH))
    return replace(
        rotary, is_interleaved=architecture.is_interleaved, is_first=architecture.rotates_first, q_scaling=scaling
    )


def _with_unrotated(
    layers: tuple[LayerSpec, ...], rotaries: tuple[Rotary, ...], config: dict[str, Any], architecture: Architecture
) -> tuple[tuple[LayerSpec, ...], tuple[Rotary, ...]]:
    """The same without rotation of the layers that have no positions, whose queries may be scaled instead."""
    is_rotated = ROTATION_RULES[architecture.rotated](config, layers)
    unrotated = None
    if architecture.rotated == "listed" and config.get("attn_temperature_tuning"):
        scaling = QueryScaling(positive(config, "attn_scale"), size_of(config, "floor_scale"), shift=1)
        unrotated, rotaries = len(rotaries), (*rotaries, Rotary(torch.empty(0), q_scaling=scaling))
    return tuple(
        layer if is_rotated(index) else replace(layer, rotary=unrotated) for index, layer in enumerate(layers)
    ), rotaries


def _adjusted_inner(config: dict[str, Any], inner: int) -> int:
    """The width of a gated part with as many weights as one of width `inner` without gate, times a factor."""
    factor, multiple = positive(config, "block_ffn_dim_multiplier"), size_of(config, "block_multiple_of")
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _experts(config: dict[str, Any], family: ExpertFamily) -> Experts:
    # transformers writes num_local_experts, the models on the Hub have the field of their architecture
    num_experts = size_of(config, "num_experts" if "num_experts" in config else "num_local_experts")
    top_k = size_of(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"num_experts_per_tok: {top_k} is above the number of experts, {num_experts}")
    num_groups, top_groups = _groups(config, num_experts, top_k)
    is_sigmoid = family.scores == "sigmoid"
    shared_inner = _shared_inner(config) if family.shared != "none" else 0
    is_normalized = family.is_normalized
    routing = Routing(
        num_experts,
        top_k,
        bool(config.get("norm_topk_prob", False)) if is_normalized is None else is_normalized,
        is_sigmoid=is_sigmoid,
        scale=positive({"routed_scaling_factor": 1.0, **config}, "routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=family.group_best,
        shared=family.shared if shared_inner else "none",
        scales_inputs=family.scales_inputs,
        is_float32=family.has_float32_router,
    )
    return Experts(routing, family.has_correction and bool(config.get("use_expert_bias", True)), shared_inner)


def _groups(config: dict[str, Any], num_experts: int, top_k: int) -> tuple[int, int]:
    """The number of groups of experts, and how many of them a token chooses from."""
    if not choice_of(config.get("topk_method") or "noaux_tc", GROUP_METHODS, "topk_method"):
        return 1, 1
    num_groups, top_groups = size_of(config, "n_group", 1), size_of(config, "topk_group", 1)
    if num_experts % num_groups:
        raise CheckpointError(f"n_group: {num_groups} does not divide the {num_experts} experts")
    if top_groups > num_groups or top_groups * (num_experts // num_groups) < top_k:
        raise CheckpointError(
            f"topk_group: {top_groups} of {num_groups} groups must hold the {top_k} experts of a token"
        )
    return num_groups, top_groups


def _shared_inner(config: dict[str, Any]) -> int:
    """The width of the shared expert; 0: there is none."""
    if config.get("shared_expert_intermediate_size"):
        return size_of(config, "shared_expert_intermediate_size")
    count = config.get("n_shared_experts") or 0
    return size_of(config, "n_shared_experts") * size_of(config, "moe_intermediate_size") if count else 0
