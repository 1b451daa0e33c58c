"""The supported encoder-only architectures, one row each.

All share one stack: embeddings with a norm, then layers of attention over the whole text and a feed-forward part. A row
lists the differences and the names of the tensors. No key or value outlives a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker_svc.engine.checkpoint.model_folder import CheckpointError


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of tensors, without `.weight` and `.bias`. Those of a layer follow `layer`. Empty: there is none."""

    prefix: str  # which a checkpoint without head may lack
    embedding: str
    position_embedding: str
    type_embedding: str
    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]  # or one name for all three
    o: str
    up: str  # [gate | up] if the feed-forward part has a gate
    down: str
    attention_norm: str  # after the attention, or before it if norms precede
    feed_norm: str
    final_norm: str = ""


BERT_NAMES = EncoderNames(
    prefix="bert.", embedding="embeddings.word_embeddings", position_embedding="embeddings.position_embeddings",
    type_embedding="embeddings.token_type_embeddings", embedding_norm="embeddings.LayerNorm", layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"), o="attention.output.dense",
    up="intermediate.dense", down="output.dense", attention_norm="attention.output.LayerNorm",
    feed_norm="output.LayerNorm",
)  # fmt: skip
MODERN_NAMES = EncoderNames(
    prefix="model.", embedding="embeddings.tok_embeddings", position_embedding="", type_embedding="",
    embedding_norm="embeddings.norm", layer="layers.{}.", qkv=("attn.Wqkv",), o="attn.Wo", up="mlp.Wi", down="mlp.Wo",
    attention_norm="attn_norm", feed_norm="mlp_norm", final_norm="final_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The layers of a classification head: a dense layer with an activation and perhaps a norm, then the classifier."""

    dense: str
    classifier: str
    activation: str = "tanh"  # or the field of config.json that names it
    norm: str = ""
    is_in_prefix: bool = False  # the dense layer's name has the prefix of the encoder


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The differences of one family. None: config.json decides."""

    models: str  # of the Hub, for docs/models.md
    head: HeadNames
    names: EncoderNames
    norms_precede: bool = False  # norms precede attention and feed-forward part, and the first layer has none
    is_gated: bool = False
    is_biased: bool | None = True  # None: attention_bias, mlp_bias and norm_bias
    has_positions_after_padding: bool = False  # positions begin at pad_token_id + 1
    has_windows: bool = False  # layer_types or global_attn_every_n_layers
    fields: Mapping[str, str] = field(default_factory=dict)  # other names of fields of config.json
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json lacks, as in transformers


BERT = EncoderFamily(
    "BERT",
    HeadNames("pooler.dense", "classifier", is_in_prefix=True),
    BERT_NAMES,
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0},
)
ROBERTA = replace(
    BERT, models="RoBERTa", head=HeadNames("classifier.dense", "classifier.out_proj"),
    names=replace(BERT_NAMES, prefix="roberta."), has_positions_after_padding=True,
    defaults={**BERT.defaults, "pad_token_id": 1},
)  # fmt: skip
MODERN_BERT = EncoderFamily(
    "ModernBERT", HeadNames("head.dense", "classifier", activation="classifier_activation", norm="head.norm"),
    MODERN_NAMES, norms_precede=True, is_gated=True, is_biased=None, has_windows=True,
    fields={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"}, defaults={"layer_norm_eps": 1e-5},
)  # fmt: skip

ENCODERS: Mapping[str, EncoderFamily] = {
    "Bert": BERT,
    "Roberta": ROBERTA,
    "XLMRoberta": replace(ROBERTA, models="XLM-RoBERTa, BGE-M3 (dense)"),
    "ModernBert": MODERN_BERT,
}
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification")


def encoder_of(config: Mapping[str, Any]) -> EncoderFamily | None:
    """The family in config.json; None if the model is no encoder."""
    for name in map(str, config.get("architectures") or []):
        for ending in ENDINGS:
            if name.endswith(ending) and name.removesuffix(ending) in ENCODERS:
                return ENCODERS[name.removesuffix(ending)]
    return None


def check_encoder(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a variant of an encoder that is not computed."""
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise CheckpointError(f"position_embedding_type: {kind!r} is not supported; use absolute")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise CheckpointError(f"{name}: true is not supported; the encoder attends to its own text only")
    if config.get("quantization_config"):
        raise CheckpointError("quantization_config: quantized encoders are not supported; use a float checkpoint")
