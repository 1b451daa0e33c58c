"""The types of the fields of config.json that decoders read. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from worker_svc.engine.checkpoint.model_folder import CheckpointError


def _is_flag(value: object) -> bool:
    return isinstance(value, int)  # Llama 4 has a number for true


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_end(value: object) -> bool:
    return value == -1 or _is_count(value)


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_list_of(is_entry: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(is_entry, value))


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


# What a field must hold, a test of its value, and the names of such fields in config.json
TYPES: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "true or false",
        _is_flag,
        "altup_correct_scale attention_bias attention_k_eq_v attention_out_bias attn_temperature_tuning "
        "block_auto_adjust_ff_dim conv_bias enable_moe_block mamba_conv_bias mamba_norm_before_gate mamba_proj_bias "
        "mamba_rms_norm mlp_bias norm_topk_prob qkv_bias rope_interleave tie_word_embeddings truncate use_bias "
        "use_conv_bias use_double_wide_mlp use_qk_norm use_sliding_window",
    ),
    (
        "an integer of 0 or more",
        _is_count,
        "decoder_sparse_step first_k_dense_replace hidden_size_per_layer_input interleave_moe_layer_step "
        "max_position_embeddings max_window_layers moe_intermediate_size moe_layer_interval moe_layer_start_index "
        "moe_num_experts moe_num_shared_experts n_shared_experts num_dense_layers num_experts num_key_value_heads "
        "num_kv_shared_layers num_local_experts num_mtp_layers num_nextn_predict_layers "
        "shared_expert_intermediate_size shared_intermediate_size vocab_size_per_layer_input",
    ),
    ("an integer of -1 or more", _is_end, "moe_layer_end_index"),
    (
        "a number of 0 or more",
        _is_amount,
        "alpha attention_factor attention_in_multiplier attention_multiplier attention_out_multiplier "
        "attn_logit_softcapping attn_scale beta_fast beta_slow embedding_multiplier factor final_logit_softcapping "
        "high_freq_factor key_multiplier layer_norm_eps layer_norm_epsilon llama_4_scaling_beta lm_head_multiplier "
        "logit_scale logits_scaling low_freq_factor mamba_expand mscale mscale_all_dim norm_eps norm_epsilon "
        "original_max_position_embeddings partial_rotary_factor query_pre_attn_scalar residual_multiplier rms_norm_eps "
        "rope_local_base_freq rope_theta rotary_dim routed_scaling_factor ssm_in_multiplier ssm_out_multiplier",
    ),
    (
        "a list of layers",
        _is_list_of(_is_count),
        "attn_layer_indices full_attn_idxs mlp_only_layers moe_layers no_rope_layers",
    ),
    ("a list of names", _is_list_of(_is_name), "layer_types layers_block_type mlp_layer_types"),
    ("a list of numbers", _is_list_of(_is_amount), "mlp_multipliers ssm_multipliers"),
    (
        "a name",
        _is_name,
        "activation_function hidden_act hidden_activation hybrid_override_pattern mlp_hidden_act "
        "position_embedding_type rope_type scoring_func topk_method type",
    ),
    ("a JSON object", _is_object, "per_layer_config rope_parameters rope_scaling"),
)
TYPE_OF = {field: (name, is_valid) for name, is_valid, fields in TYPES for field in fields.split()}
# Far above all models. Parsing a configuration takes memory in proportion to these numbers
LIMITS = (
    dict.fromkeys(["num_hidden_layers", "n_layer", "num_nextn_predict_layers", "num_mtp_layers"], 4096)
    | dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "head_dim"], 65536)
    | dict.fromkeys(["hidden_size", "n_embd", "qk_rope_head_dim", "global_head_dim"], 1 << 20)
)
ROPES = ("rope_parameters", "rope_scaling")


def check_types(config: Mapping[str, Any], within: str = "") -> None:
    """Raises CheckpointError for a field of another type than it has, whether the architecture reads it or not. Missing
    and null are valid here."""
    for field, value in config.items():
        wanted, is_valid = TYPE_OF.get(field, ("", None))
        if value is not None and is_valid is not None and not is_valid(value):
            raise CheckpointError(f"{within}{field}: config.json must hold {wanted}, found {value!r}")
        limit = LIMITS.get(field)
        if limit is not None and isinstance(value, int) and value > limit:
            raise CheckpointError(f"{within}{field}: {value} is above the limit, {limit}")
        if isinstance(value, dict) and (within or field in ROPES):  # one rotation, or one for each type of layer
            check_types(value, f"{within}{field}.")
