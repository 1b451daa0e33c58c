"""What a row of families.py says: the differences of an architecture from the common decoder, and its tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

NormKind = Literal["rms", "rms_offset", "layer"]
TowerKind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MropeKind = Literal["sections", "interleaved"]
WindowRule = Literal[
    "none",
    "opt_in",
    "opt_in_all",
    "opt_in_even",
    "opt_in_unrotated",
    "last",
    "all",
    "even",
    "pattern",
    "pattern_then_full",
    "after_full",
    "chunked",
]
RecurrenceName = Literal["gated_delta", "mamba2", "short_conv"]
Role = Literal["q", "k", "v", "latent", "o", "gate", "up", "down", "router", "head", "state"]
SharedKind = Literal["none", "whole", "gated"]  # a shared expert, and whether its output has a gate
QkNormScope = Literal["head", "projection", "rotated_head"]  # what one norm of queries or keys spans


# Which layers are rotated: those with a 1 in `no_rope_layers`, those with a window, or all if `position_embedding_type`
# says so.
RotationRule = Literal["all", "none", "listed", "windows", "windows_if_any", "embedding_type"]


# Which parts a layer has: attention or recurrence, then a feed-forward part; attention and recurrence side by side; one
# of all these.
LayerRule = Literal["mixer", "beside", "single"]


# The norms that a layer may have, in their order; decoder/forward.py says where. The names are those of transformers.
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """Names of the tensors of recurrent layers (recurrent.py). Empty: the layers have none."""

    inputs: tuple[str, ...]  # in the order of the projections, or of `layout`
    out: str
    conv: str
    step_bias: str = ""
    decay: str = ""
    skip: str = ""
    norm: str = ""
    # by_key_head: the rows of two tensors, [q, k, v, z] and [b, a], are grouped by key head.
    # mamba: [z, v, k, q, a], and [v, k, q] in the convolution.
    layout: Literal["parts", "by_key_head", "mamba"] = "parts"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of tensors, without `.weight` and `.bias`. Those of a layer follow `layer`. Empty: the decoder has none."""

    embedding: str = "model.embed_tokens"
    position_embedding: str = ""  # learned positions
    layer: str = "model.layers.{}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one name for all three
    o: tuple[str, ...] = ("self_attn.o_proj",)
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one name for both
    down: tuple[str, ...] = ("mlp.down_proj",)
    input_layernorm: str = "input_layernorm"
    post_attention_layernorm: str = ""  # of the attention output, before it is added
    pre_feedforward_layernorm: str = "post_attention_layernorm"  # before the feed-forward part
    post_feedforward_layernorm: str = ""  # of the feed-forward output, before it is added
    q_norm: str = "self_attn.q_norm"  # empty: it has no weights
    k_norm: str = "self_attn.k_norm"
    sinks: str = ""  # the tensor itself
    layer_scale: str = ""  # of the layer's output; the tensor itself
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"  # the tensor itself
    shared_gate: str = "mlp.shared_expert_gate"
    experts: str = "mlp.experts.{}."
    shared: str = "mlp.shared_experts."
    expert_linears: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # or two names, the first of gate and up
    shared_linears: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    # A tensor of all experts: [experts, in, out] or [experts, out, in]. Its name is whole
    stacked_experts: Literal["", "inputs_first", "outputs_first"] = ""
    has_gates_in_turns: bool = False  # outputs of gate and up alternate
    is_transposed: bool = False  # linear weights are stored as [in, out]
    recurrent: RecurrentNames | None = None  # of layers that keep a state

    def layer_norms(self) -> dict[str, str]:
        """Names of the norms that layers have, by their entry of LAYER_NORMS."""
        return {norm: name for norm in LAYER_NORMS if (name := getattr(self, norm))}


LLAMA_NAMES = Names()


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """How the experts of a family are chosen; see `Routing` of backend.py. None: config.json decides."""

    is_normalized: bool | None = None  # None: `norm_topk_prob`
    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_correction: bool = False
    group_best: int = 2
    shared: SharedKind = "none"  # if config.json gives its width
    scales_inputs: bool = False
    has_float32_router: bool = False
    is_beside: bool = False  # layers with experts also have a dense part, as Gemma 4


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The tensors of a layer that predicts a further token; `{}` is the number of layers before it."""

    layer: str = "model.layers.{}."
    embedding_norm: str = "model.layers.{}.enorm"
    state_norm: str = "model.layers.{}.hnorm"
    projection: str = "model.layers.{}.eh_proj"
    final_norm: str = "model.layers.{}.shared_head.norm"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences of one family from the common decoder. None: config.json decides."""

    models: str  # of the Hub, for docs/models.md
    may_need: frozenset[str] = frozenset()  # features that config.json decides, beside those that the row implies
    qk_norm: QkNormScope | None = None  # norms of queries and keys, unless `use_qk_norm` is false
    has_latents: bool = False  # latent attention (decoder/latents.py), always with the same names
    has_qkv_bias: bool | None = None  # None: `attention_bias`
    has_o_bias: bool | None = None  # None: `attention_out_bias`, or `attention_bias`
    has_mlp_bias: bool | None = False  # None: `mlp_bias`
    has_expert_bias: bool = False  # of experts and router
    has_norm_bias: bool = True  # of LayerNorm
    norm: NormKind = "rms"
    rotated: RotationRule = "all"
    is_interleaved: bool = False  # neighbours are rotated together
    rotates_first: bool = False  # before the norms of queries and keys
    is_parallel: bool = False  # the feed-forward part reads the input of the layer
    activation: str | None = None  # None: `hidden_act`
    is_gated: bool = True  # the feed-forward part has a gate
    windows: WindowRule = "opt_in"  # layers with a sliding window, if config.json has no `layer_types`
    experts: ExpertFamily | None = None
    scales_embedding: bool = False  # by the square root of hidden_size
    scales_given_embeddings: bool = False  # `embedding_multiplier` also multiplies those that a request carries
    recurrence: RecurrenceName | None = None  # of the layers that keep a state
    layers: LayerRule = "mixer"
    has_layer_shapes: bool = False  # as Gemma 4 (decoder/per_layer.py)
    has_streams: bool = False  # as Gemma 3n (decoder/streams.py)
    has_factors: bool = False  # config.json has factors of the outputs of linear layers, as Falcon-H1
    adjusts_inner: bool = False  # config.json has a rule for the width of the feed-forward part, as LFM2
    has_output_gate: bool = False  # q_proj also has a gate for each attention output
    tower: TowerKind | None = None  # of images; their tokens have positions on three axes (rows/positions.py)
    mrope: MropeKind | None = None  # how the frequencies of a head are divided among the axes
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json lacks, as in transformers
    fixed: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields with the only value that is computed; a tuple: also spelled so
    ignored: frozenset[str] = frozenset()  # fields that transformers does not read for this architecture
    fields: Mapping[str, str] = field(default_factory=dict)  # other names of fields of config.json
    unread: tuple[str, ...] = ()  # beginnings of names of tensors that are not read
    names: Names = LLAMA_NAMES
    mtp: MtpNames | None = None  # of the layer with which `--speculate mtp` proposes drafts. None: it is not computed


HeadKind = Literal["tokens", "classes", "none"]


def without_prefix(names: Names, prefix: str) -> Names:
    """The names of a checkpoint that was saved without its head: they lack the prefix of the decoder."""
    of_decoder = ("embedding", "position_embedding", "layer", "final_norm")
    return replace(names, **{name: getattr(names, name).removeprefix(prefix) for name in of_decoder})
