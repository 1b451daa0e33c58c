"""Values of config.json that no decoder computes are refused by field and value, before any weight is read."""

from __future__ import annotations

import json

import pytest

from tests.unit.engine.models import ARCHITECTURES, make_config
from worker_svc.check_model import check_config
from worker_svc.engine.checkpoint.families import architecture_of
from worker_svc.engine.checkpoint.field_types import LIMITS, TYPE_OF
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.decoder.parse import parse_config

UNKNOWN = {
    "hidden_act": "mish",
    "layer_types": "sparse_attention",
    "mlp_layer_types": "hashed",
}


# By what a field must hold
WRONG = {
    "true or false": ["false", 1.5, [], {}],
    "an integer of 0 or more": ["8", -1, 1.5, True, [8], {}],
    "an integer of -1 or more": ["8", -2, 1.5, []],
    "a number of 0 or more": ["1e-6", -1, float("nan"), float("inf"), True, [], {}],
    "a list of layers": ["01", 1, [-1], ["1"], [None], {"1": 1}],
    "a list of names": ["full_attention", 1, [None], [["dense"]], {}],
    "a list of numbers": ["1.0", 2, ["1.0"], [-1.0], {}],
    "a name": [0, False, {}, ["silu"]],
    "a JSON object": ["yarn", 1, ["yarn"], False],
}


OF_LAYERS = {"layer_types": "full_attention", "mlp_layer_types": "dense"}  # a list, and what the other layers are


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_unknown_value_is_refused(architecture):
    config = make_config(architecture)
    others = parse_config(config).num_layers - 1
    for field, value in UNKNOWN.items():
        given = [*[OF_LAYERS[field]] * others, value] if field in OF_LAYERS else value
        read = architecture_of(config).fields.get(field, field)
        with pytest.raises(CheckpointError, match=f"{field}: '{value}' is not supported"):
            parse_config({**config, read: given})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_field_that_transformers_does_not_read_for_the_class_is_not_read(architecture):
    config = make_config(architecture)
    unread = {"scoring_func": "noaux_tc"}
    unread |= {} if architecture == "deepseek_v2" else {"topk_method": "greedy"}
    unread |= {} if architecture == "granite4" else {"position_embedding_type": "rope_gptj"}
    assert repr(parse_config({**config, **unread})) == repr(parse_config(config))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt2"])
def test_an_unknown_rotation_is_refused(architecture):
    config = make_config(architecture) | {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="rope_type: 'spiral' is not supported"):
        parse_config(config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_value_of_another_type_is_refused(architecture):
    config = make_config(architecture)
    for field, (wanted, _) in TYPE_OF.items():
        for value in WRONG[wanted]:
            with pytest.raises(CheckpointError, match=rf"{field}: "):
                parse_config({**config, field: value})


@pytest.mark.parametrize("field", [name for name, (wanted, _) in TYPE_OF.items() if wanted == "a number of 0 or more"])
@pytest.mark.parametrize("kind", ["rope_parameters", "rope_scaling"])
def test_a_number_of_another_type_in_a_rotation_is_refused(kind, field):
    nested = {"full_attention": {"rope_type": "default", field: "8"}}
    with pytest.raises(CheckpointError, match=rf"{kind}\.full_attention\.{field}: config.json must hold a number"):
        parse_config(make_config("olmo3") | {kind: nested})
    with pytest.raises(CheckpointError, match=rf"{kind}\.{field}: config.json must hold a number"):
        parse_config(make_config("llama") | {kind: nested["full_attention"]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures: config.json must hold a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures: config.json must hold a list of names"),
        ({"architectures": 5}, "architectures: config.json must hold a list of names, found 5"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: config.json must hold true or false, found 'false'"),
    ],
)
def test_a_value_of_another_type_is_refused_before_weights_are_downloaded(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama") | fields))
    with pytest.raises(CheckpointError, match=message):
        check_config(tmp_path)


@pytest.mark.parametrize("field", LIMITS)
def test_a_number_that_no_model_has_is_refused_before_it_takes_memory(field):
    with pytest.raises(CheckpointError, match=rf"{field}: 1000000000000 is above the limit"):
        parse_config(make_config("glm4_moe") | {field: 10**12})


def test_rotations_of_layer_types_apply_before_fields_beside_them():
    # transformers writes such a file for an OLMo 3 that has one rotation
    nested = {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    given, expected = (
        {"rope_parameters": fields | nested} for fields in ({"rope_type": "default", "rope_theta": 1e4}, {})
    )
    found, wanted = (parse_config(make_config("olmo3") | fields).rotaries for fields in (given, expected))
    assert [one.inv_freq.tolist() for one in found] == [one.inv_freq.tolist() for one in wanted]


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "olmo3",
            {"rope_parameters": {"full_attention": None}},
            "rope_parameters.full_attention: config.json must hold an obj",
        ),
        ("olmo3", {"rope_parameters": {"sparse": {"rope_type": "default"}}}, "rope_parameters: 'sparse' is not suppor"),
        ("gemma4", {"per_layer_config": {"x": {}}}, "per_layer_config.x: config.json must hold fields of a layer"),
        ("gemma4", {"per_layer_config": {"1": 8}}, "per_layer_config.1: config.json must hold fields of a layer"),
        ("glm4_moe_lite", {"mlp_layer_types": []}, "mlp_layer_types: 0 entries for 3 layers"),
        ("bamba", {"time_step_limit": [0.1, "x"]}, "time_step_limit: config.json must hold two numbers"),
        ("bamba", {"time_step_limit": 1.0}, "time_step_limit: config.json must hold two numbers"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps: config.json must hold a number of 0 or more, found None"),
        ("deepseek_v2", {"topk_method": "by_token_id"}, "topk_method: 'by_token_id' is not supported"),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not supported"),
        ("glm4_moe", {"n_group": 2}, "n_group: 2 does not divide the 9 experts"),
        ("glm4_moe", {"n_group": 9, "topk_group": 2}, "topk_group: 2 of 9 groups must hold the 3 experts of a token"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act: 'silu' is not supported; only gelu_pytorch_tanh is computed"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm: True is not supported; only False"),
        (
            "deepseek_v3",
            {"q_lora_rank": None, "attention_bias": True},
            "attention_bias: true is not supported without q",
        ),
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
    ],
)
def test_a_value_that_another_model_computes_is_refused(architecture, fields, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(make_config(architecture) | fields)
