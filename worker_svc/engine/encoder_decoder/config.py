"""Encoder-decoder models as data, from config.json: an encoder of the input, and a decoder with cross-attention to it.

Both stacks repeat the same parts: self-attention, in the decoder cross-attention, and a feed-forward part, each added
to the residual. A row of ENCODER_DECODERS lists the differences of a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from worker_svc.engine.backend import HeadShape, KVLayout
from worker_svc.engine.checkpoint.model_folder import CheckpointError, choice_of, size_of

if TYPE_CHECKING:
    from worker_svc.engine.checkpoint.architecture import NormKind

ACTIVATIONS = {
    "relu": "relu", "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
CROSS_ATTENTION = "cross_attention"
CONV_STRIDE = 2  # log-mel frames per encoder position


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Names of the tensors of an attention part, after the prefix of its layer."""

    q: str
    k: str
    v: str
    o: str
    norm: str


@dataclass(frozen=True, slots=True)
class StackNames:
    """Names of the tensors of an encoder or a decoder. Empty: the stack has no such tensor."""

    layer: str
    attention: AttentionNames
    cross: AttentionNames | None
    gate: str
    up: str
    down: str
    feed_norm: str
    positions: str = ""
    embedding_norm: str = ""
    final_norm: str = ""
    relative_bias: str = ""


@dataclass(frozen=True, slots=True)
class EncoderDecoderFamily:
    """The differences of one family of models."""

    models: str  # of the Hub, for docs/models.md
    encoder: StackNames
    decoder: StackNames
    embedding: str = "model.shared"
    head: str = "lm_head"
    copies: tuple[str, ...] = ()  # other names under which a checkpoint may store the embedding
    ignored: tuple[str, ...] = ()  # endings of tensors that the model does not use
    norm: NormKind = "layer"
    is_pre_norm: bool = True
    has_biases: bool = True
    has_key_bias: bool = True
    position_offset: int = 0  # lines of the position tables before position 0
    is_audio: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)  # other names of fields of config.json


def _bart_attention(part: str) -> AttentionNames:
    q, k, v, o = (f"{part}.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
    return AttentionNames(q, k, v, o, f"{part}_layer_norm")


def _bart_stack(stack: str, **names: str) -> StackNames:
    prefix = f"model.{stack}."
    return StackNames(
        layer=f"{prefix}layers.{{}}.",
        attention=_bart_attention("self_attn"),
        cross=_bart_attention("encoder_attn") if stack == "decoder" else None,
        gate="",
        up="fc1",
        down="fc2",
        feed_norm="final_layer_norm",
        positions=f"{prefix}embed_positions",
        **{name: prefix + tensor for name, tensor in names.items()},
    )


def _t5_attention(part: int, name: str) -> AttentionNames:
    q, k, v, o = (f"layer.{part}.{name}.{role}" for role in "qkvo")
    return AttentionNames(q, k, v, o, f"layer.{part}.layer_norm")


def _t5_stack(stack: str, feed: int) -> StackNames:
    return StackNames(
        layer=f"{stack}.block.{{}}.",
        attention=_t5_attention(0, "SelfAttention"),
        cross=_t5_attention(1, "EncDecAttention") if stack == "decoder" else None,
        gate=f"layer.{feed}.DenseReluDense.wi_0",
        up=f"layer.{feed}.DenseReluDense.wi_1",
        down=f"layer.{feed}.DenseReluDense.wo",
        feed_norm=f"layer.{feed}.layer_norm",
        final_norm=f"{stack}.final_layer_norm",
        relative_bias=f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
    )


BART_FIELDS = {
    "head_count": "decoder_attention_heads", "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers", "encoder_inner": "encoder_ffn_dim", "decoder_inner": "decoder_ffn_dim",
    "encoder_positions": "max_position_embeddings", "decoder_positions": "max_position_embeddings",
    "activation": "activation_function",
}  # fmt: skip
COPIES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens")
BART = EncoderDecoderFamily(
    "BART", _bart_stack("encoder", embedding_norm="layernorm_embedding"),
    _bart_stack("decoder", embedding_norm="layernorm_embedding"), copies=COPIES, is_pre_norm=False, position_offset=2,
    fields=BART_FIELDS,
)  # fmt: skip

ENCODER_DECODERS = {
    "T5ForConditionalGeneration": EncoderDecoderFamily(
        "T5, T5 v1.1, Flan-T5", _t5_stack("encoder", feed=1), _t5_stack("decoder", feed=2), embedding="shared",
        copies=("encoder.embed_tokens", "decoder.embed_tokens"),
        ignored=("EncDecAttention.relative_attention_bias.weight",), norm="rms", has_biases=False, has_key_bias=False,
        fields={
            "head_count": "num_heads", "num_encoder_layers": "num_layers", "encoder_inner": "d_ff",
            "decoder_inner": "d_ff", "encoder_positions": "n_positions", "decoder_positions": "n_positions",
        },
    ),
    "BartForConditionalGeneration": BART,
    "MBartForConditionalGeneration": replace(
        BART, models="mBART",
        encoder=_bart_stack("encoder", embedding_norm="layernorm_embedding", final_norm="layer_norm"),
        decoder=_bart_stack("decoder", embedding_norm="layernorm_embedding", final_norm="layer_norm"), is_pre_norm=True,
    ),
    "WhisperForConditionalGeneration": EncoderDecoderFamily(
        "Whisper", _bart_stack("encoder", final_norm="layer_norm"), _bart_stack("decoder", final_norm="layer_norm"),
        embedding="model.decoder.embed_tokens", head="proj_out", has_key_bias=False, is_audio=True,
        fields=BART_FIELDS | {"encoder_positions": "max_source_positions", "decoder_positions": "max_target_positions"},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StackConfig:
    """An encoder or a decoder."""

    names: StackNames
    num_layers: int
    inner: int
    num_positions: int  # the longest input; with relative positions, as far as the checkpoint was trained


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """Learned biases of attention scores by distance, in buckets (T5)."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """An encoder-decoder model, checked."""

    family: EncoderDecoderFamily
    hidden_size: int
    vocab_size: int
    heads: HeadShape
    encoder: StackConfig
    decoder: StackConfig
    norm_eps: float
    activation: str
    is_gated: bool
    attention_scale: float
    embedding_scale: float
    head_scale: float  # of the decoder's output before the head
    relative: RelativePositions | None
    num_mel_bins: int  # 0: the encoder reads tokens

    @property
    def num_layers(self) -> int:
        """Layers with keys and values in the pool."""
        return self.decoder.num_layers

    @property
    def attention_window(self) -> None:
        """No layer has a window."""
        return None

    def kv_layouts(self) -> list[KVLayout]:
        """What each layer of the decoder keeps of a token."""
        return [KVLayout.of(self.heads)] * self.num_layers

    def features(self) -> set[str]:
        """What a backend must compute; see checkpoint/features.py."""
        return {CROSS_ATTENTION}


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a supported encoder-decoder architecture."""
    return any(name in ENCODER_DECODERS for name in config.get("architectures") or [])


def parse_encoder_decoder(config: Mapping[str, Any]) -> EncoderDecoderConfig:
    """Reads config.json. Raises CheckpointError naming the field for anything that is not supported."""
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            "quantization_config: quantized encoder-decoder checkpoints are not supported; use one in a float type"
        )
    found = next(ENCODER_DECODERS[name] for name in config["architectures"] if name in ENCODER_DECODERS)
    given = _Fields(config, found)
    hidden, num_heads = given.size("d_model"), given.size("head_count")
    is_t5 = bool(found.decoder.relative_bias)
    head_dim = given.size("d_kv", 64 if is_t5 else hidden // num_heads)
    if not is_t5 and given.size("encoder_attention_heads") != num_heads:
        raise CheckpointError(
            f"encoder_attention_heads: {config['encoder_attention_heads']} differs from decoder_attention_heads "
            f"{num_heads}; models with different heads in encoder and decoder are not supported"
        )
    activation, is_gated = _t5_feed_forward(config) if is_t5 else (given.text("activation"), False)
    positions = 512 if is_t5 else None  # T5's default
    return EncoderDecoderConfig(
        family=found,
        hidden_size=hidden,
        vocab_size=given.size("vocab_size"),
        heads=HeadShape(num_heads, num_heads, head_dim),
        encoder=StackConfig(
            _feed_names(found.encoder, is_gated=is_gated),
            given.size("num_encoder_layers"),
            given.size("encoder_inner"),
            given.size("encoder_positions", positions),
        ),
        decoder=StackConfig(
            _feed_names(found.decoder, is_gated=is_gated),
            given.size("num_decoder_layers", given.size("num_encoder_layers")),
            given.size("decoder_inner"),
            given.size("decoder_positions", positions),
        ),
        norm_eps=float(config.get("layer_norm_epsilon", 1e-6)) if is_t5 else 1e-5,
        activation=choice_of(activation, ACTIVATIONS, "activation"),
        is_gated=is_gated,
        attention_scale=1.0 if is_t5 else head_dim**-0.5,
        # Whisper's scale_embedding is not used by its reference implementation
        embedding_scale=hidden**0.5 if config.get("scale_embedding") and not found.is_audio else 1.0,
        head_scale=hidden**-0.5 if is_t5 and _scales_output(config) else 1.0,
        relative=RelativePositions(
            given.size("relative_attention_num_buckets", 32), given.size("relative_attention_max_distance", 128)
        )
        if is_t5
        else None,
        num_mel_bins=given.size("num_mel_bins") if found.is_audio else 0,
    )


def _scales_output(config: Mapping[str, Any]) -> bool:
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))


def _t5_feed_forward(config: Mapping[str, Any]) -> tuple[str, bool]:
    """The activation, and whether there is a gate. `gated-gelu` is gelu_new, as in transformers."""
    name = str(config.get("feed_forward_proj", "relu"))
    is_gated = name.startswith("gated-")
    return ("gelu_new", True) if name == "gated-gelu" else (name.removeprefix("gated-"), is_gated)


def _feed_names(names: StackNames, *, is_gated: bool) -> StackNames:
    """T5 names its first linear layer `wi` if there is no gate."""
    return names if is_gated or not names.gate else replace(names, gate="", up=names.up.removesuffix("_1"))


class _Fields:
    """Fields of config.json under the names of a family."""

    def __init__(self, config: Mapping[str, Any], family: EncoderDecoderFamily) -> None:
        self._config = config
        self._family = family

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises CheckpointError with the field's name in config.json."""
        return size_of(self._config, self._family.fields.get(name, name), default)

    def text(self, name: str) -> str:
        return str(self._config.get(self._family.fields.get(name, name), "gelu"))
