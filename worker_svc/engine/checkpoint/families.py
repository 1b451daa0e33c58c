"""The supported architectures, one row each.

All share one decoder: attention and a feed-forward part, each with a norm before it, after it or both, and added to
the residual (decoder/forward.py). A row lists the differences: norms, biases, windows, experts, and the names of the
tensors in a checkpoint.
docs/adding-a-model.md explains how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from worker_svc.engine.checkpoint.model_folder import CheckpointError

NormKind = Literal["rms", "rms_offset", "layer"]
TowerKind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MropeKind = Literal["sections", "interleaved"]
WindowRule = Literal[
    "none", "opt_in", "opt_in_all", "opt_in_even", "opt_in_unrotated", "last", "all", "even", "pattern", "chunked"
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
LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


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
MAMBA = RecurrentNames(
    inputs=("mamba.in_proj",),
    out="mamba.out_proj",
    conv="mamba.conv1d",
    step_bias="mamba.dt_bias",
    decay="mamba.A_log",
    skip="mamba.D",
    norm="mamba.norm",
    layout="mamba",
)
BAMBA_NAMES = replace(
    LLAMA_NAMES,
    final_norm="model.final_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down=("feed_forward.down_proj",),
    pre_feedforward_layernorm="pre_ff_layernorm",
    recurrent=MAMBA,
)
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
NEMOTRON_NAMES = Names(
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o=("mixer.o_proj",),
    gate_up=("mixer.up_proj",),
    down=("mixer.down_proj",),
    input_layernorm="norm",
    pre_feedforward_layernorm="norm",
    router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias",
    experts="mixer.experts.{}.",
    expert_linears=("up_proj", "down_proj"),
    shared="mixer.shared_experts.",
    shared_linears=("up_proj", "down_proj"),
    recurrent=RecurrentNames(
        inputs=("mixer.in_proj",),
        out="mixer.out_proj",
        conv="mixer.conv1d",
        step_bias="mixer.dt_bias",
        decay="mixer.A_log",
        skip="mixer.D",
        norm="mixer.norm",
        layout="mamba",
    ),
)
LFM2_NAMES = Names(
    final_norm="model.embedding_norm",
    o=("self_attn.out_proj",),
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down=("feed_forward.w2",),
    input_layernorm="operator_norm",
    pre_feedforward_layernorm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    recurrent=RecurrentNames(inputs=("conv.in_proj",), out="conv.out_proj", conv="conv.conv"),
)
QWEN3_5_STATE = RecurrentNames(
    inputs=tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    out="linear_attn.out_proj",
    conv="linear_attn.conv1d",
    step_bias="linear_attn.dt_bias",
    decay="linear_attn.A_log",
    norm="linear_attn.norm",
)
QWEN3_5_NAMES = replace(LLAMA_NAMES, recurrent=QWEN3_5_STATE)
FUSED_NAMES = replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
MIXTRAL_NAMES = replace(
    LLAMA_NAMES,
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{}.",
    expert_linears=("w1", "w3", "w2"),
)
GEMMA_NAMES = replace(
    LLAMA_NAMES,
    post_attention_layernorm="post_attention_layernorm",
    pre_feedforward_layernorm="pre_feedforward_layernorm",
    post_feedforward_layernorm="post_feedforward_layernorm",
)
OLMO2_NAMES = replace(
    LLAMA_NAMES,
    input_layernorm="",
    post_attention_layernorm="post_attention_layernorm",
    pre_feedforward_layernorm="",
    post_feedforward_layernorm="post_feedforward_layernorm",
)
GPT2_NAMES = Names(
    embedding="transformer.wte",
    position_embedding="transformer.wpe",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    qkv=("attn.c_attn",),
    o=("attn.c_proj",),
    gate_up=("mlp.c_fc",),
    down=("mlp.c_proj",),
    input_layernorm="ln_1",
    pre_feedforward_layernorm="ln_2",
    is_transposed=True,
)


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
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields with the only value that is computed
    ignored: frozenset[str] = frozenset()  # fields that transformers does not read for this architecture
    fields: Mapping[str, str] = field(default_factory=dict)  # other names of fields of config.json
    unread: tuple[str, ...] = ()  # beginnings of names of tensors that are not read
    names: Names = LLAMA_NAMES
    mtp: MtpNames | None = None  # of the layer with which `--speculate mtp` proposes drafts. None: it is not computed


WINDOWS = frozenset({"sliding_window"})
DEEPSEEK_EXPERTS = ExpertFamily(scores="sigmoid", has_correction=True, shared="whole", has_float32_router=True)
GEMMA2 = Architecture(
    "Gemma 2",
    frozenset({"attention_scale", "sliding_window", "soft_caps"}),
    norm="rms_offset",
    windows="even",
    scales_embedding=True,
    defaults={
        "sliding_window": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed={"use_bidirectional_attention": False},
    fields={"hidden_act": "hidden_activation"},
    names=GEMMA_NAMES,
)
MULTIPLIERS = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
MISTRAL = Architecture(
    "Mistral",
    WINDOWS,
    has_qkv_bias=False,
    has_o_bias=False,
    windows="all",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
ERNIE = Architecture(
    "ERNIE 4.5",
    has_mlp_bias=None,
    windows="none",
    is_interleaved=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    fields={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
)
LLAMA4 = Architecture(
    "Llama 4, text only",
    qk_norm="rotated_head",
    windows="chunked",
    rotated="listed",
    is_interleaved=True,
    rotates_first=True,
    experts=ExpertFamily(is_normalized=False, scores="sigmoid", shared="whole", scales_inputs=True),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    fields={
        "num_experts": "num_local_experts",
        "moe_intermediate_size": "intermediate_size",
        "intermediate_size": "intermediate_size_mlp",
        "decoder_sparse_step": "interleave_moe_layer_step",
    },
    names=replace(
        LLAMA_NAMES,
        q_norm="",
        k_norm="",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down=("feed_forward.down_proj",),
        router="feed_forward.router",
        experts="feed_forward.experts.",
        expert_linears=("gate_up_proj", "down_proj"),
        stacked_experts="inputs_first",
        shared="feed_forward.shared_expert.",
    ),
    unread=("vision_model.", "multi_modal_projector."),
)
QWEN2_VL = Architecture(
    "Qwen2-VL",
    WINDOWS,
    has_qkv_bias=True,
    has_o_bias=False,
    tower="qwen2_vl",
    mrope="sections",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80, "mrope_section": [16, 24, 24]},
)
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128}
DEEPSEEK_V3 = Architecture(
    "DeepSeek V3 and R1, Kimi K2",
    has_latents=True,
    windows="none",
    experts=DEEPSEEK_EXPERTS,
    mtp=MtpNames(),
    defaults={
        **LATENT_SIZES,
        "q_lora_rank": 1536,
        "num_experts": 256,
        "num_nextn_predict_layers": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
    },
    fields={"num_experts": "n_routed_experts"},
)
GEMMA4 = Architecture(
    "Gemma 4, text only",
    frozenset({"attention_scale", "sliding_window", "soft_caps", "kv_layouts", "experts", "experts_beside"}),
    qk_norm="head",
    windows="pattern",
    experts=ExpertFamily(is_normalized=True, is_beside=True),
    scales_embedding=True,
    has_layer_shapes=True,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_multiplier": 1.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "enable_moe_block": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    fixed={"use_bidirectional_attention": None, "attention_bias": False},
    fields={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    names=replace(
        GEMMA_NAMES,
        layer_scale="layer_scalar",
        router="router.proj",
        experts="experts.",
        expert_linears=("gate_up_proj", "down_proj"),
        stacked_experts="outputs_first",
    ),
    unread=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)
GEMMA3N = replace(
    GEMMA4,
    models="Gemma 3n, text only",
    may_need=frozenset({"attention_scale", "sliding_window", "soft_caps", "kv_layouts"}),
    experts=None,
    has_streams=True,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_multiplier": 1.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "per_layer_config": {},
        "num_kv_shared_layers": 15,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
    },
    fixed={"attention_bias": False},
    fields={"hidden_act": "hidden_activation"},
    names=GEMMA_NAMES,
)
GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}

LFM2 = Architecture(
    "LFM2, LFM2.5",
    qk_norm="head",
    has_qkv_bias=False,
    has_o_bias=False,
    windows="none",
    recurrence="short_conv",
    adjusts_inner=True,
    defaults={
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    fields={"intermediate_size": "block_ff_dim"},
    names=LFM2_NAMES,
)
QWEN3_5 = Architecture(
    "Qwen3.5 and Qwen3.6 dense",
    frozenset({"partial_rotary"}),
    qk_norm="head",
    norm="rms_offset",
    windows="none",
    recurrence="gated_delta",
    has_output_gate=True,
    defaults={
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "mrope_section": [11, 11, 10],
    },
    unread=("mtp.",),
    names=QWEN3_5_NAMES,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    models="Qwen3.5 and Qwen3.6 with experts",
    experts=ExpertFamily(shared="gated", is_normalized=True),
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    names=replace(QWEN3_5_NAMES, shared="mlp.shared_expert."),
)
QWEN3_NEXT_NAMES = replace(
    QWEN3_5_MOE.names,
    recurrent=replace(
        QWEN3_5_STATE, inputs=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), layout="by_key_head"
    ),
)

ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        "Qwen3", WINDOWS, qk_norm="head", defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Architecture(
        "Qwen2, Qwen2.5",
        WINDOWS,
        has_qkv_bias=True,
        has_o_bias=False,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "LlamaForCausalLM": Architecture("Llama 2 and 3", has_mlp_bias=None, windows="none"),
    "MistralForCausalLM": MISTRAL,
    "Phi3ForCausalLM": Architecture(
        "Phi-3, Phi-3.5 and Phi-4",
        WINDOWS | {"partial_rotary"},
        has_qkv_bias=False,
        has_o_bias=False,
        windows="all",
        defaults={"rms_norm_eps": 1e-5},
        names=FUSED_NAMES,
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        models="Gemma 3, text only",
        qk_norm="head",
        windows="pattern",
        defaults={
            **GEMMA2.defaults,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        ignored=frozenset({"attn_logit_softcapping"}),
    ),
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Qwen3MoeForCausalLM": Architecture(
        "Qwen3-MoE",
        WINDOWS,
        qk_norm="head",
        experts=ExpertFamily(),
        windows="opt_in_all",
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "moe_intermediate_size": 768},
    ),
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(QWEN2_VL, models="Qwen2.5-VL", tower="qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": Architecture(
        "Qwen3-VL",
        qk_norm="head",
        windows="none",
        tower="qwen3_vl",
        mrope="interleaved",
        defaults={"head_dim": 128, "rope_theta": 5e5, "mrope_section": [24, 20, 20]},
    ),
    "MixtralForCausalLM": Architecture(
        "Mixtral",
        WINDOWS,
        has_qkv_bias=False,
        has_o_bias=False,
        windows="all",
        experts=ExpertFamily(is_normalized=True),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        fields={"num_experts": "num_local_experts"},
        names=MIXTRAL_NAMES,
    ),
    "Olmo2ForCausalLM": Architecture(
        "OLMo 2",
        qk_norm="projection",
        has_mlp_bias=False,
        windows="none",
        defaults={"rms_norm_eps": 1e-5},
        names=OLMO2_NAMES,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "Qwen1.5-MoE, Qwen2-MoE",
        WINDOWS,
        has_o_bias=False,
        experts=ExpertFamily(shared="gated"),
        windows="opt_in_even",
        defaults={
            "attention_bias": True,
            "sliding_window": 4096,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        fields={"attention_bias": "qkv_bias"},
        names=replace(LLAMA_NAMES, shared="mlp.shared_expert."),
    ),
    "Glm4MoeForCausalLM": Architecture(
        "GLM-4.5, GLM-4.6",
        qk_norm="head",
        has_o_bias=False,
        windows="none",
        experts=DEEPSEEK_EXPERTS,
        mtp=MtpNames(),
        defaults={
            "use_qk_norm": False,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 8,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        fields={"num_experts": "n_routed_experts"},
    ),
    "Dots1ForCausalLM": Architecture(
        "dots.llm1",
        WINDOWS,
        qk_norm="head",
        windows="last",
        experts=DEEPSEEK_EXPERTS,
        defaults={"sliding_window": 4096, "max_window_layers": 62, "num_experts": None, "moe_intermediate_size": 1408},
        fields={"num_experts": "n_routed_experts"},
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "MiniMax-M2",
        qk_norm="projection",
        has_qkv_bias=False,
        has_o_bias=False,
        windows="none",
        experts=ExpertFamily(is_normalized=True, scores="sigmoid", has_correction=True),
        defaults={
            "rope_theta": 5e6,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        fields={"num_experts": "num_local_experts"},
        names=replace(MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias"),
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(QWEN3_5, tower="qwen3_vl", mrope="interleaved"),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(QWEN3_5_MOE, tower="qwen3_vl", mrope="interleaved"),
    "Qwen3NextForCausalLM": replace(
        QWEN3_5_MOE,
        models="Qwen3-Next",
        experts=ExpertFamily(shared="gated"),
        defaults={
            **QWEN3_5_MOE.defaults,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        names=QWEN3_NEXT_NAMES,
    ),
    "Lfm2ForCausalLM": LFM2,
    "BambaForCausalLM": Architecture(
        "Bamba",
        frozenset({"partial_rotary"}),
        has_mlp_bias=None,
        windows="none",
        recurrence="mamba2",
        defaults={**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        fields={"full_attn_idxs": "attn_layer_indices"},
        names=BAMBA_NAMES,
    ),
    "Glm4ForCausalLM": Architecture(
        "GLM-4 (0414)",
        frozenset({"partial_rotary"}),
        has_o_bias=False,
        windows="none",
        is_interleaved=True,
        defaults={
            "attention_bias": True,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "head_dim": 128,
            "num_key_value_heads": 2,
        },
        names=replace(
            FUSED_NAMES,
            qkv=LLAMA_NAMES.qkv,
            post_attention_layernorm="post_self_attn_layernorm",
            post_feedforward_layernorm="post_mlp_layernorm",
        ),
    ),
    "Olmo3ForCausalLM": Architecture(
        "OLMo 3",
        WINDOWS,
        qk_norm="projection",
        windows="pattern",
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
        },
        names=OLMO2_NAMES,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "SmolLM3",
        WINDOWS,
        has_mlp_bias=None,
        windows="opt_in_unrotated",
        rotated="listed",
        defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "GraniteForCausalLM": Architecture("Granite 3", has_mlp_bias=None, windows="none", defaults=MULTIPLIERS),
    "GraniteMoeHybridForCausalLM": Architecture(
        "Granite 4",
        frozenset({"recurrent", "experts", "shared_experts"}),
        windows="none",
        experts=ExpertFamily(is_normalized=True, shared="whole"),
        recurrence="mamba2",
        rotated="embedding_type",
        defaults={
            **MULTIPLIERS,
            **MAMBA_DEFAULTS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 11008,
            "shared_expert_intermediate_size": 1024,
            "intermediate_size": 1024,
            "layer_types": [],
        },
        fields={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
            "shared_expert_intermediate_size": "shared_intermediate_size",
            "intermediate_size": "shared_intermediate_size",
        },
        names=replace(
            LLAMA_NAMES,
            gate_up=("shared_mlp.input_linear",),
            down=("shared_mlp.output_linear",),
            router="block_sparse_moe.router.layer",
            experts="block_sparse_moe.",
            expert_linears=("input_linear.weight", "output_linear.weight"),
            stacked_experts="outputs_first",
            shared="shared_mlp.",
            shared_linears=("input_linear", "output_linear"),
            recurrent=MAMBA,
        ),
    ),
    "FalconH1ForCausalLM": Architecture(
        "Falcon-H1",
        windows="none",
        recurrence="mamba2",
        layers="beside",
        has_factors=True,
        defaults={
            **MAMBA_DEFAULTS,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "embedding_multiplier": 1.0,
            "logit_scale": 1.0,
        },
        # Factors are multiplied into weights, not into biases
        fixed={"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "projectors_bias": False},
        fields={"logit_scale": "lm_head_multiplier"},
        names=BAMBA_NAMES,
    ),
    "NemotronHForCausalLM": Architecture(
        "Nemotron-H, Nemotron Nano 2 and 3",
        frozenset({"experts", "shared_experts", "expert_scores"}),
        has_qkv_bias=False,
        has_o_bias=False,
        is_gated=False,
        windows="none",
        rotated="none",
        recurrence="mamba2",
        layers="single",
        experts=DEEPSEEK_EXPERTS,
        defaults={
            **MAMBA_DEFAULTS,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
            "norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "hidden_act": "relu2",
            "intermediate_size": 21504,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": 7688,
        },
        fixed={
            "mlp_bias": False,
            "use_bias": False,
            "mamba_hidden_act": "silu",
            "moe_latent_size": None,
            "residual_in_fp32": False,
        },
        fields={
            "layer_types": "layers_block_type",
            "norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
        unread=("mtp.",),
        names=NEMOTRON_NAMES,
    ),
    "Ernie4_5ForCausalLM": ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(
        ERNIE,
        models="ERNIE 4.5, experts",
        experts=ExpertFamily(is_normalized=True, has_correction=True, shared="whole", has_float32_router=True),
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        defaults={
            **ERNIE.defaults,
            "num_key_value_heads": 4,
            "head_dim": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
        },
        fixed={"use_bias": False},
        fields={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        unread=("model.mtp_",),
        names=replace(LLAMA_NAMES, correction="mlp.moe_statics.e_score_correction_bias"),
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "Hunyuan, dense",
        qk_norm="head",
        windows="none",
        rotates_first=True,
        defaults={"rms_norm_eps": 1e-5},
        names=replace(LLAMA_NAMES, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    ),
    "SeedOssForCausalLM": Architecture(
        "Seed-OSS",
        has_mlp_bias=None,
        windows="none",
        defaults={"attention_bias": True, "attention_out_bias": False, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "Exaone4ForCausalLM": Architecture(
        "EXAONE 4",
        WINDOWS,
        qk_norm="head",
        has_qkv_bias=False,
        has_o_bias=False,
        windows="pattern",
        rotated="windows_if_any",
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        names=OLMO2_NAMES,
    ),
    "Ministral3ForCausalLM": replace(
        MISTRAL,
        models="Ministral 3",
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "Mistral3ForConditionalGeneration": replace(
        MISTRAL,
        models="Mistral Small 3.1 and 3.2, Magistral, Ministral 3, text only",
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8},
        unread=("vision_tower.", "multi_modal_projector."),
    ),
    "Cohere2ForCausalLM": Architecture(
        "Command R7B, Command A",
        WINDOWS,
        norm="layer",
        has_norm_bias=False,
        windows="pattern",
        rotated="windows",
        is_interleaved=True,
        is_parallel=True,
        defaults={
            "norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        fields={"norm_eps": "layer_norm_eps"},
        names=replace(LLAMA_NAMES, pre_feedforward_layernorm="input_layernorm"),
    ),
    "Starcoder2ForCausalLM": Architecture(
        "StarCoder2",
        WINDOWS,
        has_mlp_bias=None,
        norm="layer",
        is_gated=False,
        windows="all",
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 12288,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        fields={"attention_bias": "use_bias", "mlp_bias": "use_bias", "norm_eps": "norm_epsilon"},
        names=replace(LLAMA_NAMES, gate_up=("mlp.c_fc",), down=("mlp.c_proj",)),
    ),
    "ArceeForCausalLM": Architecture(
        "AFM (Arcee)",
        has_mlp_bias=None,
        is_gated=False,
        windows="none",
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "intermediate_size": 18432},
        names=replace(LLAMA_NAMES, gate_up=("mlp.up_proj",)),
    ),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        WINDOWS,
        windows="even",
        experts=ExpertFamily(is_normalized=True),
        has_expert_bias=True,
        activation="clamped_swiglu",
        defaults={
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "num_experts": 128,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed={"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        fields={"num_experts": "num_local_experts"},
        names=replace(
            LLAMA_NAMES,
            sinks="self_attn.sinks",
            router="mlp.router",
            experts="mlp.experts.",
            expert_linears=("gate_up_proj", "down_proj"),
            stacked_experts="inputs_first",
            has_gates_in_turns=True,
        ),
    ),
    "DeepseekV2ForCausalLM": replace(
        DEEPSEEK_V3,
        models="DeepSeek V2",
        has_mlp_bias=None,
        experts=ExpertFamily(is_normalized=False, group_best=1, shared="whole", has_float32_router=True),
        defaults={
            **LATENT_SIZES,
            "q_lora_rank": 1536,
            "num_experts": 64,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
        },
        fixed={"norm_topk_prob": False, "rope_interleave": True},
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK_V3,
        models="GLM-4.7-Flash",
        defaults={
            **LATENT_SIZES,
            "q_lora_rank": 768,
            "num_experts": 64,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
        },
    ),
    "GPT2LMHeadModel": Architecture(
        "GPT-2",
        frozenset({"odd_heads"}),
        has_qkv_bias=True,
        has_o_bias=True,
        has_mlp_bias=True,
        norm="layer",
        is_gated=False,
        windows="none",
        defaults={"norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        fields=GPT2_FIELDS,
        names=GPT2_NAMES,
    ),
}


ENCODER_DECODER_NAMES = (  # described in encoder_decoder/config.py
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MBartForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
HeadKind = Literal["tokens", "classes", "none"]
HEADS: Mapping[str, HeadKind] = {"ForCausalLM": "tokens", "ForSequenceClassification": "classes", "Model": "none"}


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture in config.json. Raises CheckpointError if it is not supported."""
    names = config.get("architectures") or []
    found = next((ARCHITECTURES[name] for name in map(_with_tokens, names) if name in ARCHITECTURES), None)
    if found is None and any(name in ENCODER_DECODER_NAMES for name in names):
        raise CheckpointError(
            f"architectures: {', '.join(names)} has an encoder and cross-attention, which this backend does not "
            "compute; use --backend cpu"
        )
    if found is None:
        raise CheckpointError(
            f"architectures: {', '.join(map(str, names)) or 'not set'} is not supported; "
            f"use one of {', '.join((*ARCHITECTURES, *ENCODER_DECODER_NAMES))}"
        )
    return found


def head_of(config: dict[str, Any]) -> HeadKind:
    """What the model computes from hidden states: the name of its architecture says it."""
    name = str((config.get("architectures") or [""])[0])
    if name in ARCHITECTURES:  # the name of one ends like that of a model without a head: GPT2LMHeadModel
        return "tokens"
    return next((head for ending, head in HEADS.items() if name.endswith(ending)), "tokens")


def _with_tokens(name: str) -> str:
    """The name of the same decoder with a language-model head."""
    for ending in HEADS if name not in ARCHITECTURES else ():
        if str(name).endswith(ending):
            return str(name).removesuffix(ending) + "ForCausalLM"
    return str(name)


def without_prefix(names: Names, prefix: str) -> Names:
    """The names of a checkpoint that was saved without its head: they lack the prefix of the decoder."""
    of_decoder = ("embedding", "position_embedding", "layer", "final_norm")
    return replace(names, **{name: getattr(names, name).removeprefix(prefix) for name in of_decoder})
