"""An encoder as data, from config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from step_protocol.types import PoolingKind
from worker_svc.engine.backend import AttentionShape, HeadShape
from worker_svc.engine.checkpoint.model_folder import CheckpointError, choice_of, size_of
from worker_svc.engine.decoder.heads import HeadPart, HeadSpec
from worker_svc.engine.decoder.layer_kinds import SLIDING
from worker_svc.engine.decoder.parse import ACTIVATIONS
from worker_svc.engine.decoder.rotary import Rotary, parse_rotary
from worker_svc.engine.encoder.families import EncoderFamily, EncoderNames, check_encoder

DEFAULT_THETA = {"full_attention": 160_000.0, SLIDING: 10_000.0}  # of ModernBERT
THETA_FIELDS = {"full_attention": "global_rope_theta", SLIDING: "local_rope_theta"}


@dataclass(frozen=True, slots=True)
class EncoderLayerSpec:
    """What differs between the layers of an encoder."""

    rotary: int | None  # index into `EncoderConfig.rotaries`; None: positions are learned
    window: int | None  # a token attends to tokens at most window // 2 positions away; None: to all


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder, checked."""

    family: EncoderFamily
    names: EncoderNames
    hidden_size: int
    inner: int
    vocab_size: int
    num_types: int  # token types; 0: the model has none
    num_positions: int  # learned positions
    position_offset: int  # the first position of a text
    max_length: int  # of a text in tokens
    heads: HeadShape
    layers: tuple[EncoderLayerSpec, ...]
    rotaries: tuple[Rotary, ...]
    norm_eps: float
    has_attention_bias: bool
    has_mlp_bias: bool
    has_norm_bias: bool
    activation: str
    head: HeadSpec | None

    def attention(self, index: int) -> AttentionShape:
        """The attention of a layer."""
        window = self.layers[index].window
        return AttentionShape(self.heads, self.heads.head_dim**-0.5, window=window, is_causal=False)

    def named_in(self, has_tensor: Callable[[str], bool]) -> EncoderConfig:
        """The same encoder with the names of its tensors in a checkpoint, which may lack the prefix."""
        prefix = self.names.prefix if has_tensor(f"{self.names.prefix}{self.names.embedding}.weight") else ""
        with_prefix = {
            name: prefix + getattr(self.names, name)
            for name in ("embedding", "position_embedding", "type_embedding", "embedding_norm", "layer", "final_norm")
            if getattr(self.names, name)
        }
        return replace(self, names=replace(self.names, **with_prefix))


def parse_encoder(config: dict[str, Any], family: EncoderFamily, num_classes: int) -> EncoderConfig:
    """Reads config.json. Raises CheckpointError naming the field for anything that is not supported."""
    check_encoder(config)
    renamed = {ours: config[theirs] for ours, theirs in family.fields.items() if theirs in config}
    config = {**family.defaults, **config, **renamed}
    hidden, num_heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    if hidden % num_heads:
        raise CheckpointError(f"num_attention_heads: {num_heads} heads do not divide hidden_size {hidden}")
    heads = HeadShape(num_heads, num_heads, hidden // num_heads)
    offset = _first_position(config) if family.has_positions_after_padding else 0
    num_positions = size_of(config, "max_position_embeddings")
    layers, rotaries = _layers(config, family, heads.head_dim)
    biases = [bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias", "norm_bias")]
    if family.is_biased is not None:
        biases = [family.is_biased] * 3
    norm_eps = float(config["layer_norm_eps"])
    return EncoderConfig(
        family=family,
        names=family.names,
        hidden_size=hidden,
        inner=size_of(config, "intermediate_size"),
        vocab_size=size_of(config, "vocab_size"),
        num_types=size_of(config, "type_vocab_size") if family.names.type_embedding else 0,
        num_positions=num_positions,
        position_offset=offset,
        max_length=num_positions - offset,
        heads=heads,
        layers=layers,
        rotaries=rotaries,
        norm_eps=norm_eps,
        has_attention_bias=biases[0],
        has_mlp_bias=biases[1],
        has_norm_bias=biases[2],
        activation=choice_of(config.get("hidden_act", "gelu"), ACTIVATIONS, "hidden_act"),
        head=_head(config, family, hidden, num_classes, norm_eps) if num_classes else None,
    )


def _head(config: dict[str, Any], family: EncoderFamily, hidden: int, num_classes: int, norm_eps: float) -> HeadSpec:
    names = family.head
    is_named = names.activation not in ("tanh",)
    activation = names.activation
    if is_named:
        activation = choice_of(config.get(activation, "gelu"), ACTIVATIONS, activation)
    dense = HeadPart(
        (family.names.prefix if names.is_in_prefix else "") + names.dense,
        hidden,
        hidden,
        has_bias=bool(config.get("classifier_bias", False)) if is_named else True,
        activation=activation,
        norm=names.norm,
        has_norm_bias=bool(config.get("norm_bias", False)),
    )
    kind = PoolingKind.MEAN if config.get("classifier_pooling") == "mean" else PoolingKind.CLS
    return HeadSpec(kind, (dense, HeadPart(names.classifier, hidden, num_classes, has_bias=True)), norm_eps)


def _first_position(config: dict[str, Any]) -> int:
    padding = config["pad_token_id"]
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise CheckpointError(f"pad_token_id: positions begin after it, so it must be a token id, found {padding!r}")
    return padding + 1


def _layers(
    config: dict[str, Any], family: EncoderFamily, head_dim: int
) -> tuple[tuple[EncoderLayerSpec, ...], tuple[Rotary, ...]]:
    count = size_of(config, "num_hidden_layers")
    if family.names.position_embedding:
        return (EncoderLayerSpec(None, None),) * count, ()
    every = int(config.get("global_attn_every_n_layers") or 3)
    kinds = config.get("layer_types") or ["full_attention" if i % every == 0 else SLIDING for i in range(count)]
    if len(kinds) != count or not set(kinds) <= set(DEFAULT_THETA):
        raise CheckpointError(f"layer_types: must have {count} entries, each one of {', '.join(DEFAULT_THETA)}")
    given = config.get("rope_parameters") or {}
    rotaries = []
    for kind, theta in DEFAULT_THETA.items():
        rope = {"rope_theta": config.get(THETA_FIELDS[kind]) or theta} | (given.get(kind) or {})
        rotaries.append(parse_rotary(config, rope, head_dim))
    order, window = list(DEFAULT_THETA), size_of(config, "local_attention", 128)
    layers = tuple(EncoderLayerSpec(order.index(kind), window if kind == SLIDING else None) for kind in kinds)
    return layers, tuple(rotaries)
