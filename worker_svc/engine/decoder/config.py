"""A decoder as data, from config.json. Each backend interprets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch

from step_protocol.messages import PoolingKind
from worker_svc.engine.backend import NO_KV, AttentionShape, HeadShape, KVLayout, Routing
from worker_svc.engine.checkpoint.families import (
    Architecture,
    ExpertFamily,
    HeadKind,
    Names,
    NormKind,
    QkNormScope,
    RecurrenceName,
    RotationRule,
    architecture_of,
    head_of,
    without_prefix,
)
from worker_svc.engine.checkpoint.features import features_of
from worker_svc.engine.checkpoint.model_folder import CheckpointError, choice_of, size_of
from worker_svc.engine.checkpoint.quantization_config import QuantizationConfig, quantization_of
from worker_svc.engine.decoder.heads import HeadPart, HeadSpec
from worker_svc.engine.decoder.latents import LatentSpec, latent_scale, parse_latents
from worker_svc.engine.decoder.per_layer import PerLayerTable, PerLayerWeights, kv_owners, layer_heads
from worker_svc.engine.decoder.plain_part import PlainPart
from worker_svc.engine.decoder.rotary import ORIGINAL_LENGTH, QueryScaling, Rotary, mrope_axes, parse_rotary, positive
from worker_svc.engine.decoder.streams import Laurel, StreamSpec, StreamTable, StreamWeights
from worker_svc.engine.recurrent import Recurrence, gated_delta, mamba2, short_conv
from worker_svc.engine.vision.config import VisionConfig, parse_vision

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT = "linear_attention"
DENSE, EXPERTS = "mlp", "moe"  # layers that have a feed-forward part only
BLOCK_LETTERS = {"M": RECURRENT, "*": FULL, "-": DENSE, "E": EXPERTS}  # of `hybrid_override_pattern`
KIND_NAMES = {FULL: FULL, "attention": FULL, SLIDING: SLIDING, CHUNKED: CHUNKED}  # in `layer_types`
GROUP_METHODS = {"greedy": False, "group_limited_greedy": True, "noaux_tc": True}  # whether experts are in groups
SCORES = {"softmax": False, "sigmoid": True}
MLP_KINDS = {"dense": False, "sparse": True}
RECURRENT_NAMES: Mapping[RecurrenceName, tuple[str, ...]] = {  # of layers that keep a state, in `layer_types`
    "gated_delta": (RECURRENT,),
    "mamba2": (RECURRENT, "mamba"),
    "short_conv": (RECURRENT, "conv"),
}
RECURRENCES: Mapping[RecurrenceName, Callable[[Mapping[str, Any]], Recurrence]] = {
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "short_conv": short_conv,
}
CHOICES: dict[str, Mapping[str, object]] = {
    "hidden_act": ACTIVATIONS,
    "mlp_layer_types": MLP_KINDS,
    "position_embedding_type": dict.fromkeys(("rope", "nope")),
    "scoring_func": SCORES,
    "topk_method": dict.fromkeys(("greedy", "group_limited_greedy", "noaux_tc")),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward part of several experts, of which each token uses some."""

    routing: Routing
    has_correction: bool
    shared_inner: int  # width of the shared expert; 0: there is none


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between the layers of a decoder."""

    heads: HeadShape
    rotary: int | None  # index into `ModelConfig.rotaries`; None: queries and keys are not rotated
    window: int | None  # a token attends to this many tokens, itself included; None: to all before it
    inner: int  # width of the feed-forward part, or of one expert; 0: the layer has no such part
    experts: Experts | None
    attends: bool = True
    kv_owner: int | None = None  # as in KVLayout
    has_output_gate: bool = False  # attention outputs are multiplied by the sigmoid of a gate, which follows v in qkv
    recurrence: Recurrence | None = None  # None: the layer keeps no state
    chunk: int | None = None  # a token attends to those from the last multiple of this position on
    has_value_norm: bool = False  # a norm of the values of each head, without weights
    has_one_key_value: bool = False  # one projection makes keys and values, before their norms
    latents: LatentSpec | None = None  # `heads` are those of its attention then: keys of latents and rotated parts
    dense_inner: int = 0  # width of a dense feed-forward part beside the experts; 0: there is none
    gate_cutoff: float | None = None  # see `sparse_gates` of streams.py; None: all gates count

    @property
    def has_mixer(self) -> bool:
        """Whether the layer attends or keeps a state."""
        return self.attends or self.recurrence is not None

    @property
    def mixed_width(self) -> int:
        """Width of the outputs of attention or recurrence; with both, of the recurrence."""
        if self.recurrence is not None:
            return self.recurrence.num_values
        if not self.attends:
            return 0
        return self.heads.num_q_heads * (self.heads.head_dim if self.latents is None else self.latents.shape.rank)

    def kv_layout(self) -> KVLayout:
        """What the layer keeps of a token; nothing if it does not attend."""
        if self.latents is not None:
            return KVLayout(1, self.latents.shape.width, 0)
        return KVLayout.of(self.heads, self.kv_owner) if self.attends else NO_KV

    def num_mixer_parameters(self, hidden: int) -> int:
        """Weights of the linear layers around attention or recurrence."""
        count = 0 if self.recurrence is None else hidden * (self.recurrence.width + self.recurrence.num_values)
        if not self.attends:
            return count
        num_q_parts = 3 if self.has_output_gate else 2
        return count + hidden * self.heads.head_dim * (
            num_q_parts * self.heads.num_q_heads + 2 * self.heads.num_kv_heads
        )

    @property
    def has_scaled_experts(self) -> bool:
        """Whether shares are more than the softmax of router logits."""
        routing = None if self.experts is None else self.experts.routing
        return routing is not None and (routing.num_groups > 1 or routing.scale != 1.0)

    def expert_widths(self) -> list[int]:
        """The widths of all experts, the shared one last. Empty: the feed-forward part is dense."""
        if self.experts is None:
            return []
        shared = [self.experts.shared_inner] if self.experts.shared_inner else []
        return [self.inner] * self.experts.routing.num_experts + shared

    def used_inner(self) -> int:
        """The width that one token uses."""
        if self.experts is None:
            return self.inner
        return self.inner * self.experts.routing.top_k + self.experts.shared_inner + self.dense_inner


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, checked."""

    architecture: Architecture
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[Rotary, ...]
    norm_eps: float
    qk_norm: QkNormScope | None
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    activation: str
    attention_scale: float
    attention_soft_cap: float | None  # scores become cap * tanh(score / cap)
    logit_soft_cap: float | None
    embedding_scale: float
    residual_scale: float  # of the outputs of attention and feed-forward part
    logit_scale: float
    is_tied: bool
    vision: VisionConfig | None  # None: the model takes no images
    image_token_id: int | None  # stands for an image in a prompt
    quantization: QuantizationConfig | None  # of the linear layers; None: they are stored in a float type
    num_predicting_layers: int = 0  # layers of the checkpoint that are not used
    layer_input_vocab: int = 0  # of that embedding
    layer_input_width: int = 0  # of the embedding per token and layer; 0: none
    streams: StreamSpec | None = None  # None: one residual stream
    factors: Mapping[str, tuple[float, ...]] | None = None  # of linear layers by name, see `Stored`
    head: HeadKind = "tokens"

    @property
    def names(self) -> Names:
        return self.architecture.names

    @property
    def norm(self) -> NormKind:
        return self.architecture.norm

    @property
    def heads(self) -> HeadShape:
        """The heads of all layers, for backends that refuse other models (`kv_layouts` of features.py)."""
        return self.layers[0].heads

    def kv_layouts(self) -> list[KVLayout]:
        """What each layer keeps of a token."""
        return [layer.kv_layout() for layer in self.layers]

    def qk_norm_widths(self, index: int) -> tuple[int, int] | None:
        """How many numbers one norm of a layer's queries and one of its keys span. None: there are no such norms."""
        heads = self.layers[index].heads
        if self.qk_norm == "rotated_head":
            return (heads.head_dim, heads.head_dim) if self.is_rotated(index) else None
        if self.qk_norm == "projection":
            return heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        return None if self.qk_norm is None else (heads.head_dim, heads.head_dim)

    def is_rotated(self, index: int) -> bool:
        """Whether queries and keys of a layer are rotated."""
        rotary = self.layers[index].rotary
        return rotary is not None and len(self.rotaries[rotary].inv_freq) > 0

    def unread_tensors(self) -> list[str]:
        """Beginnings of the names of tensors that are not computed: image towers, and layers that predict further
        tokens, which follow the last layer."""
        more = range(self.num_layers, self.num_layers + self.num_predicting_layers)
        shared = [self.names.layer.format(i) for i, layer in enumerate(self.layers) if layer.kv_owner is not None]
        unread = [f"{prefix}self_attn.{part}" for prefix in shared for part in ("k_", "v_")]
        return [*self.architecture.unread, *map(self.names.layer.format, more), *unread]

    def predicting_layer(self) -> ModelConfig | None:
        """The layer that predicts a further token, as a decoder of one layer: like the last one that attends. None: the
        architecture has none that is computed."""
        mtp, before = self.architecture.mtp, self.num_layers
        if mtp is None:
            return None
        spec = next(layer for layer in reversed(self.layers) if layer.attends)
        names = replace(self.names, layer=mtp.layer.format(before), final_norm=mtp.final_norm.format(before))
        return replace(self, layers=(spec,), architecture=replace(self.architecture, names=names))

    @property
    def recurrences(self) -> list[Recurrence | None]:
        """The recurrence of each layer; None: it has none."""
        return [layer.recurrence for layer in self.layers]

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer keeps a state."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def is_gated(self) -> bool:
        return self.architecture.is_gated

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """The smallest sliding window. None: no layer has one."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def attention_window(self) -> int | None:
        """The widest sliding window if all layers have one: no token attends further back. None otherwise."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None

    @property
    def widest_inner(self) -> int:
        """Width of the widest feed-forward part."""
        return max(max(layer.inner, layer.dense_inner) for layer in self.layers)

    def num_linear_parameters(self) -> int:
        """Weights that a token is multiplied with, without the head."""
        hidden, parts = self.hidden_size, 3 if self.is_gated else 2
        inner = sum(layer.used_inner() for layer in self.layers)
        return sum(layer.num_mixer_parameters(hidden) for layer in self.layers) + parts * hidden * inner

    def within(self, max_model_len: int) -> ModelConfig:
        """The same decoder without windows that no sequence of at most `max_model_len` tokens leaves."""
        layers = tuple(
            replace(layer, window=None) if layer.window is not None and layer.window >= max_model_len else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def named_in(self, has_tensor: Callable[[str], bool]) -> ModelConfig:
        """The same decoder with the names of its tensors in a checkpoint."""
        names = self.names
        prefix = names.embedding.partition(".")[0] + "."
        if has_tensor(f"{names.embedding}.weight") or not has_tensor(f"{names.embedding.removeprefix(prefix)}.weight"):
            return self
        return replace(self, architecture=replace(self.architecture, names=without_prefix(names, prefix)))

    def per_layer_table(self) -> PlainPart[PerLayerTable] | None:
        """What makes the inputs of all layers."""
        if not self.layer_input_width:
            return None
        return PerLayerTable.part(self.layer_input_vocab, self.num_layers, self.layer_input_width, self.hidden_size)

    def per_layer_weights(self, index: int) -> PlainPart[PerLayerWeights] | None:
        """What a layer makes of its input."""
        if not self.layer_input_width:
            return None
        return PerLayerWeights.part(self.names.layer.format(index), self.layer_input_width, self.hidden_size)

    def stream_table(self) -> PlainPart[StreamTable] | None:
        return None if self.streams is None else StreamTable.part(self.streams, self.hidden_size)

    def stream_weights(self, index: int) -> PlainPart[StreamWeights] | None:
        prefix = self.names.layer.format(index)
        return None if self.streams is None else StreamWeights.part(self.streams, prefix, self.hidden_size)

    def laurel(self, index: int) -> PlainPart[Laurel] | None:
        prefix = self.names.layer.format(index)
        return None if self.streams is None else Laurel.part(self.streams, prefix, self.hidden_size)

    def plain_tables(self) -> list[PlainPart[Any]]:
        """The parts of the model that are not in a layer and are read by fixed names."""
        return [part for part in (self.per_layer_table(), self.stream_table()) if part is not None]

    def plain_parts(self, index: int) -> list[PlainPart[Any]]:
        """The parts of a layer that are read by fixed names."""
        parts = self.per_layer_weights(index), self.stream_weights(index), self.laurel(index)
        return [part for part in parts if part is not None]

    def classes(self, num_classes: int) -> HeadSpec | None:
        """The classification head; None if the model has none."""
        if self.head != "classes":
            return None
        part = HeadPart("score", self.hidden_size, num_classes, has_bias=False)
        return HeadSpec(PoolingKind.LAST, (part,))

    def attention(self, index: int) -> AttentionShape:
        """The attention of a layer."""
        layer = self.layers[index]
        scale, cap = self.attention_scale, self.attention_soft_cap
        return AttentionShape(layer.heads, scale, cap, layer.window, chunk=layer.chunk)

    def features(self) -> set[str]:
        """What a backend must compute; see checkpoint/features.py."""
        dims = {layer.heads.head_dim for layer in self.layers if layer.latents is None}
        rotary_dims = {2 * len(rotary.inv_freq) for rotary in self.rotaries if len(rotary.inv_freq)}
        needed = {
            "odd_heads": any(dim % 2 for dim in dims),
            "partial_rotary": bool(dims) and bool(rotary_dims - dims),
            "recurrent": self.is_recurrent,
            "experts": any(layer.experts is not None for layer in self.layers),
            "experts_beside": any(layer.dense_inner for layer in self.layers),
            "shared_experts": any(layer.experts is not None and layer.experts.shared_inner for layer in self.layers),
            "kv_layouts": len({*self.kv_layouts()} - {NO_KV}) > 1,
            "query_scales": any(rotary.q_scaling is not None for rotary in self.rotaries),
            "interleaved_rotary": any(rotary.is_interleaved for rotary in self.rotaries),
            "expert_scores": any(layer.has_scaled_experts for layer in self.layers),
            "relu2": self.activation == "relu2",
            "sliding_window": self.window is not None,
            "chunks": any(layer.chunk is not None for layer in self.layers),
            "soft_caps": self.attention_soft_cap is not None or self.logit_soft_cap is not None,
            "quantized_weights": self.quantization is not None,
            "no_logits": self.head != "tokens",
            "attention_scale": bool(dims) and self.attention_scale != self.heads.head_dim**-0.5,
        }
        return features_of(self.architecture) | {name for name, is_needed in needed.items() if is_needed}


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """Reads config.json. Raises CheckpointError naming the field for anything that is not supported."""
    architecture = architecture_of(config)
    _check_choices(config)
    config = _completed(config, architecture)
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
        norm_eps=float(config.get("norm_eps", config.get("rms_norm_eps", 1e-6))),
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
    """Raises CheckpointError for a value that would change what is computed and is not known, whether the architecture
    reads it or not."""
    for field, known in CHOICES.items():
        given = config.get(field)
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                choice_of(value, known, field)


def _completed(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json with our names of fields, the architecture's defaults, and without fields that it ignores."""
    for field, value in architecture.fixed.items():
        found = config.get(field, architecture.defaults.get(field, value))
        if (bool(found) if isinstance(value, bool) else found) != value:
            raise CheckpointError(f"{field}: {found!r} is not supported; only {value} is computed")
    defaults = architecture.defaults
    renamed = {ours: config[theirs] for ours, theirs in architecture.fields.items() if theirs in config}
    # A field of our name stands for something else then, e.g. the width of experts
    renamed |= {ours: defaults[ours] for ours in architecture.fields if ours in defaults and ours not in renamed}
    completed = {**architecture.defaults, **config, **renamed}
    if architecture.layers == "single":
        completed |= _blocks(completed)
    return {field: value for field, value in completed.items() if field not in architecture.ignored}


def _blocks(config: dict[str, Any]) -> dict[str, Any]:
    """The types of layers that have one part each, and their number, which config.json may lack."""
    kinds, letters = config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None and letters is not None:
        kinds = [choice_of(letter, BLOCK_LETTERS, "hybrid_override_pattern") for letter in letters]
    if not kinds:
        raise CheckpointError("layers_block_type: config.json must list the types of the layers")
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


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
    if all(isinstance(value, dict) for value in rope.values()) and rope:  # one for each type of layer
        kinds, sizes = list(rope), _head_dims(config, architecture, head_dim)
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


def _head_dims(config: dict[str, Any], architecture: Architecture, head_dim: int) -> dict[str, int]:
    """The size of heads by type of layer, where it differs."""
    if not architecture.has_layer_shapes:
        return {}
    _, kinds = _windows(config, architecture, size_of(config, "num_hidden_layers"))
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
        if len(given) != count:
            raise CheckpointError(
                f"intermediate_size: {len(given)} entries for {count} layers; config.json must hold one each"
            )
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
    window, kinds = _windows(config, architecture, count)
    has_experts = _has_experts(config, architecture)
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


def _listed(config: dict[str, Any]) -> Callable[[int], bool]:
    listed, count = config.get("no_rope_layers"), size_of(config, "num_hidden_layers")
    if listed and len(listed) < count:
        raise CheckpointError(
            f"no_rope_layers: {len(listed)} entries for {count} layers; config.json must hold one each"
        )
    interval = size_of(config, "no_rope_layer_interval", 4)
    return lambda index: bool(listed[index]) if listed else (index + 1) % interval != 0


def _by_embedding_type(config: dict[str, Any], layers: tuple[LayerSpec, ...]) -> Callable[[int], bool]:
    kind = config.get("position_embedding_type") or "nope"
    is_rotated = choice_of(kind, {"rope": True, "nope": False}, "position_embedding_type")
    return lambda index: is_rotated


ROTATION_RULES: dict[RotationRule, Callable[[dict[str, Any], tuple[LayerSpec, ...]], Callable[[int], bool]]] = {
    "all": lambda config, layers: lambda index: True,
    "none": lambda config, layers: lambda index: False,
    "listed": lambda config, layers: _listed(config),
    "windows": lambda config, layers: lambda index: layers[index].window is not None,
    "windows_if_any": lambda config, layers: (
        lambda index: config.get("sliding_window") is None or layers[index].window is not None
    ),
    "embedding_type": _by_embedding_type,
}


def _windows(config: dict[str, Any], architecture: Architecture, count: int) -> tuple[int | None, list[str]]:
    """The sliding window, and the type of each layer."""
    rule = architecture.windows
    window = config.get("sliding_window")
    if rule == "none" or (rule.startswith("opt_in") and not config.get("use_sliding_window", False)):
        window = None
    if window is not None:
        window = size_of({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None and len(kinds) != count:
        raise CheckpointError(f"layer_types: {len(kinds)} entries for {count} layers; config.json must hold one each")
    if kinds is not None:
        named = [_kind_of(kind, architecture) for kind in kinds]
        return window, [FULL if kind == SLIDING and window is None else kind for kind in named]
    if architecture.layers == "beside":
        return window, [FULL] * count
    if architecture.recurrence is not None:
        attends = config.get("full_attn_idxs")
        if attends is None and "full_attention_interval" not in config:
            raise CheckpointError("full_attn_idxs: config.json must list the layers with attention, or layer_types")
        if attends is None:
            every = size_of(config, "full_attention_interval")
            attends = range(every - 1, count, every)
        return window, [FULL if index in attends else RECURRENT for index in range(count)]
    if rule == "chunked":
        is_chunked = _listed(config)
        return window, [CHUNKED if is_chunked(index) else FULL for index in range(count)]
    has_window = WINDOW_RULES[rule](config)
    return window, [SLIDING if window is not None and has_window(index) else FULL for index in range(count)]


def _kind_of(name: object, architecture: Architecture) -> str:
    """The type of a layer. Raises CheckpointError for one that the architecture does not have."""
    own = dict.fromkeys(RECURRENT_NAMES[architecture.recurrence] if architecture.recurrence else (), RECURRENT)
    own |= {DENSE: DENSE, EXPERTS: EXPERTS} if architecture.layers == "single" else {}
    kind = choice_of(name, KIND_NAMES | own, "layer_types")
    if kind == CHUNKED and architecture.windows != "chunked":
        raise CheckpointError(f"layer_types: {CHUNKED!r} is not supported for {architecture.models}")
    return kind


WINDOW_RULES: dict[str, Callable[[dict[str, Any]], Callable[[int], bool]]] = {
    "none": lambda config: lambda index: False,
    "all": lambda config: lambda index: True,
    "opt_in": lambda config: lambda index: index >= config.get("max_window_layers", 28),
    "opt_in_all": lambda config: lambda index: True,
    "opt_in_even": lambda config: lambda index: index % 2 == 0 and index < config.get("max_window_layers", 28),
    "opt_in_unrotated": lambda config: lambda index: not _listed(config)(index),
    "last": lambda config: lambda index: index >= config["max_window_layers"],
    "even": lambda config: lambda index: index % 2 == 0,
    "pattern": lambda config: lambda index: bool((index + 1) % size_of(config, "sliding_window_pattern")),
}


def _adjusted_inner(config: dict[str, Any], inner: int) -> int:
    """The width of a gated part with as many weights as one of width `inner` without gate, times a factor."""
    factor, multiple = positive(config, "block_ffn_dim_multiplier"), size_of(config, "block_multiple_of")
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _has_experts(config: dict[str, Any], architecture: Architecture) -> Callable[[int], bool]:
    """Which layers have experts. Some configurations list the layers, others have rules, which apply together."""
    if architecture.experts is None or not config.get("enable_moe_block", True):
        return lambda index: False
    if not config.get("num_experts", config.get("num_local_experts", 1)) and not architecture.experts.is_beside:
        return lambda index: False
    if architecture.layers == "single":
        return lambda index: bool(config["layer_types"][index] == EXPERTS)
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        return lambda index: bool(choice_of(kinds[index], MLP_KINDS, "mlp_layer_types"))
    if config.get("moe_layers") is not None:
        return lambda index: index in config["moe_layers"]
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step") or 1
    first, last = config.get("first_k_dense_replace") or 0, config.get("moe_layer_end_index", -1)
    return lambda index: (
        index not in dense and (index + 1) % step == 0 and index >= first and (last == -1 or index <= last)
    )


def _experts(config: dict[str, Any], family: ExpertFamily) -> Experts:
    # transformers writes num_local_experts, the models on the Hub have the field of their architecture
    num_experts = size_of(config, "num_experts" if "num_experts" in config else "num_local_experts")
    top_k = size_of(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"num_experts_per_tok: {top_k} is above the number of experts, {num_experts}")
    num_groups, top_groups = _groups(config, num_experts, top_k)
    is_sigmoid = family.scores == "sigmoid"
    if choice_of(config.get("scoring_func", family.scores), SCORES, "scoring_func") != is_sigmoid:
        raise CheckpointError(f"scoring_func: only {family.scores!r} is computed, found {config['scoring_func']!r}")
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
    return Experts(routing, family.has_correction, shared_inner)


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
    if config.get("shared_expert_intermediate_size") is not None:
        return size_of(config, "shared_expert_intermediate_size")
    count = config.get("n_shared_experts") or 0
    return size_of(config, "n_shared_experts") * size_of(config, "moe_intermediate_size") if count else 0
