"""Small random checkpoints of the supported architectures, as transformers writes them.

Linears have unit gain, norms are spread around 1 and q/k norms are large: attention is peaked and logits are wide, so
that a wrong position, page or mask changes them far beyond rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from worker_svc.engine.checkpoint.model_folder import decoder_config

ARCHITECTURES = (
    "qwen3", "qwen2", "llama", "mistral", "phi3", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_moe",
    "qwen3_moe", "mixtral", "olmo2", "gpt2", "qwen2_moe", "glm4_moe", "dots1", "minimax_m2", "glm4", "olmo3",
    "smollm3", "granite", "granite4", "ernie4_5", "ernie4_5_moe", "hunyuan", "seed_oss", "exaone4", "ministral3",
    "mistral3", "cohere2", "starcoder2", "arcee", "llama4", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "glm4_moe_lite", "gemma", "gemma3_vl", "olmoe", "granite_moe", "granite_moe_shared", "cohere", "glm",
    "cwm", "helium", "jais2", "vaultgemma", "mellum", "solar_open", "hyperclovax", "youtu",
)  # fmt: skip

CLASSES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3n": (transformers.Gemma3nTextConfig, transformers.Gemma3nForCausalLM),
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma4_moe": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "bamba": (transformers.BambaConfig, transformers.BambaForCausalLM),
    "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
    "granite_hybrid_moe": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "granite_hybrid": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "granite4": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
    "hunyuan": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
    "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM),
    "arcee": (transformers.ArceeConfig, transformers.ArceeForCausalLM),
    "llama4": (transformers.Llama4TextConfig, transformers.Llama4ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "granite_moe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "granite_moe_shared": (transformers.GraniteMoeSharedConfig, transformers.GraniteMoeSharedForCausalLM),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM),
    "glm": (transformers.GlmConfig, transformers.GlmForCausalLM),
    "lfm2_moe": (transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
    "cwm": (transformers.CwmConfig, transformers.CwmForCausalLM),
    "helium": (transformers.HeliumConfig, transformers.HeliumForCausalLM),
    "jais2": (transformers.Jais2Config, transformers.Jais2ForCausalLM),
    "vaultgemma": (transformers.VaultGemmaConfig, transformers.VaultGemmaForCausalLM),
    "mellum": (transformers.MellumConfig, transformers.MellumForCausalLM),
    "solar_open": (transformers.SolarOpenConfig, transformers.SolarOpenForCausalLM),
    "hyperclovax": (transformers.HyperCLOVAXConfig, transformers.HyperCLOVAXForCausalLM),
    "youtu": (transformers.YoutuConfig, transformers.YoutuForCausalLM),
}

RECURRENT = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "bamba", "granite_hybrid", "granite_hybrid_moe", "falcon_h1",
    "nemotron_h", "lfm2_moe",
)  # fmt: skip
GATED_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
}
GATED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
}

# Fields that differ from DEFAULTS. Windows are short and caps low, so that leaving one out changes the logits.
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0, "head_dim": 16,
               "query_pre_attn_scalar": 40},
    "gemma3": {"sliding_window": 24, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 3,
                  "mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_5": GATED_DELTA,
    "qwen3_5_moe": GATED_DELTA | GATED_EXPERTS,
    "qwen3_next": GATED_DELTA | GATED_EXPERTS,
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
             "block_multiple_of": 40},
    "lfm2_moe": {"num_hidden_layers": 5, "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
                 "num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                 "routed_scaling_factor": 1.4},
    "gemma": {"head_dim": 20, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": 72, "num_attention_heads": 6,
              "num_key_value_heads": 2},
    "granite_moe": {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4,
                    "logits_scaling": 1.3, "num_local_experts": 5, "num_experts_per_tok": 3},
    "cohere": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "logit_scale": 0.3},
    "glm": {"head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": 24,
              "mamba_n_groups": 3, "mamba_d_state": 10, "hidden_size": 72, "mamba_conv_bias": True,
              "num_attention_heads": 6, "num_key_value_heads": 3, "time_step_limit": (0.01, 0.9)},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "n_inner": 96,
             "num_key_value_heads": 4},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 3,
                  "shared_expert_intermediate_size": 64, "mlp_only_layers": [1], "norm_topk_prob": False},
    "glm4_moe": {"n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "head_dim": 20,
                 "moe_intermediate_size": 32, "n_shared_experts": 2, "num_hidden_layers": 3, "use_qk_norm": True,
                 "attention_bias": True, "routed_scaling_factor": 1.7},
    "dots1": {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
              "num_hidden_layers": 3, "first_k_dense_replace": 1, "max_window_layers": 2, "sliding_window": 24},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 20,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm4": {"head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    "olmo3": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 60, "sliding_window": 24,
              "num_hidden_layers": 5},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1], "hidden_size": 72, "num_attention_heads": 6,
                "num_key_value_heads": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4,
                "logits_scaling": 1.3},
    "granite_hybrid": {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4,
                       "logits_scaling": 2.0, "num_local_experts": 0, "shared_intermediate_size": 48,
                       "position_embedding_type": "nope", "num_hidden_layers": 4,
                       "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8,
                       "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2},
    "granite4": {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4,
                 "logits_scaling": 1.3, "num_local_experts": 0, "layer_types": ["attention", "attention"],
                 "shared_intermediate_size": 70, "mamba_n_heads": 8},
    "ernie4_5": {"head_dim": 20, "use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
                     "moe_layer_start_index": 1, "num_hidden_layers": 4, "moe_layer_interval": 2},
    "hunyuan": {"head_dim": 20, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1e4,
                "factor": 1.0}},
    "seed_oss": {"head_dim": 24, "attention_bias": True, "attention_out_bias": False},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 3, "num_hidden_layers": 4, "num_attention_heads": 6,
                "num_key_value_heads": 3, "hidden_size": 60},
    "ministral3": {"head_dim": 20, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0,
                   "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0,
                   "mscale": 1.0, "llama_4_scaling_beta": 0.3}},
    "cohere2": {"sliding_window": 24, "num_hidden_layers": 4, "sliding_window_pattern": 3, "hidden_size": 60,
                "num_attention_heads": 6, "num_key_value_heads": 3},
    "starcoder2": {"sliding_window": 24, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "arcee": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 70,
              "mlp_bias": True},
    "llama4": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "intermediate_size_mlp": 80,
               "moe_layers": [1, 2], "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1],
               "attention_chunk_size": 24, "floor_scale": 16, "head_dim": 20, "attn_scale": 0.4},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48, "sliding_window": 24,
                "head_dim": 20, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
                "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}},
}  # fmt: skip
FIELDS["granite_hybrid_moe"] = FIELDS["granite_hybrid"] | {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "position_embedding_type": "rope",
}
FIELDS["granite_moe_shared"] = FIELDS["granite_moe"] | {"shared_intermediate_size": 70}
FIELDS["gemma3_vl"] = FIELDS["gemma3"]
FIELDS["falcon_h1"] = {
    "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 70,
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10,
    "mamba_rms_norm": True, "lm_head_multiplier": 0.3, "embedding_multiplier": 2.5, "key_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.6], "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 0.9, 1.3, 0.7, 1.1], "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6,
}  # fmt: skip
FIELDS["nemotron_h"] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "mlp"],
    "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 3, "ssm_state_size": 10, "head_dim": 20,
    "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5,
    "moe_shared_expert_intermediate_size": 56,
}  # fmt: skip
FIELDS["gemma4"] = {
    "num_hidden_layers": 7, "sliding_window": 24, "head_dim": 16, "global_head_dim": 40, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 230, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0, "rope_parameters": None, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                    "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
FIELDS["gemma4_moe"] = FIELDS["gemma4"] | {
    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40, "hidden_size": 60,
    "num_attention_heads": 6, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
FIELDS["gemma3n"] = {
    "num_hidden_layers": 6, "sliding_window": 24, "head_dim": 20, "hidden_size": 60, "num_attention_heads": 6,
    "num_key_value_heads": 3, "intermediate_size": [70, 90, 70, 80, 70, 66], "hidden_size_per_layer_input": 18,
    "vocab_size_per_layer_input": 200, "num_kv_shared_layers": 2, "altup_num_inputs": 3, "altup_active_idx": 1,
    "laurel_rank": 14, "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0, 0.8, 0.0], "tie_word_embeddings": True,
    "final_logit_softcapping": 3.0, "rope_parameters": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                    "full_attention", "sliding_attention"],
}  # fmt: skip
FIELDS |= {
    "cwm": {"sliding_window": 24, "num_hidden_layers": 3, "head_dim": 20},
    "helium": {"head_dim": 20, "hidden_size": 120, "num_attention_heads": 6, "num_key_value_heads": 3},
    "jais2": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    "vaultgemma": FIELDS["gemma2"],
    "mellum": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 20,
        "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": None,
    },
    "solar_open": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 20},
    "hyperclovax": FIELDS["granite"],
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
# No number divides another, and a latent does not fill whole vectors.
LATENTS = {"kv_lora_rank": 27, "qk_rope_head_dim": 10, "qk_nope_head_dim": 14, "v_head_dim": 18, "hidden_size": 60,
           "num_attention_heads": 5, "num_key_value_heads": 5, "num_hidden_layers": 3, "num_experts_per_tok": 3,
           "moe_intermediate_size": 32}  # fmt: skip
FIELDS |= {
    "deepseek_v2": LATENTS
    | {
        "kv_lora_rank": 26,
        "q_lora_rank": None,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_method": "group_limited_greedy",
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
    },
    "deepseek_v3": LATENTS
    | {
        "q_lora_rank": 22,
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "rope_parameters": YARN,
        "first_k_dense_replace": 1,
    },
    "youtu": LATENTS | {"q_lora_rank": 22, "rope_parameters": YARN, "pad_token_id": None},
    "glm4_moe_lite": LATENTS | {"q_lora_rank": 30, "n_routed_experts": 5, "rope_interleave": False},
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def make_model(
    folder: Path,
    architecture: str = "qwen3",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Writes a checkpoint to `folder` and returns it. `overrides` are fields of the architecture's config."""
    torch.manual_seed(seed)
    model = CLASSES[architecture][1](_config(architecture, overrides))
    randomize(model, torch.Generator().manual_seed(seed))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _mistral3_config(**fields: Any) -> transformers.Mistral3Config:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Mistral3Config(
        text_config={"model_type": "mistral", "sliding_window": None, **fields},
        vision_config={"model_type": "pixtral", "head_dim": 8, "image_size": 28, "patch_size": 14, **tower},
        tie_word_embeddings=fields["tie_word_embeddings"],
    )


def _gemma3_config(**fields: Any) -> transformers.Gemma3Config:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=fields,
        vision_config={"image_size": 28, "patch_size": 14, **tower},
        mm_tokens_per_image=4,
        tie_word_embeddings=fields["tie_word_embeddings"],
    )


CLASSES["gemma3_vl"] = (_gemma3_config, transformers.Gemma3ForConditionalGeneration)
CLASSES["mistral3"] = (_mistral3_config, transformers.Mistral3ForConditionalGeneration)


def make_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """The fields of a checkpoint's config.json that describe the decoder."""
    config = _config(architecture, overrides).to_dict()
    return decoder_config(config | {"architectures": [CLASSES[architecture][1].__name__]})


def _config(architecture: str, overrides: dict[str, Any]) -> transformers.PreTrainedConfig:
    fields = DEFAULTS | FIELDS.get(architecture, {}) | overrides
    if "head_dim" not in fields and architecture in ("qwen3", "mistral", "qwen3_moe", "mixtral"):
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return CLASSES[architecture][0](**fields)


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The checkpoint as transformers runs it; gated delta nets token by token, which is its more precise form."""
    for module in (qwen3_5, qwen3_5_moe, qwen3_next):
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.uniform_(1.0, 2.0, generator=generator)
            if model.config.model_type in ("gemma3n_text", "gemma4_text"):  # whose attention has no other scale
                parameter.mul_(parameter.shape[0] ** -0.25)
        elif "norm" in name or ".ln_" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("sinks"):
            parameter.normal_(0.0, 2.0, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.5, generator=generator)
        elif "embed_tokens" in name or ".wte." in name or ".wpe." in name:
            parameter.normal_(0.0, 1.0, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)
        if name.endswith(("correction_bias", "expert_bias")):  # made as wide as the scores, which changes the choice
            buffer.normal_(0.0, 0.3, generator=generator)
    if model.config.tie_word_embeddings:  # the head has unit gain too
        embedding = model.get_input_embeddings().weight
        embedding.mul_(embedding.shape[1] ** -0.5)
