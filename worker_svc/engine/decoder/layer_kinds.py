"""Which kind each layer of a decoder is: the rules that rows of families.py name, and fields of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from worker_svc.engine.checkpoint.architecture import (
    Architecture,
    RecurrenceName,
    RotationRule,
)
from worker_svc.engine.checkpoint.model_folder import CheckpointError, choice_of, size_of
from worker_svc.engine.decoder.config import LayerSpec

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT = "linear_attention"
DENSE, EXPERTS = "mlp", "moe"  # layers that have a feed-forward part only
BLOCK_LETTERS = {"M": RECURRENT, "*": FULL, "-": DENSE, "E": EXPERTS}  # of `hybrid_override_pattern`
KIND_NAMES = {FULL: FULL, "attention": FULL, SLIDING: SLIDING, CHUNKED: CHUNKED}  # in `layer_types`
MLP_KINDS = {"dense": False, "sparse": True}
RECURRENT_NAMES: Mapping[RecurrenceName, tuple[str, ...]] = {  # of layers that keep a state, in `layer_types`
    "gated_delta": (RECURRENT,),
    "mamba2": (RECURRENT, "mamba"),
    "short_conv": (RECURRENT, "conv"),
}


def check_length(field: str, listed: Sized, count: int) -> None:
    """Raises CheckpointError unless a list of config.json has an entry for each layer."""
    if len(listed) != count:
        raise CheckpointError(f"{field}: {len(listed)} entries for {count} layers; config.json must hold one each")


def blocks(config: dict[str, Any]) -> dict[str, Any]:
    """The types of layers that have one part each, and their number, which config.json may lack."""
    kinds, letters = config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None and letters is not None:
        kinds = [choice_of(letter, BLOCK_LETTERS, "hybrid_override_pattern") for letter in letters]
    if not kinds:
        raise CheckpointError("layers_block_type: config.json must list the types of the layers")
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def listed_rotations(config: dict[str, Any]) -> Callable[[int], bool]:
    listed, count = config.get("no_rope_layers"), size_of(config, "num_hidden_layers")
    if listed and len(listed) < count:
        check_length("no_rope_layers", listed, count)
    interval = size_of(config, "no_rope_layer_interval", 4)
    return lambda index: bool(listed[index]) if listed else (index + 1) % interval != 0


def _by_embedding_type(config: dict[str, Any], layers: tuple[LayerSpec, ...]) -> Callable[[int], bool]:
    kind = config.get("position_embedding_type") or "nope"
    is_rotated = choice_of(kind, {"rope": True, "nope": False}, "position_embedding_type")
    return lambda index: is_rotated


ROTATION_RULES: dict[RotationRule, Callable[[dict[str, Any], tuple[LayerSpec, ...]], Callable[[int], bool]]] = {
    "all": lambda config, layers: lambda index: True,
    "none": lambda config, layers: lambda index: False,
    "listed": lambda config, layers: listed_rotations(config),
    "windows": lambda config, layers: lambda index: layers[index].window is not None,
    "windows_if_any": lambda config, layers: (
        lambda index: config.get("sliding_window") is None or layers[index].window is not None
    ),
    "embedding_type": _by_embedding_type,
}


def layer_kinds(config: dict[str, Any], architecture: Architecture, count: int) -> tuple[int | None, list[str]]:
    """The sliding window, and the type of each layer."""
    rule = architecture.windows
    window = config.get("sliding_window")
    if rule == "none" or (rule.startswith("opt_in") and not config.get("use_sliding_window", False)):
        window = None
    if window is not None:
        window = size_of({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        check_length("layer_types", kinds, count)
        named = [_kind_of(kind, architecture) for kind in kinds]
        named[-1:] = [FULL] if rule == "pattern_then_full" else named[-1:]
        return window, [FULL if kind == SLIDING and window is None else kind for kind in named]
    if architecture.layers == "beside":
        return window, [FULL] * count
    if architecture.recurrence is not None:
        attends = config.get("full_attn_idxs")
        if attends is None and "full_attention_interval" not in config:
            field = "full_attn_idxs" if "full_attn_idxs" in architecture.fields else "layer_types"
            raise CheckpointError(f"{field}: config.json must list the layers with attention")
        if attends is None:
            every = size_of(config, "full_attention_interval")
            attends = range(every - 1, count, every)
        return window, [FULL if index in attends else RECURRENT for index in range(count)]
    if rule == "chunked":
        is_chunked = listed_rotations(config)
        return window, [CHUNKED if is_chunked(index) else FULL for index in range(count)]
    has_window = WINDOW_RULES[rule](config, count)
    return window, [SLIDING if window is not None and has_window(index) else FULL for index in range(count)]


def _kind_of(name: object, architecture: Architecture) -> str:
    """The type of a layer. Raises CheckpointError for one that the architecture does not have."""
    own = dict.fromkeys(RECURRENT_NAMES[architecture.recurrence] if architecture.recurrence else (), RECURRENT)
    own |= {DENSE: DENSE, EXPERTS: EXPERTS} if architecture.layers == "single" else {}
    kind = choice_of(name, KIND_NAMES | own, "layer_types")
    if kind == CHUNKED and architecture.windows != "chunked":
        raise CheckpointError(f"layer_types: {CHUNKED!r} is not supported for {architecture.models}")
    return kind


WINDOW_RULES: dict[str, Callable[[dict[str, Any], int], Callable[[int], bool]]] = {
    "none": lambda config, count: lambda index: False,
    "all": lambda config, count: lambda index: True,
    "opt_in": lambda config, count: lambda index: index >= config.get("max_window_layers", 28),
    "opt_in_all": lambda config, count: lambda index: True,
    "opt_in_even": lambda config, count: lambda index: index % 2 == 0 and index < config.get("max_window_layers", 28),
    "opt_in_unrotated": lambda config, count: lambda index: not listed_rotations(config)(index),
    "last": lambda config, count: lambda index: index >= config["max_window_layers"],
    "even": lambda config, count: lambda index: index % 2 == 0,
    "after_full": lambda config, count: lambda index: bool(index % 4),
    "pattern": lambda config, count: lambda index: bool((index + 1) % size_of(config, "sliding_window_pattern")),
    "pattern_then_full": lambda config, count: (
        lambda index: index < count - 1 and WINDOW_RULES["pattern"](config, count)(index)
    ),
}


def expert_layers(config: dict[str, Any], architecture: Architecture) -> Callable[[int], bool]:
    """Which layers have experts. Some configurations list the layers, others have rules, which apply together."""
    if architecture.experts is None or not config.get("enable_moe_block", True):
        return lambda index: False
    if not config.get("num_experts", config.get("num_local_experts", 1)) and not architecture.experts.is_beside:
        return lambda index: False
    if architecture.layers == "single":
        return lambda index: bool(config["layer_types"][index] == EXPERTS)
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        check_length("mlp_layer_types", kinds, size_of(config, "num_hidden_layers"))
        return lambda index: bool(choice_of(kinds[index], MLP_KINDS, "mlp_layer_types"))
    if config.get("moe_layers") is not None:
        return lambda index: index in config["moe_layers"]
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step") or 1
    first, last = config.get("first_k_dense_replace") or 0, config.get("moe_layer_end_index")
    return lambda index: (
        index not in dense and (index + 1) % step == 0 and index >= first and (last in (None, -1) or index <= last)
    )
