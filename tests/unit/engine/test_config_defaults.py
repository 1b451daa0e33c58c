"""A field that config.json lacks means what transformers takes it to mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import transformers

from worker_svc.engine.checkpoint.families import ARCHITECTURES
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.parse import parse_config
from worker_svc.engine.decoder.rotary import length_choice
from worker_svc.engine.encoder.config import EncoderConfig, parse_encoder
from worker_svc.engine.encoder.families import ENCODERS, encoder_of
from worker_svc.engine.encoder_decoder.config import ENCODER_DECODERS, EncoderDecoderConfig, parse_encoder_decoder

CONFIGS = {
    "Qwen3ForCausalLM": transformers.Qwen3Config, "Qwen2ForCausalLM": transformers.Qwen2Config,
    "LlamaForCausalLM": transformers.LlamaConfig, "MistralForCausalLM": transformers.MistralConfig,
    "Phi3ForCausalLM": transformers.Phi3Config, "Gemma2ForCausalLM": transformers.Gemma2Config,
    "GemmaForCausalLM": transformers.GemmaConfig, "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
    "OlmoeForCausalLM": transformers.OlmoeConfig, "GraniteMoeForCausalLM": transformers.GraniteMoeConfig,
    "GraniteMoeSharedForCausalLM": transformers.GraniteMoeSharedConfig, "CohereForCausalLM": transformers.CohereConfig,
    "GlmForCausalLM": transformers.GlmConfig, "Lfm2MoeForCausalLM": transformers.Lfm2MoeConfig,
    "Gemma3nForCausalLM": transformers.Gemma3nTextConfig, "Gemma4ForCausalLM": transformers.Gemma4TextConfig,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig, "MixtralForCausalLM": transformers.MixtralConfig,
    "Olmo2ForCausalLM": transformers.Olmo2Config, "GPT2LMHeadModel": transformers.GPT2Config,
    "Qwen2MoeForCausalLM": transformers.Qwen2MoeConfig, "Glm4MoeForCausalLM": transformers.Glm4MoeConfig,
    "Dots1ForCausalLM": transformers.Dots1Config, "MiniMaxM2ForCausalLM": transformers.MiniMaxM2Config,
    "Glm4ForCausalLM": transformers.Glm4Config, "Olmo3ForCausalLM": transformers.Olmo3Config,
    "SmolLM3ForCausalLM": transformers.SmolLM3Config, "GraniteForCausalLM": transformers.GraniteConfig,
    "GraniteMoeHybridForCausalLM": transformers.GraniteMoeHybridConfig,
    "Ernie4_5ForCausalLM": transformers.Ernie4_5Config, "Ernie4_5_MoeForCausalLM": transformers.Ernie4_5_MoeConfig,
    "HunYuanDenseV1ForCausalLM": transformers.HunYuanDenseV1Config, "SeedOssForCausalLM": transformers.SeedOssConfig,
    "Exaone4ForCausalLM": transformers.Exaone4Config, "Ministral3ForCausalLM": transformers.Ministral3Config,
    "Cohere2ForCausalLM": transformers.Cohere2Config, "Starcoder2ForCausalLM": transformers.Starcoder2Config,
    "ArceeForCausalLM": transformers.ArceeConfig, "Llama4ForCausalLM": transformers.Llama4TextConfig,
    "GptOssForCausalLM": transformers.GptOssConfig, "Qwen3_5ForCausalLM": transformers.Qwen3_5TextConfig,
    "Qwen3_5MoeForCausalLM": transformers.Qwen3_5MoeTextConfig, "Qwen3NextForCausalLM": transformers.Qwen3NextConfig,
    "Lfm2ForCausalLM": transformers.Lfm2Config, "FalconH1ForCausalLM": transformers.FalconH1Config,
    "NemotronHForCausalLM": transformers.NemotronHConfig, "BambaForCausalLM": transformers.BambaConfig,
    "DeepseekV2ForCausalLM": transformers.DeepseekV2Config, "DeepseekV3ForCausalLM": transformers.DeepseekV3Config,
    "Glm4MoeLiteForCausalLM": transformers.Glm4MoeLiteConfig, "InternLM3ForCausalLM": transformers.InternLM3Config,
    "IQuestCoderForCausalLM": transformers.IQuestCoderConfig, "CwmForCausalLM": transformers.CwmConfig,
    "HeliumForCausalLM": transformers.HeliumConfig, "Jais2ForCausalLM": transformers.Jais2Config,
    "VaultGemmaForCausalLM": transformers.VaultGemmaConfig, "MellumForCausalLM": transformers.MellumConfig,
    "SolarOpenForCausalLM": transformers.SolarOpenConfig, "HyperCLOVAXForCausalLM": transformers.HyperCLOVAXConfig,
    "YoutuForCausalLM": transformers.YoutuConfig,
}  # fmt: skip
# Fields without which transformers has no such model.
NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "BambaForCausalLM": {"attn_layer_indices": [3, 9]},
    "Glm4MoeForCausalLM": {"num_attention_heads": 32},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 32},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
}
# Their towers describe other classes; the text part has the defaults of these.
WITH_TOWERS = {
    "Qwen2VLForConditionalGeneration": transformers.Qwen2VLTextConfig,
    "Qwen2_5_VLForConditionalGeneration": transformers.Qwen2_5_VLTextConfig,
    "Qwen3VLForConditionalGeneration": transformers.Qwen3VLTextConfig,
    "Qwen3_5ForConditionalGeneration": transformers.Qwen3_5TextConfig,
    "Qwen3_5MoeForConditionalGeneration": transformers.Qwen3_5MoeTextConfig,
    "Llama4ForConditionalGeneration": transformers.Llama4TextConfig,
    "Mistral3ForConditionalGeneration": transformers.MistralConfig,
    "Gemma3ForConditionalGeneration": transformers.Gemma3TextConfig,
    "Gemma3nForConditionalGeneration": transformers.Gemma3nTextConfig,
    "Gemma4ForConditionalGeneration": transformers.Gemma4TextConfig,
}


def test_every_family_is_compared() -> None:
    assert CONFIGS.keys() | WITH_TOWERS.keys() == ARCHITECTURES.keys()
    assert {name.removesuffix("Model") for name in ENCODER_CONFIGS} == ENCODERS.keys()
    assert ENCODER_DECODER_CONFIGS.keys() == ENCODER_DECODERS.keys()


# Sizes that are not the defaults, so that no default follows from another field by chance.
ENCODER_CONFIGS = {
    "BertModel": transformers.BertConfig(hidden_size=96, num_attention_heads=4, layer_norm_eps=1e-3, type_vocab_size=5),
    "RobertaModel": transformers.RobertaConfig(hidden_size=96, num_attention_heads=4, pad_token_id=7),
    "XLMRobertaModel": transformers.XLMRobertaConfig(hidden_size=96, num_attention_heads=4, pad_token_id=7),
    "ModernBertModel": transformers.ModernBertConfig(
        hidden_size=96, num_attention_heads=4, norm_eps=1e-3, local_attention=32, norm_bias=True, mlp_bias=True
    ),
}
_BART = {"d_model": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 3}
ENCODER_DECODER_CONFIGS = {
    "T5ForConditionalGeneration": transformers.T5Config(
        d_model=96, d_kv=20, num_heads=4, num_layers=4, num_decoder_layers=3, feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=16, relative_attention_max_distance=64, layer_norm_epsilon=1e-3, n_positions=99,
    ),
    "BartForConditionalGeneration": transformers.BartConfig(**_BART, scale_embedding=True),
    "MBartForConditionalGeneration": transformers.MBartConfig(**_BART, activation_function="relu"),
    "WhisperForConditionalGeneration": transformers.WhisperConfig(**_BART, num_mel_bins=32),
}  # fmt: skip


def comparable(config: ModelConfig) -> tuple[Any, ...]:
    """The configuration without tensors."""
    rotaries = [
        (r.inv_freq.tolist(), r.factor, None if r.axes is None else r.axes.tolist(), r.original_length, r.q_scaling)
        for r in config.rotaries
    ]
    layers = [
        (replace(layer, rotary=None), None if layer.rotary is None else rotaries[layer.rotary])
        for layer in config.layers
    ]
    return replace(config, rotaries=(), layers=()), layers


def parse_whole_encoder(fields: dict[str, Any]) -> EncoderConfig:
    family = encoder_of(fields)
    assert family is not None
    return parse_encoder(fields, family, 3)


def comparable_rotaries(config: EncoderConfig | EncoderDecoderConfig) -> tuple[Any, ...]:
    if not isinstance(config, EncoderConfig):
        return config, ()
    return replace(config, rotaries=()), [rotary.inv_freq.tolist() for rotary in config.rotaries]


@contextmanager
def named(*fields: str) -> Iterator[None]:
    """Accepts a refusal that names one of the fields."""
    try:
        yield
    except CheckpointError as error:
        if str(error).partition(":")[0] not in fields:
            raise


def parse(architecture: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    return comparable(parse_config(fields | {"architectures": [architecture]}))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "sliding_window": 16}], ids=["plain", "windows"])
def test_a_missing_field_has_the_default_of_transformers(name: str, changes: dict[str, Any]) -> None:
    """The configuration is the same as with the default, or the missing field is named."""
    if changes and name == "IQuestCoderForCausalLM":
        pytest.skip("transformers refuses its windows too")
    whole = CONFIGS[name](**NEEDED.get(name, {}), **changes).to_dict()
    for field in whole:
        rest = {key: value for key, value in whole.items() if key != field}
        ours = {theirs: ours for ours, theirs in ARCHITECTURES[name].fields.items()}.get(field, field)
        found = None
        with named(field, ours):
            found = parse(name, rest)
        if found is not None:
            assert found == parse(name, CONFIGS[name].from_dict(rest).to_dict()), field


OTHERS = {name: (config, parse_whole_encoder) for name, config in ENCODER_CONFIGS.items()} | {
    name: (config, parse_encoder_decoder) for name, config in ENCODER_DECODER_CONFIGS.items()
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_field_of_a_model_with_an_encoder_has_the_default_of_transformers(name: str) -> None:
    config, parse_fields = OTHERS[name]
    whole = config.to_dict() | {"architectures": [name]}
    for field in whole.keys() - {"architectures"}:
        rest = {key: value for key, value in whole.items() if key != field}
        found = None
        with named(field):
            found = comparable_rotaries(parse_fields(rest))
        if found is not None:
            assert found == comparable_rotaries(parse_fields(type(config).from_dict(rest).to_dict())), field


def test_positions_after_padding_need_its_id() -> None:
    config = ENCODER_CONFIGS["RobertaModel"].to_dict() | {"architectures": ["RobertaModel"], "pad_token_id": None}
    with pytest.raises(CheckpointError, match=r"^pad_token_id: positions begin after it"):
        parse_whole_encoder(config)


def test_qwen3_moe_has_windows_in_all_layers() -> None:
    """transformers reads no max_window_layers for it."""
    config = transformers.Qwen3MoeConfig(use_sliding_window=True, sliding_window=16).to_dict()
    parsed = parse_config(config | {"architectures": ["Qwen3MoeForCausalLM"], "max_window_layers": 4})
    assert {layer.window for layer in parsed.layers} == {16}


def test_gemma_has_the_tanh_form_of_gelu_under_either_name() -> None:
    folders = [transformers.GemmaConfig().to_dict() | {"hidden_act": name} for name in ("gelu", "gelu_pytorch_tanh")]
    assert parse("GemmaForCausalLM", folders[0]) == parse("GemmaForCausalLM", folders[1])


def test_gemma3_has_no_cap_of_scores() -> None:
    config = transformers.Gemma3TextConfig().to_dict() | {"attn_logit_softcapping": 50.0}
    assert parse_config(config | {"architectures": ["Gemma3ForCausalLM"]}).attention_soft_cap is None


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("GPT2LMHeadModel", "scale_attn_by_inverse_layer_idx", True),
        ("GPT2LMHeadModel", "scale_attn_weights", False),
        ("Gemma2ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma3ForCausalLM", "use_bidirectional_attention", True),
    ],
)
def test_a_field_that_changes_the_result_is_refused_by_name(name: str, field: str, value: bool) -> None:
    config = CONFIGS[name]().to_dict() | {"architectures": [name], field: value}
    with pytest.raises(CheckpointError, match=f"^{field}: {value} is not supported; only {not value} is computed$"):
        parse_config(config)


def test_a_choice_by_the_maximum_length_is_part_of_the_revision() -> None:
    """Two workers whose pools differ may choose other factors of LongRoPE, and so give other tokens."""
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {"rope_scaling": rope, "original_max_position_embeddings": 4096}
    assert [length_choice(config, length) for length in (4096, 4097)] == ["short", "long"]
    assert length_choice({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4097) == ""
    assert length_choice({}, 4097) == ""
