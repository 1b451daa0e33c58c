"""The supported architectures, one row each.

All share one decoder: attention and a feed-forward part, each with a norm before it, after it or both, and added to
the residual (decoder/forward.py). A row lists the differences: norms, biases, windows, experts, and the names of the
tensors in a checkpoint.
docs/adding-a-model.md explains how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from worker_svc.engine.checkpoint.architecture import (
    LLAMA_NAMES,
    Architecture,
    ExpertFamily,
    HeadKind,
    MtpNames,
    Names,
    RecurrentNames,
)
from worker_svc.engine.checkpoint.model_folder import CheckpointError

MAMBA = RecurrentNames(
    inputs=("mamba.in_proj",), out="mamba.out_proj", conv="mamba.conv1d", step_bias="mamba.dt_bias",
    decay="mamba.A_log", skip="mamba.D", norm="mamba.norm", layout="mamba",
)  # fmt: skip
BAMBA_NAMES = replace(
    LLAMA_NAMES, final_norm="model.final_layernorm", gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down=("feed_forward.down_proj",), pre_feedforward_layernorm="pre_ff_layernorm", recurrent=MAMBA,
)  # fmt: skip
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True,
}  # fmt: skip
NEMOTRON_NAMES = Names(
    embedding="backbone.embeddings", layer="backbone.layers.{}.", final_norm="backbone.norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), o=("mixer.o_proj",), gate_up=("mixer.up_proj",),
    down=("mixer.down_proj",), input_layernorm="norm", pre_feedforward_layernorm="norm", router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias", experts="mixer.experts.{}.",
    expert_linears=("up_proj", "down_proj"), shared="mixer.shared_experts.", shared_linears=("up_proj", "down_proj"),
    recurrent=RecurrentNames(
        inputs=("mixer.in_proj",), out="mixer.out_proj", conv="mixer.conv1d", step_bias="mixer.dt_bias",
        decay="mixer.A_log", skip="mixer.D", norm="mixer.norm", layout="mamba",
    ),
)  # fmt: skip
LFM2_NAMES = Names(
    final_norm="model.embedding_norm", o=("self_attn.out_proj",), gate_up=("feed_forward.w1", "feed_forward.w3"),
    down=("feed_forward.w2",), input_layernorm="operator_norm", pre_feedforward_layernorm="ffn_norm",
    q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm",
    recurrent=RecurrentNames(inputs=("conv.in_proj",), out="conv.out_proj", conv="conv.conv"),
)  # fmt: skip
QWEN3_5_STATE = RecurrentNames(
    inputs=tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")), out="linear_attn.out_proj",
    conv="linear_attn.conv1d", step_bias="linear_attn.dt_bias", decay="linear_attn.A_log", norm="linear_attn.norm",
)  # fmt: skip
QWEN3_5_NAMES = replace(LLAMA_NAMES, recurrent=QWEN3_5_STATE)
FUSED_NAMES = replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
MIXTRAL_NAMES = replace(
    LLAMA_NAMES, router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.",
    expert_linears=("w1", "w3", "w2"),
)  # fmt: skip
GEMMA_NAMES = replace(
    LLAMA_NAMES, post_attention_layernorm="post_attention_layernorm",
    pre_feedforward_layernorm="pre_feedforward_layernorm", post_feedforward_layernorm="post_feedforward_layernorm",
)  # fmt: skip
OLMO2_NAMES = replace(
    LLAMA_NAMES, input_layernorm="", post_attention_layernorm="post_attention_layernorm", pre_feedforward_layernorm="",
    post_feedforward_layernorm="post_feedforward_layernorm",
)  # fmt: skip
GPT2_NAMES = Names(
    embedding="transformer.wte", position_embedding="transformer.wpe", layer="transformer.h.{}.",
    final_norm="transformer.ln_f", qkv=("attn.c_attn",), o=("attn.c_proj",), gate_up=("mlp.c_fc",),
    down=("mlp.c_proj",), input_layernorm="ln_1", pre_feedforward_layernorm="ln_2", is_transposed=True,
)  # fmt: skip


WINDOWS = frozenset({"sliding_window"})
DEEPSEEK_EXPERTS = ExpertFamily(scores="sigmoid", has_correction=True, shared="whole", has_float32_router=True)
GEMMA2 = Architecture(
    "Gemma 2", frozenset({"attention_scale", "sliding_window", "soft_caps"}), norm="rms_offset", windows="even",
    scales_embedding=True,
    defaults={
        "sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed={"use_bidirectional_attention": False}, fields={"hidden_act": "hidden_activation"}, names=GEMMA_NAMES,
)  # fmt: skip
GEMMA3 = replace(
    GEMMA2, models="Gemma 3, text only", qk_norm="head", windows="pattern",
    defaults={
        **GEMMA2.defaults, "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    ignored=frozenset({"attn_logit_softcapping"}),
)  # fmt: skip
MULTIPLIERS = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
GRANITE_NAMES = replace(
    LLAMA_NAMES, router="block_sparse_moe.router.layer", experts="block_sparse_moe.",
    expert_linears=("input_linear.weight", "output_linear.weight"), stacked_experts="outputs_first",
    shared="shared_mlp.", shared_linears=("input_linear", "output_linear"),
)  # fmt: skip
GRANITE_MOE = Architecture(
    "Granite 3 with experts", windows="none", scales_given_embeddings=True, experts=ExpertFamily(is_normalized=True),
    defaults={**MULTIPLIERS, "num_experts": 8, "num_experts_per_tok": 2}, fields={"num_experts": "num_local_experts"},
    names=GRANITE_NAMES,
)  # fmt: skip
MISTRAL = Architecture(
    "Mistral", WINDOWS, has_qkv_bias=False, has_o_bias=False, windows="all",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)  # fmt: skip
COHERE = Architecture(
    "Command R", norm="layer", has_norm_bias=False, windows="none", is_interleaved=True, is_parallel=True,
    defaults={"norm_eps": 1e-5, "rope_theta": 5e5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    fixed={"use_qk_norm": False}, fields={"norm_eps": "layer_norm_eps"},
    names=replace(LLAMA_NAMES, pre_feedforward_layernorm="input_layernorm"),
)  # fmt: skip
ERNIE = Architecture(
    "ERNIE 4.5", has_mlp_bias=None, windows="none", is_interleaved=True,
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    fields={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
)  # fmt: skip
LLAMA4 = Architecture(
    "Llama 4, text only", qk_norm="rotated_head", windows="chunked", rotated="listed", is_interleaved=True,
    rotates_first=True, experts=ExpertFamily(is_normalized=False, scores="sigmoid", shared="whole", scales_inputs=True),
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 8, "num_experts": 16,
        "num_experts_per_tok": 1, "n_shared_experts": 1, "intermediate_size": 16384, "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192,
    },
    fields={
        "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size",
        "intermediate_size": "intermediate_size_mlp", "decoder_sparse_step": "interleave_moe_layer_step",
    },
    names=replace(
        LLAMA_NAMES, q_norm="", k_norm="", gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down=("feed_forward.down_proj",), router="feed_forward.router", experts="feed_forward.experts.",
        expert_linears=("gate_up_proj", "down_proj"), stacked_experts="inputs_first",
        shared="feed_forward.shared_expert.",
    ),
    unread=("vision_model.", "multi_modal_projector."),
)  # fmt: skip
QWEN2_VL = Architecture(
    "Qwen2-VL", WINDOWS, has_qkv_bias=True, has_o_bias=False, tower="qwen2_vl", mrope="sections",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80, "mrope_section": [16, 24, 24]},
)  # fmt: skip
GLM = Architecture(
    "GLM-4 (2024)", frozenset({"partial_rotary"}), has_o_bias=False, windows="none", is_interleaved=True,
    defaults={
        "attention_bias": True, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "head_dim": 128,
        "num_key_value_heads": 2,
    },
    names=replace(FUSED_NAMES, qkv=LLAMA_NAMES.qkv),
)  # fmt: skip
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128}
DEEPSEEK_V3 = Architecture(
    "DeepSeek V3 and R1, Kimi K2", has_latents=True, windows="none", experts=DEEPSEEK_EXPERTS, mtp=MtpNames(),
    defaults={
        **LATENT_SIZES, "q_lora_rank": 1536, "num_experts": 256, "num_nextn_predict_layers": 1, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    },
    fields={"num_experts": "n_routed_experts"},
)  # fmt: skip
GEMMA4 = Architecture(
    "Gemma 4, text only",
    frozenset({"attention_scale", "sliding_window", "soft_caps", "kv_layouts", "experts", "experts_beside"}),
    qk_norm="head",
    windows="pattern_then_full",
    experts=ExpertFamily(is_normalized=True, is_beside=True),
    scales_embedding=True,
    has_layer_shapes=True,
    defaults={
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 512,
        "sliding_window_pattern": 6, "num_key_value_heads": 4, "head_dim": 256, "attention_multiplier": 1.0,
        "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "enable_moe_block": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    fixed={"use_bidirectional_attention": (None, "vision"), "attention_bias": False},  # vision: of images only
    fields={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    names=replace(
        GEMMA_NAMES, layer_scale="layer_scalar", router="router.proj", experts="experts.",
        expert_linears=("gate_up_proj", "down_proj"), stacked_experts="outputs_first",
    ),
    unread=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
)  # fmt: skip
GEMMA3N = replace(
    GEMMA4, models="Gemma 3n, text only",
    may_need=frozenset({"attention_scale", "sliding_window", "soft_caps", "kv_layouts"}), experts=None,
    windows="pattern", has_streams=True,
    defaults={
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 512,
        "sliding_window_pattern": 5, "num_key_value_heads": 2, "head_dim": 256, "attention_multiplier": 1.0,
        "final_logit_softcapping": 30.0, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "per_layer_config": {},
        "num_kv_shared_layers": 15, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "laurel_rank": 64,
    },
    fixed={"attention_bias": False}, fields={"hidden_act": "hidden_activation"}, names=GEMMA_NAMES,
)  # fmt: skip
GPT2_FIELDS = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}  # fmt: skip

LFM2 = Architecture(
    "LFM2, LFM2.5", qk_norm="head", has_qkv_bias=False, has_o_bias=False, windows="none", recurrence="short_conv",
    adjusts_inner=True,
    defaults={
        "norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "tie_word_embeddings": True, "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    },
    fields={"intermediate_size": "block_ff_dim"}, names=LFM2_NAMES,
)  # fmt: skip
QWEN3_5 = Architecture(
    "Qwen3.5 and Qwen3.6 dense", frozenset({"partial_rotary"}), qk_norm="head", norm="rms_offset", windows="none",
    recurrence="gated_delta", has_output_gate=True,
    defaults={
        "rms_norm_eps": 1e-6, "head_dim": 256, "num_key_value_heads": 4, "full_attention_interval": 4,
        "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "mrope_section": [11, 11, 10],
    },
    unread=("mtp.",), names=QWEN3_5_NAMES,
    mtp=MtpNames("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
)  # fmt: skip
QWEN3_5_MOE = replace(
    QWEN3_5, models="Qwen3.5 and Qwen3.6 with experts", experts=ExpertFamily(shared="gated", is_normalized=True),
    defaults={
        **QWEN3_5.defaults, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    names=replace(QWEN3_5_NAMES, shared="mlp.shared_expert."),
)  # fmt: skip
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
        "Qwen2, Qwen2.5", WINDOWS, has_qkv_bias=True, has_o_bias=False,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "LlamaForCausalLM": Architecture("Llama 2 and 3", has_mlp_bias=None, windows="none"),
    "MistralForCausalLM": MISTRAL,
    "Phi3ForCausalLM": Architecture(
        "Phi-3, Phi-3.5 and Phi-4", WINDOWS | {"partial_rotary"}, has_qkv_bias=False, has_o_bias=False, windows="all",
        defaults={"rms_norm_eps": 1e-5}, names=FUSED_NAMES,
    ),
    "CwmForCausalLM": Architecture(
        "CWM", WINDOWS, has_qkv_bias=False, has_o_bias=False, has_mlp_bias=None, windows="after_full",
        defaults={
            "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "sliding_window": 8192, "rope_theta": 1e6,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0,
                "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            },
        },
    ),
    "InternLM3ForCausalLM": Architecture(
        "InternLM 3", has_mlp_bias=None, windows="none",
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2},
        fields={"attention_bias": "qkv_bias", "attention_out_bias": "bias", "mlp_bias": "bias"},
    ),
    "IQuestCoderForCausalLM": Architecture(
        "IQuest-Coder", has_mlp_bias=None, windows="none",
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8},
        fixed={"clip_qkv": None, "use_sliding_window": False},
    ),
    "HeliumForCausalLM": Architecture(
        "Helium", has_o_bias=False, has_mlp_bias=None, windows="none", is_interleaved=True,
        defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128, "num_key_value_heads": 20},
    ),
    "Jais2ForCausalLM": Architecture(
        "Jais 2", has_mlp_bias=None, norm="layer", is_gated=False, windows="none",
        defaults={
            "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-5, "hidden_act": "relu2",
            "intermediate_size": 26624,
        },
        fields={"norm_eps": "layer_norm_eps"}, names=replace(LLAMA_NAMES, gate_up=("mlp.up_proj",)),
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "VaultGemmaForCausalLM": replace(
        GEMMA2, models="VaultGemma", names=replace(LLAMA_NAMES, pre_feedforward_layernorm="pre_feedforward_layernorm"),
    ),
    "GemmaForCausalLM": Architecture(
        "Gemma", norm="rms_offset", windows="none", scales_embedding=True, activation="gelu_tanh",
        defaults={
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256,
        },
        fixed={"use_bidirectional_attention": None, "hidden_act": ("gelu_pytorch_tanh", "gelu")},
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, unread=("vision_tower.", "multi_modal_projector.")),
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Qwen3MoeForCausalLM": Architecture(
        "Qwen3-MoE", WINDOWS, qk_norm="head", experts=ExpertFamily(), windows="opt_in_all",
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "moe_intermediate_size": 768},
    ),
    "MellumForCausalLM": Architecture(
        "Mellum 2",
        WINDOWS,
        qk_norm="head",
        experts=ExpertFamily(),
        windows="last",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
            "max_window_layers": 4096,  # `layer_types` says which layers have a window
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        unread=("mtp.",),
    ),
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(QWEN2_VL, models="Qwen2.5-VL", tower="qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": Architecture(
        "Qwen3-VL", qk_norm="head", windows="none", tower="qwen3_vl", mrope="interleaved",
        defaults={"head_dim": 128, "rope_theta": 5e5, "mrope_section": [24, 20, 20]},
    ),
    "MixtralForCausalLM": Architecture(
        "Mixtral", WINDOWS, has_qkv_bias=False, has_o_bias=False, windows="all",
        experts=ExpertFamily(is_normalized=True),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        fields={"num_experts": "num_local_experts"}, names=MIXTRAL_NAMES,
    ),
    "Olmo2ForCausalLM": Architecture(
        "OLMo 2", qk_norm="projection", has_mlp_bias=False, windows="none", defaults={"rms_norm_eps": 1e-5},
        names=OLMO2_NAMES,
    ),
    "OlmoeForCausalLM": Architecture(
        "OLMoE", qk_norm="projection", windows="none", experts=ExpertFamily(),
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 2048},
        fixed={"clip_qkv": None},
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "Qwen1.5-MoE, Qwen2-MoE", WINDOWS, has_o_bias=False, experts=ExpertFamily(shared="gated"),
        windows="opt_in_even",
        defaults={
            "attention_bias": True, "sliding_window": 4096, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
        fields={"attention_bias": "qkv_bias"}, names=replace(LLAMA_NAMES, shared="mlp.shared_expert."),
    ),
    "Glm4MoeForCausalLM": Architecture(
        "GLM-4.5, GLM-4.6", qk_norm="head", has_o_bias=False, windows="none", experts=DEEPSEEK_EXPERTS, mtp=MtpNames(),
        defaults={
            "use_qk_norm": False, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 8,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
        },
        fields={"num_experts": "n_routed_experts"},
    ),
    "SolarOpenForCausalLM": Architecture(
        "Solar Open", has_o_bias=False, windows="none", experts=DEEPSEEK_EXPERTS,
        defaults={
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "num_key_value_heads": 8, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "n_shared_experts": 1, "norm_topk_prob": True,
        },
        fields={"num_experts": "n_routed_experts"},
    ),
    "Dots1ForCausalLM": Architecture(
        "dots.llm1", WINDOWS, qk_norm="head", windows="last", experts=DEEPSEEK_EXPERTS,
        defaults={"sliding_window": 4096, "max_window_layers": 62, "num_experts": None, "moe_intermediate_size": 1408},
        fields={"num_experts": "n_routed_experts"},
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "MiniMax-M2", qk_norm="projection", has_qkv_bias=False, has_o_bias=False, windows="none",
        experts=ExpertFamily(is_normalized=True, scores="sigmoid", has_correction=True),
        defaults={
            "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8, "num_experts": 256, "num_experts_per_tok": 8,
        },
        fields={"num_experts": "num_local_experts"},
        names=replace(MIXTRAL_NAMES, correction="block_sparse_moe.e_score_correction_bias"),
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(QWEN3_5, tower="qwen3_vl", mrope="interleaved"),
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(QWEN3_5_MOE, tower="qwen3_vl", mrope="interleaved"),
    "Qwen3NextForCausalLM": replace(
        QWEN3_5_MOE, models="Qwen3-Next", experts=ExpertFamily(shared="gated"),
        defaults={**QWEN3_5_MOE.defaults, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        names=QWEN3_NEXT_NAMES,
    ),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": replace(
        LFM2, models="LFM2 with experts", adjusts_inner=False,
        experts=ExpertFamily(scores="sigmoid", has_correction=True),
        defaults={
            "norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "tie_word_embeddings": True,
            "conv_L_cache": 3, "first_k_dense_replace": 2, "num_experts": 32, "num_experts_per_tok": 4,
            "norm_topk_prob": True, "moe_intermediate_size": 1792,
        },
        fields={"first_k_dense_replace": "num_dense_layers"},
        names=replace(
            LFM2_NAMES, router="feed_forward.gate", correction="feed_forward.expert_bias",
            experts="feed_forward.experts.{}.", expert_linears=("w1", "w3", "w2"),
        ),
    ),
    "BambaForCausalLM": Architecture(
        "Bamba", frozenset({"partial_rotary"}), has_mlp_bias=None, windows="none", recurrence="mamba2",
        defaults={**MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        fields={"full_attn_idxs": "attn_layer_indices"}, names=BAMBA_NAMES,
    ),
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": replace(
        GLM, models="GLM-4 (0414)",
        names=replace(
            GLM.names, post_attention_layernorm="post_self_attn_layernorm",
            post_feedforward_layernorm="post_mlp_layernorm",
        ),
    ),
    "Olmo3ForCausalLM": Architecture(
        "OLMo 3", WINDOWS, qk_norm="projection", windows="pattern",
        defaults={
            "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
        },
        names=OLMO2_NAMES,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "SmolLM3", WINDOWS, has_mlp_bias=None, windows="opt_in_unrotated", rotated="listed",
        defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "GraniteForCausalLM": Architecture(
        "Granite 3", has_mlp_bias=None, windows="none", scales_given_embeddings=True, defaults=MULTIPLIERS
    ),
    "HyperCLOVAXForCausalLM": Architecture(
        "HyperCLOVA X SEED",
        frozenset({"attention_scale"}),
        scales_given_embeddings=True,
        has_mlp_bias=None,
        windows="none",
        defaults={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logit_scale": 1.0},
        fixed={"use_post_norm": True},
        fields={"logit_scale": "logits_scaling"},  # multiplies, where Granite divides
        ignored=frozenset({"logits_scaling"}),
        names=replace(LLAMA_NAMES, post_attention_layernorm="post_norm1", post_feedforward_layernorm="post_norm2"),
    ),
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": replace(
        GRANITE_MOE, models="Granite 3 with experts, one of them shared",
        experts=ExpertFamily(is_normalized=True, shared="whole"),
        defaults={**GRANITE_MOE.defaults, "shared_expert_intermediate_size": 0},
        fields={**GRANITE_MOE.fields, "shared_expert_intermediate_size": "shared_intermediate_size"},
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "Granite 4", frozenset({"recurrent", "experts", "shared_experts"}), scales_given_embeddings=True,
        windows="none", experts=ExpertFamily(is_normalized=True, shared="whole"), recurrence="mamba2",
        rotated="embedding_type",
        defaults={
            **MULTIPLIERS, **MAMBA_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 11008,
            "shared_expert_intermediate_size": 1024, "intermediate_size": 1024, "layer_types": [],
        },
        fields={
            "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size",
            "shared_expert_intermediate_size": "shared_intermediate_size",
            "intermediate_size": "shared_intermediate_size",
        },
        names=replace(
            GRANITE_NAMES, gate_up=("shared_mlp.input_linear",), down=("shared_mlp.output_linear",), recurrent=MAMBA,
        ),
    ),
    "FalconH1ForCausalLM": Architecture(
        "Falcon-H1",
        windows="none",
        recurrence="mamba2",
        layers="beside",
        has_factors=True,
        defaults={
            **MAMBA_DEFAULTS, "mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True,
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "embedding_multiplier": 1.0, "logit_scale": 1.0,
        },
        # Factors are multiplied into weights, not into biases
        fixed={"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "projectors_bias": False},
        fields={"logit_scale": "lm_head_multiplier"},
        names=BAMBA_NAMES,
    ),
    "NemotronHForCausalLM": Architecture(
        "Nemotron-H, Nemotron Nano 2 and 3", frozenset({"experts", "shared_experts", "expert_scores"}),
        has_qkv_bias=False, has_o_bias=False, is_gated=False, windows="none", rotated="none", recurrence="mamba2",
        layers="single", experts=DEEPSEEK_EXPERTS,
        defaults={
            **MAMBA_DEFAULTS, "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_head": 64, "norm_eps": 1e-5,
            "head_dim": 128, "num_key_value_heads": 8, "hidden_act": "relu2", "intermediate_size": 21504,
            "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": 7688,
        },
        fixed={
            "mlp_bias": False, "use_bias": False, "mamba_hidden_act": "silu", "moe_latent_size": None,
            "residual_in_fp32": False,
        },
        fields={
            "layer_types": "layers_block_type", "norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts", "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
        },
        unread=("mtp.",), names=NEMOTRON_NAMES,
    ),
    "Ernie4_5ForCausalLM": ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(
        ERNIE, models="ERNIE 4.5, experts",
        experts=ExpertFamily(is_normalized=True, has_correction=True, shared="whole", has_float32_router=True),
        has_qkv_bias=False, has_o_bias=False, has_mlp_bias=False,
        defaults={
            **ERNIE.defaults, "num_key_value_heads": 4, "head_dim": None, "first_k_dense_replace": 1,
            "n_shared_experts": 2, "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
        },
        fixed={"use_bias": False},
        fields={
            "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts", "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        unread=("model.mtp_",), names=replace(LLAMA_NAMES, correction="mlp.moe_statics.e_score_correction_bias"),
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "Hunyuan, dense", qk_norm="head", windows="none", rotates_first=True, defaults={"rms_norm_eps": 1e-5},
        names=replace(LLAMA_NAMES, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    ),
    "SeedOssForCausalLM": Architecture(
        "Seed-OSS", has_mlp_bias=None, windows="none",
        defaults={"attention_bias": True, "attention_out_bias": False, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "Exaone4ForCausalLM": Architecture(
        "EXAONE 4", WINDOWS, qk_norm="head", has_qkv_bias=False, has_o_bias=False, windows="pattern",
        rotated="windows_if_any",
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        names=OLMO2_NAMES,
    ),
    "Ministral3ForCausalLM": replace(
        MISTRAL, models="Ministral 3",
        defaults={
            "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "Mistral3ForConditionalGeneration": replace(
        MISTRAL, models="Mistral Small 3.1 and 3.2, Magistral, Ministral 3, text only",
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8},
        unread=("vision_tower.", "multi_modal_projector."),
    ),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(
        COHERE, models="Command R7B, Command A", may_need=WINDOWS, windows="pattern", rotated="windows",
        defaults={**COHERE.defaults, "rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4}, fixed={},
    ),
    "Starcoder2ForCausalLM": Architecture(
        "StarCoder2", WINDOWS, has_mlp_bias=None, norm="layer", is_gated=False, windows="all",
        defaults={
            "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 12288, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        fields={"attention_bias": "use_bias", "mlp_bias": "use_bias", "norm_eps": "norm_epsilon"},
        names=replace(LLAMA_NAMES, gate_up=("mlp.c_fc",), down=("mlp.c_proj",)),
    ),
    "ArceeForCausalLM": Architecture(
        "AFM (Arcee)", has_mlp_bias=None, is_gated=False, windows="none",
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "intermediate_size": 18432},
        names=replace(LLAMA_NAMES, gate_up=("mlp.up_proj",)),
    ),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "GptOssForCausalLM": Architecture(
        "gpt-oss", WINDOWS, windows="even", experts=ExpertFamily(is_normalized=True), has_expert_bias=True,
        activation="clamped_swiglu",
        defaults={
            "attention_bias": True, "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8,
            "num_experts_per_tok": 4, "num_experts": 128, "sliding_window": 128, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed={"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        fields={"num_experts": "num_local_experts"},
        names=replace(
            LLAMA_NAMES, sinks="self_attn.sinks", router="mlp.router", experts="mlp.experts.",
            expert_linears=("gate_up_proj", "down_proj"), stacked_experts="inputs_first", has_gates_in_turns=True,
        ),
    ),
    "DeepseekV2ForCausalLM": replace(
        DEEPSEEK_V3, models="DeepSeek V2", has_mlp_bias=None,
        experts=ExpertFamily(is_normalized=False, group_best=1, shared="whole", has_float32_router=True),
        defaults={
            **LATENT_SIZES, "q_lora_rank": 1536, "num_experts": 64, "topk_method": "greedy", "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
        },
        fixed={"norm_topk_prob": False, "rope_interleave": True},
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "YoutuForCausalLM": replace(
        DEEPSEEK_V3, models="Youtu-LLM", experts=None, mtp=None,
        defaults={**LATENT_SIZES, "q_lora_rank": 1536, "tie_word_embeddings": True},
    ),
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK_V3, models="GLM-4.7-Flash",
        defaults={
            **LATENT_SIZES, "q_lora_rank": 768, "num_experts": 64, "v_head_dim": 256, "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.8, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        },
    ),
    "GPT2LMHeadModel": Architecture(
        "GPT-2", frozenset({"odd_heads"}), has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, norm="layer",
        is_gated=False, windows="none",
        defaults={"norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}, fields=GPT2_FIELDS,
        names=GPT2_NAMES,
    ),
}  # fmt: skip


ENCODER_DECODER_NAMES = (  # described in encoder_decoder/config.py
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MBartForConditionalGeneration",
    "WhisperForConditionalGeneration",
)
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
        known = (*ARCHITECTURES, *ENCODER_DECODER_NAMES)
        near = [close for name in names for close in get_close_matches(str(name), known)]
        hint = f"the nearest are {', '.join(near)}; " if near else ""
        raise CheckpointError(
            f"architectures: {', '.join(map(str, names)) or 'not set'} is not supported; {hint}docs/models.md lists all"
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
