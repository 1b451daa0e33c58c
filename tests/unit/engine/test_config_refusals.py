"""Values of config.json that no decoder computes are refused by field and value, before any weight is read."""

from __future__ import annotations

import pytest

from tests.unit.engine.models import ARCHITECTURES, make_config
from worker_svc.engine.checkpoint.features import check_features
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.decoder.parse import parse_config

UNKNOWN = {
    "hidden_act": "mish",
    "layer_types": "sparse_attention",
    "mlp_layer_types": "hashed",
    "position_embedding_type": "alibi",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "by_token_id",
}


OF_LAYERS = {"layer_types": "full_attention", "mlp_layer_types": "dense"}  # a list, and what the other layers are


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_unknown_value_is_refused_whether_or_not_the_architecture_reads_it(architecture):
    config = make_config(architecture)
    others = parse_config(config).num_layers - 1
    for field, value in UNKNOWN.items():
        given = [*[OF_LAYERS[field]] * others, value] if field in OF_LAYERS else value
        with pytest.raises(CheckpointError, match=f"{field}: '{value}' is not supported"):
            parse_config({**config, field: given})


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt2"])
def test_an_unknown_rotation_is_refused(architecture):
    config = make_config(architecture) | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="rope_type: 'spiral' is not supported"):
        parse_config(config)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is computed, found 'softmax'"),
        ("glm4_moe", {"n_group": 2}, "n_group: 2 does not divide the 9 experts"),
        ("glm4_moe", {"n_group": 9, "topk_group": 2}, "topk_group: 2 of 9 groups must hold the 3 experts of a token"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act: 'silu' is not supported; only gelu_pytorch_tanh is computed"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm: True is not supported; only False"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias: False is not supported; only True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported; only None"),
        ("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit: 10.0 is not supported; only 7.0"),
        ("granite4", {"layer_types": ["attention", "conv"]}, "layer_types: 'conv' is not supported"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size: 16 is not supported; only None"),
        ("nemotron_h", {"mlp_hidden_act": "mish"}, "'mish' is not supported"),
        ("nemotron_h", {"layers_block_type": ["mlp", "moe"]}, "layer_types: no layer attends or keeps a state"),
        ("nemotron_h", {"layers_block_type": ["mlp", "sparse"]}, "layer_types: 'sparse' is not supported"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "override_pattern: 'X' is not"),
        ("gemma4", {"enable_moe_block": True}, "num_experts: config.json must hold a positive integer, found None"),
        ("gemma3n", {"altup_active_idx": 3}, "altup_active_idx: 3 is not one of the 3 streams of altup_num_inputs"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 6}, "must hold a share from 0 to below 1 for each of 6"),
        ("gemma3n", {"intermediate_size": [70, 90]}, "intermediate_size: 2 entries for 6 layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all' is not supported"),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers: 6 of 7 layers leave none whose"),
        ("gemma4", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input: 99 is below vocab_size, 211"),
        ("gemma4", {"per_layer_config": {"1": {"mlp_bias": True}}}, "per_layer_config: 'mlp_bias' is not supported"),
        ("falcon_h1", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers: config.json must hold 5 numbers"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "layer_types: 'chunked_attention' is not supported for"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers: 2 entries for 4 layers"),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic' without alpha"),
    ],
)
def test_a_value_that_another_model_computes_is_refused(architecture, fields, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(make_config(architecture) | fields)


@pytest.mark.parametrize(
    ("architecture", "part"),
    [("gemma3n", "several residual streams"), ("gemma4_moe", "experts beside a dense feed-forward part")],
)
def test_a_device_refuses_parts_of_gemma_by_name(architecture, part):
    with pytest.raises(CheckpointError, match=rf"{part}.* which backend cuda does not compute; use --backend cpu"):
        check_features(parse_config(make_config(architecture)).features(), "cuda")
