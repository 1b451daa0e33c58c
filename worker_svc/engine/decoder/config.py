"""A decoder as data, from config.json. Each backend interprets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from step_protocol.types import PoolingKind
from worker_svc.engine.backend import NO_KV, AttentionShape, HeadShape, KVLayout, LatentShape, Routing
from worker_svc.engine.checkpoint.architecture import (
    Architecture,
    HeadKind,
    Names,
    NormKind,
    QkNormScope,
    without_prefix,
)
from worker_svc.engine.checkpoint.features import features_of
from worker_svc.engine.checkpoint.quantization_config import QuantizationConfig
from worker_svc.engine.decoder.heads import HeadPart, HeadSpec
from worker_svc.engine.decoder.per_layer import PerLayerTable, PerLayerWeights
from worker_svc.engine.decoder.plain_part import PlainPart
from worker_svc.engine.decoder.rotary import Rotary
from worker_svc.engine.decoder.streams import Laurel, StreamSpec, StreamTable, StreamWeights
from worker_svc.engine.recurrent import Recurrence
from worker_svc.engine.vision.config import VisionConfig


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The latent attention of a decoder, from config.json."""

    shape: LatentShape
    query_rank: int | None  # queries are computed from this many numbers, which are normed. None: from the hidden state

    @property
    def first_outputs(self) -> int:
        """Numbers for the queries that the first linear layer computes, beside the latent and its rotated part."""
        return self.shape.num_heads * self.shape.query_dim if self.query_rank is None else self.query_rank


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
    def given_embedding_scale(self) -> float:
        """Of embeddings that requests carry."""
        return self.embedding_scale if self.architecture.scales_given_embeddings else 1.0

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
