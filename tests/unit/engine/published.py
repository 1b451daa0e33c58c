# ruff: noqa: E501  a table: a row of it is read as a whole
"""The published configuration and tensors of one model per row of docs/models.md.

`config` has the fields of config.json that a loader may read, as public copies spell them; `is_derived` rows have
the defaults of the class and the tensor names of its converter instead, because no published copy was at hand. Sizes
are published ones: `small_config` divides them, and `tensors` gives the shapes for them.

Shapes are written in symbols: V vocabulary, H hidden, I inner, M inner of experts, E experts, Q, K, D heads; others stand
in `sizes` of the row. `3*H` and `Q+K` are computed. Types are bfloat16 unless a name ends in another: `A_log :f32`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL: dict[str, int] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "top_k_experts": 2, "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 32, "intermediate_size_mlp": 80, "attention_chunk_size": 32,
    "n_embd": 64, "n_head": 4, "n_positions": 512, "n_ctx": 512, "block_ff_dim": 96,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "global_head_dim": 32, "laurel_rank": 16,
    "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_source_positions": 40, "max_target_positions": 448,
    "image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53,
    "vision_token_id": 54, "image_token_index": 50, "embed_dim": 32, "depth": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
LAYER_COUNTS = {"num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"}
OF_LAYERS = {"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "activation_sparsity_pattern",
             "attn_type_list"}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One model."""

    model: str
    config: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, ...]]  # by kind of layer; "": of no layer, "*": of every layer
    kinds: Mapping[str, range | list[int]] = field(default_factory=dict)  # the layers of each kind
    layers: int = 4  # number of layers in small
    small: Mapping[str, Any] = field(default_factory=dict)  # other small values
    sizes: Mapping[str, int] = field(default_factory=dict)  # further symbols
    is_derived: bool = False
    has_reference: bool = True  # transformers loads it: it has the class, and no tower is only hinted at

    def small_config(self) -> dict[str, Any]:
        """The configuration with small sizes."""
        return self._shrunk(self.config)

    def _shrunk(self, config: Mapping[str, Any]) -> dict[str, Any]:
        heads = config.get("num_attention_heads")
        found: dict[str, Any] = {}
        for name, value in config.items():
            if name in self.small:
                found[name] = self.small[name]
            elif value == 0:
                found[name] = value
            elif name in ("rope_scaling", "rope_parameters") and isinstance(value, Mapping):
                found[name] = {**value, **{one: self.small[one] for one in value if one in self.small}}
            elif isinstance(value, Mapping) and name != "quantization_config":
                found[name] = self._shrunk(value)
            elif name in LAYER_COUNTS:
                found[name] = self.layers
            elif name in OF_LAYERS and isinstance(value, list):
                found[name] = value[: self.layers]
            elif name == "num_key_value_heads" and isinstance(value, int):
                found[name] = 4 if value == heads else min(value, 2)
            elif name in SMALL and isinstance(value, int):
                found[name] = SMALL[name]
            elif name in ("n_group", "topk_group") and isinstance(value, int):
                found[name] = 1 if value == 1 or name == "topk_group" else 2
            else:
                found[name] = value
        return found

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, small shape and type of each tensor."""
        config = self.small_config()
        text = {**config, **config.get("text_config", {})}
        heads, dim = text.get("num_attention_heads", 4), text.get("head_dim") or 16
        symbols = {
            "V": 96, "H": 64, "I": 96, "M": 32, "E": 4, "D": dim, "Q": heads * dim,
            "K": (text.get("num_key_value_heads") or heads) * dim, "S": 48, **self.sizes,
        }  # fmt: skip
        for kind, patterns in self.tensors.items():
            layers = range(self.layers) if kind == "*" else self.kinds.get(kind, [0])
            for layer in layers:
                for pattern in patterns:
                    yield from _expanded(pattern.replace("{l}", str(layer)), symbols)


def _expanded(pattern: str, symbols: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    name, _, rest = pattern.partition(" ")
    shape, _, dtype = rest.partition(":")
    sizes = tuple(int(eval(size, {}, dict(symbols))) for size in shape.split(",")) if shape.strip() else ()
    for expert in range(symbols["E"]) if "{e}" in name else [0]:
        yield name.replace("{e}", str(expert)), sizes, dtype.strip() or "bf16"


def under(prefix: str, *groups: tuple[str, ...]) -> tuple[str, ...]:
    """The names of tensors with a prefix."""
    return tuple(prefix + name for group in groups for name in group)


L = "model.layers.{l}."
TOP = ("model.embed_tokens.weight V,H", "model.norm.weight H")
HEAD = ("lm_head.weight V,H",)
NORMS = ("input_layernorm.weight H", "post_attention_layernorm.weight H")
ATTENTION = tuple(
    f"self_attn.{s}" for s in ("q_proj.weight Q,H", "k_proj.weight K,H", "v_proj.weight K,H", "o_proj.weight H,Q")
)
QKV_BIAS = ("self_attn.q_proj.bias Q", "self_attn.k_proj.bias K", "self_attn.v_proj.bias K")
QK_NORMS = ("self_attn.q_norm.weight D", "self_attn.k_norm.weight D")
WIDE_QK_NORMS = ("self_attn.q_norm.weight Q", "self_attn.k_norm.weight K")
MLP = ("mlp.gate_proj.weight I,H", "mlp.up_proj.weight I,H", "mlp.down_proj.weight H,I")
LLAMA = {"": TOP + HEAD, "*": under(L, NORMS, ATTENTION, MLP)}
TIED = {**LLAMA, "": TOP}
ROUTER = ("mlp.gate.weight E,H",)
CORRECTION = ("mlp.gate.e_score_correction_bias E:f32",)
EXPERTS = ("mlp.experts.{e}.gate_proj.weight M,H", "mlp.experts.{e}.up_proj.weight M,H",
           "mlp.experts.{e}.down_proj.weight H,M")  # fmt: skip
STACKED = ("mlp.experts.gate_up_proj E,2*M,H", "mlp.experts.down_proj E,H,M")
SHARED = ("mlp.shared_experts.gate_proj.weight S,H", "mlp.shared_experts.up_proj.weight S,H",
          "mlp.shared_experts.down_proj.weight H,S")  # fmt: skip
SHARED_EXPERT = (
    *(name.replace("shared_experts", "shared_expert") for name in SHARED),
    "mlp.shared_expert_gate.weight 1,H",
)
GEMMA_NORMS = (*NORMS, "pre_feedforward_layernorm.weight H", "post_feedforward_layernorm.weight H")
POST_NORMS = ("post_attention_layernorm.weight H", "post_feedforward_layernorm.weight H")
MLA = ("self_attn.kv_a_proj_with_mqa.weight R+8,H", "self_attn.kv_a_layernorm.weight R",
       "self_attn.kv_b_proj.weight 4*32,R", "self_attn.o_proj.weight H,4*16")  # fmt: skip
MLA_QUERIES = (
    "self_attn.q_a_proj.weight 24,H",
    "self_attn.q_a_layernorm.weight 24",
    "self_attn.q_b_proj.weight 4*24,24",
)
GATED_DELTA = tuple(
    f"linear_attn.{s}"
    for s in ("in_proj_qkv.weight 2*32+64,H", "in_proj_z.weight 64,H", "in_proj_b.weight 4,H", "in_proj_a.weight 4,H",
              "conv1d.weight 2*32+64,1,4", "dt_bias 4", "A_log 4", "norm.weight 16", "out_proj.weight H,64")
)  # fmt: skip
GATED_ATTENTION = ("self_attn.q_proj.weight 2*Q,H", *ATTENTION[1:], *QK_NORMS)
MAMBA = tuple(
    f"mamba.{s}"
    for s in ("in_proj.weight 2*128+2*16+8,H", "conv1d.weight 128+2*16,1,4", "conv1d.bias 128+2*16", "dt_bias 8",
              "A_log 8", "D 8", "norm.weight 128", "out_proj.weight H,128")
)  # fmt: skip
FED = ("feed_forward.gate_proj.weight I,H", "feed_forward.up_proj.weight I,H", "feed_forward.down_proj.weight H,I")


def llama(model: str, architecture: str, config: dict[str, Any], *more: tuple[str, ...], top: tuple[str, ...] = TOP + HEAD,
          norms: tuple[str, ...] = NORMS, mlp: tuple[str, ...] = MLP, **facts: Any) -> Published:  # fmt: skip
    """A dense model with Llama's names."""
    tensors = {"": top, "*": under(L, norms, ATTENTION, mlp, *more)}
    return Published(model, {"architectures": [architecture], **config}, tensors, **facts)


def dense(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, length: int, **more: Any
) -> dict[str, Any]:
    """The sizes that every decoder has."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": length, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def sparse(first_dense: int, *shared: tuple[str, ...], attention: tuple[tuple[str, ...], ...] = (ATTENTION,),
           experts: tuple[str, ...] = EXPERTS, top: tuple[str, ...] = TOP + HEAD, correction: tuple[str, ...] = CORRECTION,
           ) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """The tensors of a model with experts, and `dense` and `moe` layers."""
    moe = under(L, ROUTER, correction, experts, *shared)
    found = {"": top, "*": under(L, NORMS, *attention), "moe": moe}
    return {**found, "dense": under(L, MLP)} if first_dense else found


QWEN3_5_TEXT = dense(
    2048, 512, 40, 16, 2, 248320, 262144, model_type="qwen3_5_moe_text", head_dim=256, attention_bias=False,
    attn_output_gate=True, full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, mamba_ssm_dtype="float32",
    moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8, shared_expert_intermediate_size=512,
    mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, router_aux_loss_coef=0.001,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
    rope_parameters={"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                     "rope_theta": 10000000, "partial_rotary_factor": 0.25},
)  # fmt: skip
QWEN3_5_SMALL = {"head_dim": 64, "mrope_section": [3, 3, 2]}
QWEN3_5_KINDS = {"linear": [0, 1, 2], "full": [3]}
VISION_3 = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
}  # fmt: skip
TOWER_3 = ("patch_embed.proj.weight 64,3,2,16,16", "patch_embed.proj.bias 64", "pos_embed.weight 16,64",
           "merger.norm.weight 64", "merger.norm.bias 64", "merger.linear_fc1.weight 256,256", "merger.linear_fc1.bias 256",
           "merger.linear_fc2.weight 64,256", "merger.linear_fc2.bias 64")  # fmt: skip
TOWER_BLOCKS_3 = tuple(
    f"blocks.{block}.{s}" for block in (0, 1)
    for s in ("norm1.weight 64", "norm1.bias 64", "norm2.weight 64", "norm2.bias 64", "attn.qkv.weight 192,64",
              "attn.qkv.bias 192", "attn.proj.weight 64,64", "attn.proj.bias 64", "mlp.linear_fc1.weight 96,64",
              "mlp.linear_fc1.bias 96", "mlp.linear_fc2.weight 64,96", "mlp.linear_fc2.bias 64")
)  # fmt: skip
TOWER_2 = ("patch_embed.proj.weight 32,3,2,14,14", "merger.ln_q.weight 32", "merger.ln_q.bias 32",
           "merger.mlp.0.weight 128,128", "merger.mlp.0.bias 128", "merger.mlp.2.weight 64,128", "merger.mlp.2.bias 64",
           *(f"blocks.{block}.{s}" for block in (0, 1)
             for s in ("norm1.weight 32", "norm1.bias 32", "norm2.weight 32", "norm2.bias 32", "attn.qkv.weight 96,32",
                       "attn.qkv.bias 96", "attn.proj.weight 32,32", "attn.proj.bias 32", "mlp.fc1.weight 128,32",
                       "mlp.fc1.bias 128", "mlp.fc2.weight 32,128", "mlp.fc2.bias 32")))  # fmt: skip
TOWER_2_5 = ("patch_embed.proj.weight 64,3,2,14,14", "merger.ln_q.weight 64", "merger.mlp.0.weight 256,256",
             "merger.mlp.0.bias 256", "merger.mlp.2.weight 64,256", "merger.mlp.2.bias 64",
             *(f"blocks.{block}.{s}" for block in (0, 1)
               for s in ("norm1.weight 64", "norm2.weight 64", "attn.qkv.weight 192,64", "attn.qkv.bias 192",
                         "attn.proj.weight 64,64", "attn.proj.bias 64", "mlp.gate_proj.weight 96,64", "mlp.gate_proj.bias 96",
                         "mlp.up_proj.weight 96,64", "mlp.up_proj.bias 96", "mlp.down_proj.weight 64,96",
                         "mlp.down_proj.bias 64")))  # fmt: skip


def qwen3_5(model: str, architecture: str, nested: str, *mlp: tuple[str, ...], has_tower: bool = False,
            text: dict[str, Any] = QWEN3_5_TEXT, mtp: tuple[str, ...] = ()) -> Published:  # fmt: skip
    """Qwen3.5 and 3.6: `nested` is the prefix of the decoder's tensors."""
    layer = f"{nested}layers.{{l}}."
    tensors = {
        "": (*under(nested, ("embed_tokens.weight V,H", "norm.weight H")), *HEAD, *mtp,
             *(under("model.visual.", TOWER_3, TOWER_BLOCKS_3) if has_tower else ())),
        "*": under(layer, NORMS, *mlp),
        "linear": under(layer, GATED_DELTA),
        "full": under(layer, GATED_ATTENTION),
    }  # fmt: skip
    config: dict[str, Any] = {"architectures": [architecture], **text}
    if has_tower:
        config = {"architectures": [architecture], "model_type": "qwen3_5", "image_token_id": 248056, "video_token_id": 248057,
                  "vision_start_token_id": 248053, "vision_end_token_id": 248054, "tie_word_embeddings": False,
                  "text_config": text, "vision_config": {**VISION_3, "out_hidden_size": text["hidden_size"]}}  # fmt: skip
    return Published(model, config, tensors, QWEN3_5_KINDS, small=QWEN3_5_SMALL)


def mtp_block(prefix: str, *mlp: tuple[str, ...]) -> tuple[str, ...]:
    """The layer that predicts a further token."""
    plain = (
        "mtp.fc.weight H,2*H",
        "mtp.norm.weight H",
        "mtp.pre_fc_norm_embedding.weight H",
        "mtp.pre_fc_norm_hidden.weight H",
    )
    return (*plain, *under(prefix, NORMS, GATED_ATTENTION, *mlp))


MTP = "mtp.layers.0."
DENSE_3_5 = {**QWEN3_5_TEXT, "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
             "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
             "layer_types": QWEN3_5_TEXT["layer_types"][:4] * 16}  # fmt: skip
for _field in ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"):
    del DENSE_3_5[_field]
DEEPSEEK = dense(
    7168, 18432, 61, 128, 128, 129280, 163840, attention_bias=False, ep_size=1, first_k_dense_replace=3, kv_lora_rank=512,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
    num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc",
    v_head_dim=128, rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                                  "original_max_position_embeddings": 4096, "type": "yarn"},
)  # fmt: skip
GEMMA_2 = dense(
    2304, 9216, 26, 8, 4, 256000, 8192, architectures=["Gemma2ForCausalLM"], attention_bias=False, head_dim=256,
    attn_logit_softcapping=50.0, cache_implementation="hybrid", final_logit_softcapping=30.0,
    hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rope_theta=10000.0,
    sliding_window=4096,
)  # fmt: skip
del GEMMA_2["tie_word_embeddings"]
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None, "head_dim": 256,
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GEMMA_4_TEXT = {
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
    "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": 704,
    "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
G4 = "model.language_model.layers.{l}."
GEMMA_4_SPARSE = (
    "layer_scalar 1", "router.proj.weight E,H", "router.scale H", "router.per_expert_scale E", "experts.gate_up_proj E,2*M,H",
    "experts.down_proj E,H,M", "pre_feedforward_layernorm_2.weight H", "post_feedforward_layernorm_1.weight H",
    "post_feedforward_layernorm_2.weight H",
)  # fmt: skip
GEMMA_3N_TEXT = {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_num_inputs": 4, "attention_bias": False, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
    "intermediate_size": [16384] * 35, "laurel_rank": 64, "model_type": "gemma3n_text", "num_attention_heads": 8,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "max_position_embeddings": 32768,
    "num_hidden_layers": 35, "num_key_value_heads": 2, "num_kv_shared_layers": 15, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
    "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
}  # fmt: skip


GEMMA_3N_SMALL = {"intermediate_size": [96] * 6, "num_kv_shared_layers": 2,
                  "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2}  # fmt: skip


def gemma_3n(nested: str) -> dict[str, tuple[str, ...]]:
    """The tensors of Gemma 3n; the last ones are of its towers."""
    altup = tuple(f"altup_{kind}projections.{i}.weight H,H" for kind in ("", "unembed_") for i in range(3))
    parts = (
        "altup.correct_output_scale H", "altup.correction_coefs.weight 4,4", "altup.modality_router.weight 4,H",
        "altup.prediction_coefs.weight 16,4", "altup.router_norm.weight H", "laurel.linear_left.weight 16,H",
        "laurel.linear_right.weight H,16", "laurel.post_laurel_norm.weight H", "per_layer_input_gate.weight 16,H",
        "per_layer_projection.weight H,16", "post_per_layer_input_norm.weight H",
    )  # fmt: skip
    whole = ("embed_tokens.weight V,H", "embed_tokens_per_layer.weight V,6*16", "norm.weight H",
             "per_layer_model_projection.weight 6*16,H", "per_layer_projection_norm.weight 16", *altup)  # fmt: skip
    towers = ("model.audio_tower.conformer.0.norm.weight 64", "model.embed_vision.embedding.weight 64,64")
    layer = under(f"{nested}layers.{{l}}.", GEMMA_NORMS, ATTENTION, QK_NORMS, MLP, parts)
    return {"": (*under(nested, whole), *towers), "*": layer}


LFM2_FIELDS = {
    "conv_L_cache": 3, "conv_bias": False, "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-05,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0,
    "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
LFM2_TENSORS = {
    "": ("model.embed_tokens.weight V,H", "model.embedding_norm.weight H"),
    "*": under(L, ("operator_norm.weight H", "ffn_norm.weight H")),
    "conv": under(L, ("conv.conv.weight H,1,3", "conv.in_proj.weight 3*H,H", "conv.out_proj.weight H,H")),
    "full": under(L, (*ATTENTION[:3], "self_attn.out_proj.weight H,Q", "self_attn.q_layernorm.weight D",
                      "self_attn.k_layernorm.weight D")),
}  # fmt: skip
GLM_FIELDS = dense(
    4096, 13696, 40, 32, 2, 151552, 131072, attention_bias=True, head_dim=128, partial_rotary_factor=0.5,
    rope_theta=10000.0,
)  # fmt: skip
GLM_TENSORS = {"": TOP + HEAD, "*": under(L, NORMS, ATTENTION, QKV_BIAS, ("mlp.gate_up_proj.weight 2*I,H", MLP[2]))}
GRANITE_MOE = {**dense(
    1536, 512, 32, 24, 8, 49155, 131072, attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0,
    logits_scaling=6.0, num_experts_per_tok=8, num_local_experts=40, residual_multiplier=0.22, rope_scaling=None,
    rope_theta=10000000.0, router_aux_loss_coef=0.0,
), "tie_word_embeddings": True}  # fmt: skip
GRANITE_EXPERTS = ("block_sparse_moe.router.layer.weight E,H", "block_sparse_moe.input_linear.weight E,2*M,H",
                   "block_sparse_moe.output_linear.weight E,H,M")  # fmt: skip
GRANITE_SHARED = ("shared_mlp.input_linear.weight 2*S,H", "shared_mlp.output_linear.weight H,S")
NEMOTRON_H = {
    "attention_bias": False, "attention_dropout": 0.0, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    "hidden_dropout": 0.0, "hidden_size": 4096, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "ssm_state_size": 128, "tie_word_embeddings": False, "use_bias": False, "use_conv_bias": True,
    "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
NEMOTRON_TOP = ("backbone.embeddings.weight V,H", "backbone.norm_f.weight H", *HEAD)
NEMOTRON_MAMBA = under("backbone.layers.{l}.mixer.", (
    "in_proj.weight 2*128+4*16+8,H", "conv1d.weight 128+4*16,1,4", "conv1d.bias 128+4*16", "dt_bias 8", "A_log 8", "D 8",
    "norm.weight 128", "out_proj.weight H,128"))  # fmt: skip
NEMOTRON_ATTENTION = under("backbone.layers.{l}.", tuple(name.replace("self_attn", "mixer") for name in ATTENTION))
MINISTRAL_3 = dense(
    4096, 14336, 34, 32, 8, 131072, 262144, head_dim=128, sliding_window=None, model_type="ministral3",
    rope_parameters={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                     "rope_type": "yarn", "type": "yarn"},
)  # fmt: skip
COHERE = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 24576,
    "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 131072, "model_type": "cohere",
    "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 8, "rope_theta": 4000000.0,
    "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
STARCODER = {
    "attention_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 18432,
    "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05,
    "norm_type": "layer_norm", "num_attention_heads": 36, "num_hidden_layers": 32, "num_key_value_heads": 4,
    "rope_theta": 1000000, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_4_TEXT = {
    "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
    "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
    "use_qk_norm": True, "vocab_size": 202048,
}  # fmt: skip


def llama_4(nested: str, towers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The tensors of Llama 4; `nested` is the prefix of its decoder."""
    experts = ("feed_forward.router.weight E,H", "feed_forward.experts.gate_up_proj E,H,2*M",
               "feed_forward.experts.down_proj E,M,H",
               *(name.replace("feed_forward.", "feed_forward.shared_expert.").replace("I", "M") for name in FED))  # fmt: skip
    return {
        "": (*under(nested, TOP, HEAD), *towers),
        "*": under(nested + L, NORMS, ATTENTION),
        "moe": under(nested + L, experts),
    }


def in_fp8(*groups: tuple[str, ...]) -> tuple[str, ...]:
    """The same linears in fp8 with one scale per tensor, and one of the inputs, as transformers names them."""
    names = [name for group in groups for name in group]
    found = []
    for name in names:
        linear = name.partition(".weight")[0]
        found += [f"{name}:fp8", f"{linear}.weight_scale_inv ", f"{linear}.activation_scale "]
    return tuple(found)


def in_fp8_blocks(*groups: tuple[str, ...]) -> tuple[str, ...]:
    """The same linears in fp8 with a scale per block; norms stay as they are."""
    found: list[str] = []
    for name in (name for group in groups for name in group):
        linear, _, shape = name.partition(".weight ")
        if "norm" in linear:
            found.append(name)
            continue
        rows, columns = (f"-(-({size})//128)" for size in shape.split(","))
        found += [f"{name}:fp8", f"{linear}.weight_scale_inv {rows},{columns}:f32"]
    return tuple(found)


BART = {
    "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "bos_token_id": 0, "d_model": 1024,
    "classifier_dropout": 0.0, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0,
    "decoder_layers": 12, "decoder_start_token_id": 2, "dropout": 0.1, "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096, "encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2, "init_std": 0.02,
    "is_encoder_decoder": True, "num_hidden_layers": 12, "pad_token_id": 1, "use_cache": True,
}  # fmt: skip
BART_TOP = ("model.shared.weight V,H:f32", "final_logits_bias 1,V:f32", *(
    f"model.{half}.{name}" for half in ("encoder", "decoder") for name in (
        "embed_positions.weight 514,H:f32", "layernorm_embedding.weight H:f32", "layernorm_embedding.bias H:f32")))  # fmt: skip
BERT = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 512, "num_attention_heads": 12,
    "num_hidden_layers": 12, "use_cache": True,
}  # fmt: skip


def bart_layer(prefix: str, *attentions: str) -> tuple[str, ...]:
    """A layer of BART, mBART or Whisper."""
    linears = [f"{attention}.{side}_proj" for attention in attentions for side in ("q", "k", "v", "out")]
    norms = [*(f"{attention}_layer_norm" for attention in attentions), "final_layer_norm"]
    found = [f"{linear}.weight H,H:f32" for linear in linears] + [f"{linear}.bias H:f32" for linear in linears]
    found += [f"{norm}.{part} H:f32" for norm in norms for part in ("weight", "bias")]
    found += ["fc1.weight 96,H:f32", "fc1.bias 96:f32", "fc2.weight H,96:f32", "fc2.bias H:f32"]
    return under(prefix, tuple(found))


BART_LAYERS = (*bart_layer("model.encoder.layers.{l}.", "self_attn"),
               *bart_layer("model.decoder.layers.{l}.", "self_attn", "encoder_attn"))  # fmt: skip


def t5_block(half: str, *parts: str) -> tuple[str, ...]:
    """A block of T5's encoder or decoder."""
    found = []
    for i, part in enumerate(parts):
        prefix = f"{half}.block.{{l}}.layer.{i}."
        found.append(f"{prefix}layer_norm.weight H:f32")
        if part == "DenseReluDense":
            found += [
                f"{prefix}{part}.{name}:f32" for name in ("wi_0.weight 96,H", "wi_1.weight 96,H", "wo.weight H,96")
            ]
        else:
            found += [f"{prefix}{part}.{side}.weight H,H:f32" for side in "qkvo"]
    return tuple(found)


def bert(prefix: str, positions: int, types: int, weight: str, bias: str, *more: str) -> dict[str, tuple[str, ...]]:
    """The tensors of a BERT-like encoder, whose norms have `weight` and `bias`."""
    embeddings = ("word_embeddings.weight V,H:f32", f"position_embeddings.weight {positions},H:f32",
                  f"token_type_embeddings.weight {types},H:f32", f"LayerNorm.{weight} H:f32", f"LayerNorm.{bias} H:f32")  # fmt: skip
    linears = [f"attention.self.{side} H,H" for side in ("query", "key", "value")]
    linears += ["attention.output.dense H,H", "intermediate.dense 96,H", "output.dense H,96"]
    layer = [f"{name}.weight {shape}:f32" for name, _, shape in (linear.partition(" ") for linear in linears)]
    layer += [
        f"{name}.bias {shape.partition(',')[0]}:f32" for name, _, shape in (linear.partition(" ") for linear in linears)
    ]
    layer += [
        f"{part}.output.LayerNorm.{name} H:f32".removeprefix(".")
        for part in ("attention", "")
        for name in (weight, bias)
    ]
    return {
        "": (*under(f"{prefix}embeddings.", embeddings), *more),
        "*": under(f"{prefix}encoder.layer.{{l}}.", tuple(layer)),
    }


ROWS = (
    llama("Qwen/Qwen3-8B", "Qwen3ForCausalLM", dense(
        4096, 12288, 36, 32, 8, 151936, 40960, attention_bias=False, head_dim=128, max_window_layers=36, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, use_sliding_window=False, model_type="qwen3"), QK_NORMS),
    llama("Qwen/Qwen2.5-7B-Instruct", "Qwen2ForCausalLM", dense(
        3584, 18944, 28, 28, 4, 152064, 32768, max_window_layers=28, rope_theta=1000000.0, sliding_window=131072,
        use_sliding_window=False, model_type="qwen2"), QKV_BIAS),
    llama("meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM", dense(
        4096, 14336, 32, 32, 8, 128256, 131072, attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_theta=500000.0,
        rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                      "original_max_position_embeddings": 8192}, model_type="llama")),
    llama("mistralai/Mistral-7B-Instruct-v0.3", "MistralForCausalLM", dense(
        4096, 14336, 32, 32, 8, 32768, 32768, rope_theta=1000000.0, sliding_window=None, model_type="mistral")),
    Published("microsoft/Phi-3.5-mini-instruct", {"architectures": ["Phi3ForCausalLM"], **dense(
        3072, 8192, 32, 32, 32, 32064, 131072, attention_bias=False, original_max_position_embeddings=4096, resid_pdrop=0.0,
        rope_theta=10000.0, sliding_window=262144, model_type="phi3",
        rope_scaling={"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"})},
        {"": TOP + HEAD, "*": under(L, NORMS, ("self_attn.qkv_proj.weight Q+2*K,H", "self_attn.o_proj.weight H,Q",
                                              "mlp.gate_up_proj.weight 2*I,H", "mlp.down_proj.weight H,I"))},
        small={"long_factor": [1.1] * 8, "short_factor": [1.0] * 8}),
    llama("facebook/cwm", "CwmForCausalLM", dense(
        6144, 21504, 64, 48, 8, 128256, 131072, head_dim=128, rope_theta=1000000.0, sliding_window=8192, model_type="cwm",
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 16,
        rope_scaling={"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                      "original_max_position_embeddings": 8192})),
    llama("internlm/internlm3-8b-instruct", "InternLM3ForCausalLM", dense(
        4096, 10240, 48, 32, 2, 128512, 32768, bias=False, qkv_bias=False, head_dim=128, rope_theta=50000000,
        rope_scaling={"factor": 6.0, "rope_type": "dynamic"}, model_type="internlm3"), has_reference=False),
    llama("IQuestLab/IQuest-Coder-V1-40B-Instruct", "IQuestCoderForCausalLM", dense(
        5120, 27648, 80, 40, 8, 76800, 131072, attention_bias=False, mlp_bias=False, head_dim=128, rope_theta=500000.0,
        clip_qkv=None, use_sliding_window=False, model_type="iquestcoder"), is_derived=True, has_reference=False),
    llama("kyutai/helium-1-2b", "HeliumForCausalLM", dense(
        2048, 8192, 28, 16, 8, 64000, 4096, attention_bias=False, mlp_bias=False, head_dim=128, rope_theta=20000,
        model_type="helium")),
    llama("inceptionai/Jais-2-8B-Chat", "Jais2ForCausalLM", {**dense(
        3328, 26624, 32, 26, 26, 150272, 8192, attention_bias=True, mlp_bias=True, layer_norm_eps=1e-5, head_dim=128,
        model_type="jais2"), "hidden_act": "relu2"}, QKV_BIAS,
        ("self_attn.o_proj.bias H", "mlp.up_proj.bias I", "mlp.down_proj.bias H", "input_layernorm.bias H",
         "post_attention_layernorm.bias H"), mlp=MLP[1:], top=(*TOP, *HEAD, "model.norm.bias H"), is_derived=True),
    llama("google/gemma-2-2b-it", "Gemma2ForCausalLM", GEMMA_2, top=TOP, norms=GEMMA_NORMS),
    llama("google/vaultgemma-1b", "VaultGemmaForCausalLM", {
        **GEMMA_2, "architectures": ["VaultGemmaForCausalLM"], "hidden_size": 1152, "layer_types": ["sliding_attention",
        "full_attention"] * 13, "model_type": "vaultgemma"}, top=TOP,
        norms=("input_layernorm.weight H", "pre_feedforward_layernorm.weight H")),
    llama("google/gemma-2b-it", "GemmaForCausalLM", {**{k: v for k, v in GEMMA_2.items() if "cap" not in k and k not in (
        "sliding_window", "query_pre_attn_scalar", "cache_implementation", "hidden_activation")},
        "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "num_key_value_heads": 1}, top=TOP),
    llama("google/gemma-3-1b-it", "Gemma3ForCausalLM", GEMMA_3, QK_NORMS, top=TOP, norms=GEMMA_NORMS, layers=6),
    Published("google/gemma-3-4b-it", {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "vocab_size": 262208,
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "num_hidden_layers": 27,
                          "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False}},
        {"": ("language_model.model.embed_tokens.weight V,H", "language_model.model.norm.weight H",
              "multi_modal_projector.mm_input_projection_weight 64,64", "multi_modal_projector.mm_soft_emb_norm.weight 64",
              "vision_tower.vision_model.embeddings.patch_embedding.bias 64"),
         "*": under("language_model.model.layers.{l}.", GEMMA_NORMS, ATTENTION, QK_NORMS, MLP)}, layers=6),
    Published("google/gemma-4-26B-A4B-it", {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "image_token_id": 258880,
        "model_type": "gemma4", "text_config": GEMMA_4_TEXT, "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision", "num_hidden_layers": 27}},
        {"": ("model.language_model.embed_tokens.weight V,H", "model.language_model.norm.weight H",
              "model.embed_vision.embedding_projection.weight 64,64",
              "model.vision_tower.patch_embedder.input_proj.weight 64,64"),
         "*": under(G4, GEMMA_NORMS, MLP, GEMMA_4_SPARSE),
         "sliding": under(G4, ATTENTION, QK_NORMS),
         "full": under(G4, ("self_attn.q_proj.weight 4*32,H", "self_attn.k_proj.weight 32,H", "self_attn.o_proj.weight H,4*32",
                            "self_attn.q_norm.weight 32", "self_attn.k_norm.weight 32"))},
        {"sliding": range(5), "full": [5]}, layers=6, small={"num_global_key_value_heads": 1, "num_key_value_heads": 2}, has_reference=False),
    Published("Qwen/Qwen3-30B-A3B", {"architectures": ["Qwen3MoeForCausalLM"], **dense(
        2048, 6144, 48, 32, 4, 151936, 40960, attention_bias=False, decoder_sparse_step=1, head_dim=128, max_window_layers=48,
        mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        rope_theta=1000000.0, sliding_window=None, use_sliding_window=False, model_type="qwen3_moe")},
        sparse(0, attention=(ATTENTION, QK_NORMS), correction=()), {"moe": range(4)}),
    Published("JetBrains/Mellum2-12B-A2.5B-Instruct", {"architectures": ["MellumForCausalLM"], **dense(
        2304, 7168, 28, 32, 4, 98304, 131072, attention_bias=False, head_dim=128, moe_intermediate_size=896, num_experts=64,
        num_experts_per_tok=8, norm_topk_prob=True, sliding_window=1024, use_sliding_window=True, model_type="mellum",
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 7,
        mlp_layer_types=["sparse"] * 28, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})},
        sparse(0, attention=(ATTENTION, QK_NORMS), correction=()), {"moe": range(4)}, is_derived=True),
    Published("Qwen/Qwen2-VL-7B-Instruct", {"architectures": ["Qwen2VLForConditionalGeneration"], **dense(
        3584, 18944, 28, 28, 4, 152064, 32768, max_window_layers=28, rope_theta=1000000.0, sliding_window=32768,
        use_sliding_window=False, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
        vision_token_id=151654, model_type="qwen2_vl", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        vision_config={"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
                       "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2})},
        {"": TOP + HEAD + under("visual.", TOWER_2), "*": under(L, NORMS, ATTENTION, QKV_BIAS, MLP)}, small={"mrope_section": [2, 3, 3]}),
    Published("Qwen/Qwen2.5-VL-7B-Instruct", {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **dense(
        3584, 18944, 28, 28, 4, 152064, 128000, max_window_layers=28, rope_theta=1000000.0, sliding_window=32768,
        use_sliding_window=False, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
        vision_token_id=151654, model_type="qwen2_5_vl", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        vision_config={"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                       "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
                       "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                       "tokens_per_second": 2, "temporal_patch_size": 2})},
        {"": TOP + HEAD + under("visual.", TOWER_2_5), "*": under(L, NORMS, ATTENTION, QKV_BIAS, MLP)}, small={"mrope_section": [2, 3, 3]}),
    Published("Qwen/Qwen3-VL-8B-Instruct", {
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "tie_word_embeddings": False, "model_type": "qwen3_vl",
        "text_config": dense(4096, 12288, 36, 32, 8, 151936, 262144, attention_bias=False, head_dim=128, rope_theta=5000000,
                             model_type="qwen3_vl_text", rope_scaling={"mrope_interleaved": True, "rope_type": "default",
                                                                       "mrope_section": [24, 20, 20]}),
        "vision_config": {**VISION_3, "out_hidden_size": 4096}},
        {"": (*under("model.language_model.", ("embed_tokens.weight V,H", "norm.weight H")), *HEAD,
              *under("model.visual.", TOWER_3, TOWER_BLOCKS_3)),
         "*": under("model.language_model.layers.{l}.", NORMS, ATTENTION, QK_NORMS, MLP)},
        small={"mrope_section": [3, 3, 2]}),
    Published("mistralai/Mixtral-8x7B-Instruct-v0.1", {"architectures": ["MixtralForCausalLM"], **dense(
        4096, 14336, 32, 32, 8, 32000, 32768, num_experts_per_tok=2, num_local_experts=8, output_router_logits=False,
        rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, model_type="mixtral")},
        {"": TOP + HEAD, "*": under(L, NORMS, ATTENTION, ("block_sparse_moe.gate.weight E,H",
         "block_sparse_moe.experts.{e}.w1.weight I,H", "block_sparse_moe.experts.{e}.w2.weight H,I",
         "block_sparse_moe.experts.{e}.w3.weight I,H"))}),
    llama("allenai/OLMo-2-1124-7B", "Olmo2ForCausalLM", dense(
        4096, 11008, 32, 32, 32, 100352, 4096, attention_bias=False, rope_theta=500000, rope_scaling=None,
        model_type="olmo2"), WIDE_QK_NORMS, norms=POST_NORMS),
    Published("allenai/OLMoE-1B-7B-0924", {"architectures": ["OlmoeForCausalLM"], **dense(
        2048, 1024, 16, 16, 16, 50304, 4096, attention_bias=False, clip_qkv=None, norm_topk_prob=False, num_experts=64,
        num_experts_per_tok=8, output_router_logits=False, rope_scaling=None, rope_theta=10000.0, model_type="olmoe")},
        sparse(0, attention=(ATTENTION, WIDE_QK_NORMS), correction=()), {"moe": range(4)}, sizes={"M": 96}),
    Published("Qwen/Qwen1.5-MoE-A2.7B-Chat", {"architectures": ["Qwen2MoeForCausalLM"], **dense(
        2048, 5632, 24, 16, 16, 151936, 8192, decoder_sparse_step=1, max_window_layers=21, moe_intermediate_size=1408,
        norm_topk_prob=False, num_experts=60, num_experts_per_tok=4, rope_theta=1000000.0, sliding_window=32768,
        shared_expert_intermediate_size=5632, use_sliding_window=False, model_type="qwen2_moe")},
        sparse(0, SHARED_EXPERT, attention=(ATTENTION, QKV_BIAS), correction=()), {"moe": range(4)}),
    Published("zai-org/GLM-4.5-Air", {"architectures": ["Glm4MoeForCausalLM"], **dense(
        4096, 10944, 46, 96, 8, 151552, 131072, attention_bias=True, first_k_dense_replace=1, head_dim=128, n_group=1,
        moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        num_nextn_predict_layers=1, partial_rotary_factor=0.5, rope_scaling=None, rope_theta=1000000,
        routed_scaling_factor=1.0, topk_group=1, use_qk_norm=False, model_type="glm4_moe")},
        {**sparse(1, SHARED, attention=(ATTENTION, QKV_BIAS)), "mtp": under(L, NORMS, ATTENTION, QKV_BIAS, ROUTER, CORRECTION,
         EXPERTS, SHARED, ("enorm.weight H", "hnorm.weight H", "eh_proj.weight H,2*H", "shared_head.norm.weight H",
                           "shared_head.head.weight V,H", "embed_tokens.weight V,H"))},
        {"dense": [0], "moe": [1, 2, 3], "mtp": [4]}, sizes={"S": 32}),
    Published("upstage/Solar-Open-100B", {"architectures": ["SolarOpenForCausalLM"], **dense(
        4096, 10240, 48, 64, 8, 196608, 131072, attention_bias=False, head_dim=128, moe_intermediate_size=1280, n_group=1,
        first_k_dense_replace=0, n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
        rope_theta=1000000, routed_scaling_factor=1.0, topk_group=1, use_qk_norm=False, partial_rotary_factor=1.0,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}, model_type="solar_open")},
        sparse(0, SHARED), {"moe": range(4)}, sizes={"S": 32}, is_derived=True),
    Published("rednote-hilab/dots.llm1.inst", {"architectures": ["Dots1ForCausalLM"], **dense(
        4096, 10944, 62, 32, 32, 152064, 32768, attention_bias=False, first_k_dense_replace=1, moe_intermediate_size=1408,
        n_routed_experts=128, n_shared_experts=2, norm_topk_prob=True, num_experts_per_tok=6, rope_theta=10000000,
        routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None, n_group=1, topk_group=1,
        model_type="dots1")},
        sparse(1, SHARED, attention=(ATTENTION, QK_NORMS)), {"dense": [0], "moe": [1, 2, 3]}, sizes={"S": 64}),
    Published("MiniMaxAI/MiniMax-M2", {"architectures": ["MiniMaxM2ForCausalLM"], **dense(
        3072, 1536, 62, 48, 8, 200064, 196608, attn_type_list=[1] * 62, head_dim=128, mtp_transformer_layers=1,
        num_experts_per_tok=8, num_local_experts=256, num_mtp_modules=3, qk_norm_type="per_layer", rope_theta=5000000,
        rotary_dim=64, scoring_func="sigmoid", shared_intermediate_size=0, use_mtp=True, use_qk_norm=True,
        use_routing_bias=True, model_type="minimax_m2")},
        {"": TOP + HEAD, "*": under(L, NORMS, ATTENTION, WIDE_QK_NORMS, ("block_sparse_moe.gate.weight E,H",
         "block_sparse_moe.e_score_correction_bias E:f32", "block_sparse_moe.experts.{e}.w1.weight I,H",
         "block_sparse_moe.experts.{e}.w2.weight H,I", "block_sparse_moe.experts.{e}.w3.weight I,H"))},
        small={"shared_intermediate_size": 0, "rotary_dim": 8}),
    qwen3_5("Qwen/Qwen3.5-27B", "Qwen3_5ForConditionalGeneration", "model.language_model.", MLP, has_tower=True,
            text=DENSE_3_5, mtp=mtp_block(MTP, MLP)),
    qwen3_5("Qwen/Qwen3.5-27B, text only", "Qwen3_5ForCausalLM", "model.", MLP, text=DENSE_3_5),
    qwen3_5("Qwen/Qwen3.5-35B-A3B", "Qwen3_5MoeForConditionalGeneration", "model.language_model.", ROUTER, STACKED,
            SHARED_EXPERT, has_tower=True, mtp=mtp_block(MTP, ROUTER, EXPERTS, SHARED_EXPERT)),
    qwen3_5("Qwen/Qwen3.6-35B-A3B", "Qwen3_5MoeForConditionalGeneration", "model.language_model.", ROUTER, STACKED,
            SHARED_EXPERT, has_tower=True, mtp=mtp_block(MTP, ROUTER, STACKED, SHARED_EXPERT)),
    qwen3_5("Qwen/Qwen3.5-35B-A3B, text only", "Qwen3_5MoeForCausalLM", "model.", ROUTER, STACKED, SHARED_EXPERT),
    Published("Qwen/Qwen3-Next-80B-A3B-Instruct", {"architectures": ["Qwen3NextForCausalLM"], **dense(
        2048, 5120, 48, 16, 2, 151936, 262144, attention_bias=False, decoder_sparse_step=1, full_attention_interval=4,
        head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_value_head_dim=128, mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_experts=512,
        num_experts_per_tok=10, partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000000,
        shared_expert_intermediate_size=512, model_type="qwen3_next")},
        {"": TOP + HEAD + ("mtp.fc.weight H,2*H", "mtp.norm.weight H"),
         "*": under(L, NORMS, ROUTER, EXPERTS, SHARED_EXPERT), "full": under(L, GATED_ATTENTION),
         "linear": under(L, ("linear_attn.in_proj_qkvz.weight 2*32+2*64,H", "linear_attn.in_proj_ba.weight 8,H"),
                         GATED_DELTA[4:])},
        QWEN3_5_KINDS, small=QWEN3_5_SMALL),
    Published("google/gemma-3n-E4B-it", {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "image_token_id": 262145,
        "audio_token_id": 262273, "vision_soft_tokens_per_image": 256, "text_config": GEMMA_3N_TEXT,
        "audio_config": {"hidden_size": 1536, "model_type": "gemma3n_audio"},
        "vision_config": {"hidden_size": 2048, "model_type": "gemma3n_vision"}},
        gemma_3n("model.language_model."), layers=6, small=GEMMA_3N_SMALL, has_reference=False),
    Published("google/gemma-3n-E4B-it, text only", {"architectures": ["Gemma3nForCausalLM"], **GEMMA_3N_TEXT},
        {**gemma_3n("model."), "": gemma_3n("model.")[""][:-2]}, layers=6,
        small=GEMMA_3N_SMALL, is_derived=True),
    Published("google/gemma-4-26B-A4B-it, text only", {"architectures": ["Gemma4ForCausalLM"], **GEMMA_4_TEXT},
        {"": TOP, "*": under(L, GEMMA_NORMS, MLP, GEMMA_4_SPARSE), "sliding": under(L, ATTENTION, QK_NORMS),
         "full": under(L, ("self_attn.q_proj.weight 4*32,H", "self_attn.k_proj.weight 32,H", "self_attn.o_proj.weight H,4*32",
                           "self_attn.q_norm.weight 32", "self_attn.k_norm.weight 32"))},
        {"sliding": range(5), "full": [5]}, layers=6, small={"num_global_key_value_heads": 1, "num_key_value_heads": 2}, is_derived=True),
    Published("LiquidAI/LFM2-1.2B", {"architectures": ["Lfm2ForCausalLM"], **LFM2_FIELDS, "block_auto_adjust_ff_dim": True,
        "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 32, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
        "conv_dim": 2048, "conv_dim_out": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_heads": 32, "tie_embedding": True,
        "model_type": "lfm2"},
        {**LFM2_TENSORS, "*": (*LFM2_TENSORS["*"], *under(L, tuple(f"feed_forward.{s}" for s in (
            "w1.weight 64,H", "w2.weight H,64", "w3.weight 64,H"))))},
        {"conv": [0, 1, 3], "full": [2]}, small={"full_attn_idxs": [2]}),
    Published("LiquidAI/LFM2-8B-A1B", {"architectures": ["Lfm2MoeForCausalLM"], **LFM2_FIELDS, "intermediate_size": 7168,
        "moe_intermediate_size": 1792, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts": 32, "dtype": "bfloat16",
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "use_expert_bias": True, "model_type": "lfm2_moe", "num_hidden_layers": 24,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 6},
        {**LFM2_TENSORS, "dense": under(L, tuple(f"feed_forward.{s}" for s in ("w1.weight I,H", "w2.weight H,I", "w3.weight I,H"))),
         "moe": under(L, ("feed_forward.gate.weight E,H", "feed_forward.expert_bias E:f32",
                          "feed_forward.experts.{e}.w1.weight M,H", "feed_forward.experts.{e}.w2.weight H,M",
                          "feed_forward.experts.{e}.w3.weight M,H"))},
        {"conv": [0, 1, 3], "full": [2], "dense": [0, 1], "moe": [2, 3]}),
    Published("ibm-ai-platform/Bamba-9B-v2", {"architectures": ["BambaForCausalLM"], **dense(
        4096, 14336, 32, 32, 8, 128256, 262144, attention_bias=False, attn_layer_indices=[9, 18, 27], attn_rotary_emb=64,
        mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
        mamba_n_groups=1, mamba_n_heads=128, mamba_proj_bias=False, mlp_bias=False, partial_rotary_factor=0.5,
        rope_theta=10000, num_logits_to_keep=1, model_type="bamba")},
        {"": ("model.embed_tokens.weight V,H", "model.final_layernorm.weight H", *HEAD),
         "*": under(L, ("input_layernorm.weight H", "pre_ff_layernorm.weight H"), FED), "mamba": under(L, MAMBA),
         "full": under(L, ATTENTION)}, {"mamba": [0, 2, 3], "full": [1]}, small={"attn_layer_indices": [1]}),
    Published("THUDM/glm-4-9b-chat-hf", {"architectures": ["GlmForCausalLM"], **GLM_FIELDS, "model_type": "glm"}, GLM_TENSORS),
    Published("zai-org/GLM-4-9B-0414", {"architectures": ["Glm4ForCausalLM"], **GLM_FIELDS, "model_type": "glm4"},
        {**GLM_TENSORS, "*": (*GLM_TENSORS["*"], *under(L, ("post_self_attn_layernorm.weight H",
                                                          "post_mlp_layernorm.weight H")))}),
    llama("allenai/Olmo-3-1025-7B", "Olmo3ForCausalLM", dense(
        4096, 11008, 32, 32, 32, 100278, 65536, attention_bias=False, sliding_window=4096, rope_theta=500000,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8, model_type="olmo3",
        rope_scaling={"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                      "original_max_position_embeddings": 8192, "rope_type": "yarn"}), WIDE_QK_NORMS, norms=POST_NORMS),
    llama("HuggingFaceTB/SmolLM3-3B", "SmolLM3ForCausalLM", {**dense(
        2048, 11008, 36, 16, 4, 128256, 65536, attention_bias=False, layer_types=["full_attention"] * 36,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, pretraining_tp=2,
        rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, model_type="smollm3"),
        "tie_word_embeddings": True}, top=TOP),
    llama("ibm-granite/granite-3.3-8b-instruct", "GraniteForCausalLM", {**dense(
        4096, 12800, 40, 32, 8, 49159, 131072, attention_bias=False, attention_multiplier=0.0078125,
        embedding_multiplier=12.0, logits_scaling=16.0, mlp_bias=False, residual_multiplier=0.22, rope_scaling=None,
        rope_theta=10000000.0, model_type="granite"), "tie_word_embeddings": True}, top=TOP),
    llama("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B", "HyperCLOVAXForCausalLM", dense(
        6144, 14336, 38, 48, 8, 110592, 131072, attention_bias=False, attention_multiplier=0.0078125, head_dim=128,
        embedding_multiplier=10.0, logits_scaling=0.125, mlp_bias=False, pretraining_tp=1, residual_multiplier=1.0,
        rope_scaling=None, rope_theta=100000000, use_post_norm=True, model_type="hyperclovax"),
        norms=(*NORMS, "post_norm1.weight H", "post_norm2.weight H")),
    Published("ibm-granite/granite-3.1-3b-a800m-instruct", {"architectures": ["GraniteMoeForCausalLM"], **GRANITE_MOE,
        "model_type": "granitemoe"}, {"": TOP, "*": under(L, NORMS, ATTENTION, GRANITE_EXPERTS)}, sizes={"M": 96}),
    Published("ibm-research/moe-7b-1b-active-shared-experts", {"architectures": ["GraniteMoeSharedForCausalLM"], **GRANITE_MOE,
        "shared_intermediate_size": 1024, "model_type": "granitemoeshared"},
        {"": TOP, "*": under(L, NORMS, ATTENTION, GRANITE_EXPERTS, GRANITE_SHARED)}, sizes={"M": 96}, is_derived=True),
    Published("ibm-granite/granite-4.0-h-tiny", {"architectures": ["GraniteMoeHybridForCausalLM"], **GRANITE_MOE,
        "layer_types": ["mamba", "mamba", "attention", "mamba"] * 10, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 48, "mamba_proj_bias": False, "position_embedding_type": "nope", "shared_intermediate_size": 1024,
        "normalization_function": "rmsnorm", "init_method": "mup", "model_type": "granitemoehybrid", "num_hidden_layers": 40},
        {"": TOP, "*": under(L, NORMS, GRANITE_EXPERTS, GRANITE_SHARED), "mamba": under(L, MAMBA), "full": under(L, ATTENTION)},
        {"mamba": [0, 1, 3], "full": [2]}, sizes={"M": 96}),
    Published("tiiuae/Falcon-H1-1.5B-Instruct", {"architectures": ["FalconH1ForCausalLM"], **dense(
        2048, 4096, 24, 8, 2, 65537, 131072, attention_bias=False, attention_in_multiplier=1.0, attn_layer_indices=None,
        attention_out_multiplier=0.9375, embedding_multiplier=5.656854249492381, head_dim=128, key_multiplier=0.39,
        lm_head_multiplier=0.01953125, mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64,
        mamba_d_ssm=3072, mamba_d_state=256, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=48,
        mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True, mlp_bias=False,
        mlp_expansion_factor=8, mlp_multipliers=[0.88, 0.58], projectors_bias=False, rope_scaling=None,
        rope_theta=100000000000.0, ssm_in_multiplier=1.25, ssm_multipliers=[0.35, 0.25, 0.17, 0.5, 0.35],
        ssm_out_multiplier=0.23, model_type="falcon_h1")},
        {"": ("model.embed_tokens.weight V,H", "model.final_layernorm.weight H", *HEAD),
         "*": under(L, ("input_layernorm.weight H", "pre_ff_layernorm.weight H"), FED, ATTENTION,
                    tuple(name for name in MAMBA if "norm" not in name))}),
    Published("nvidia/Nemotron-H-8B-Base-8K", {"architectures": ["NemotronHForCausalLM"], **NEMOTRON_H,
        "attention_head_dim": 128, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504, "num_hidden_layers": 52,
        "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256},
        {"": NEMOTRON_TOP, "*": ("backbone.layers.{l}.norm.weight H",), "mamba": NEMOTRON_MAMBA, "full": NEMOTRON_ATTENTION,
         "mlp": under("backbone.layers.{l}.mixer.", ("up_proj.weight I,H", "down_proj.weight H,I"))},
        {"mamba": [0, 2, 4], "mlp": [1, 5], "full": [3]}, layers=6, small={"hybrid_override_pattern": "M-M*M-"},
        sizes={"D": 128, "Q": 512, "K": 256}),
    Published("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"architectures": ["NemotronHForCausalLM"], **NEMOTRON_H,
        "head_dim": 128, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856, "num_hidden_layers": 52,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True, "num_experts_per_tok": 6, "topk_group": 1,
        "routed_scaling_factor": 2.5, "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1, "time_step_min": 0.001},
        {"": NEMOTRON_TOP, "*": ("backbone.layers.{l}.norm.weight H",), "mamba": NEMOTRON_MAMBA, "full": NEMOTRON_ATTENTION,
         "moe": under("backbone.layers.{l}.mixer.", (
             "gate.weight E,H", "gate.e_score_correction_bias E:f32", "experts.{e}.up_proj.weight M,H",
             "experts.{e}.down_proj.weight H,M", "shared_experts.up_proj.weight S,H", "shared_experts.down_proj.weight H,S"))},
        {"mamba": [0, 2, 5], "moe": [1, 4], "full": [3]}, layers=6, small={"hybrid_override_pattern": "MEM*EM"}),
    llama("baidu/ERNIE-4.5-0.3B-PT", "Ernie4_5ForCausalLM", {**dense(
        1024, 3072, 18, 16, 2, 103424, 131072, head_dim=128, rope_scaling=None, rope_theta=500000.0, use_bias=False,
        model_type="ernie4_5"), "tie_word_embeddings": True}, top=TOP),
    Published("baidu/ERNIE-4.5-21B-A3B-PT", {"architectures": ["Ernie4_5_MoeForCausalLM"], **dense(
        2560, 12288, 28, 20, 4, 103424, 131072, moe_capacity=[64, 64, 64], moe_gate="topk", moe_intermediate_size=1536,
        moe_k=6, moe_layer_end_index=27, moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=64,
        moe_num_shared_experts=2, moe_use_aux_free=True, num_nextn_predict_layers=1, rope_scaling=None, rope_theta=500000.0,
        use_bias=False, model_type="ernie4_5_moe")},
        {**sparse(1, SHARED, correction=("mlp.moe_statics.e_score_correction_bias 1,E:f32",)),
         "": (*TOP, *HEAD, "model.mtp_emb_norm.0.weight H", "model.mtp_hidden_norm.0.weight H",
              "model.mtp_linear_proj.0.weight H,2*H")},
        {"dense": [0], "moe": [1, 2, 3]}, small={"moe_layer_end_index": 3}, sizes={"S": 64}),
    llama("tencent/Hunyuan-7B-Instruct", "HunYuanDenseV1ForCausalLM", dense(
        4096, 14336, 32, 32, 8, 128167, 32768, attention_bias=False, attention_head_dim=128, head_dim=128, mlp_bias=False,
        rope_theta=10000.0, rope_scaling={"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                                          "mscale_all_dim": 1.0, "type": "dynamic"}, use_qk_norm=True,
        model_type="hunyuan_v1_dense"), ("self_attn.query_layernorm.weight D", "self_attn.key_layernorm.weight D")),
    llama("ByteDance-Seed/Seed-OSS-36B-Instruct", "SeedOssForCausalLM", dense(
        5120, 27648, 64, 80, 8, 155136, 524288, attention_bias=True, attention_out_bias=False, head_dim=128, mlp_bias=False,
        residual_dropout=0.1, rope_scaling={"rope_type": "default"}, rope_theta=10000000.0, model_type="seed_oss"), QKV_BIAS),
    llama("LGAI-EXAONE/EXAONE-4.0-32B", "Exaone4ForCausalLM", dense(
        5120, 27392, 64, 40, 8, 102400, 131072, head_dim=128, layer_types=["sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention"] * 16, rope_theta=1000000, sliding_window=4096, sliding_window_pattern="LLLG",
        rope_scaling={"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                      "original_max_position_embeddings": 8192}, model_type="exaone4"), QK_NORMS, norms=POST_NORMS),
    Published("mistralai/Ministral-3-8B-Instruct-2512", {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "quantization_config": {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
                                "weight_block_size": None, "modules_to_not_convert": [
                                    "model.vision_tower", "model.multi_modal_projector", "lm_head"]},
        "text_config": {**MINISTRAL_3, "model_type": "ministral3"},
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24}},
        {"": ("language_model.model.embed_tokens.weight V,H", "language_model.model.norm.weight H",
              "language_model.lm_head.weight V,H", "multi_modal_projector.linear_1.weight 64,64",
              "vision_tower.patch_conv.weight 64,3,14,14"),
         "*": under("language_model.model.layers.{l}.", NORMS, in_fp8(ATTENTION, MLP))}, has_reference=False),
    llama("mistralai/Ministral-3-8B-Instruct-2512, text only", "Ministral3ForCausalLM", MINISTRAL_3, is_derived=True),
    Published("mistralai/Mistral-Small-3.2-24B-Instruct-2506", {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "text_config": {**dense(
            5120, 32768, 40, 32, 8, 131072, 131072, head_dim=128, rope_theta=1000000000.0, sliding_window=None,
            model_type="mistral")}, "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24}},
        {"": ("language_model.model.embed_tokens.weight V,H", "language_model.model.norm.weight H",
              "language_model.lm_head.weight V,H", "multi_modal_projector.linear_1.weight 64,64",
              "vision_tower.patch_conv.weight 64,3,14,14"),
         "*": under("language_model.model.layers.{l}.", NORMS, ATTENTION, MLP)}, has_reference=False),
    llama("CohereForAI/c4ai-command-r-08-2024", "CohereForCausalLM", COHERE, top=TOP, norms=NORMS[:1]),
    llama("CohereForAI/c4ai-command-r7b-12-2024", "Cohere2ForCausalLM", {**COHERE, "cache_implementation": "hybrid",
        "head_dim": 128, "hidden_size": 4096, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "use_qk_norm": False, "rope_theta": 50000, "model_type": "cohere2"},
        top=TOP, norms=NORMS[:1]),
    llama("bigcode/starcoder2-7b", "Starcoder2ForCausalLM", STARCODER, QKV_BIAS, ("self_attn.o_proj.bias H",
        "input_layernorm.bias H", "post_attention_layernorm.bias H", "mlp.c_fc.weight I,H", "mlp.c_fc.bias I",
        "mlp.c_proj.weight H,I", "mlp.c_proj.bias H"), mlp=(), top=(*TOP, "model.norm.bias H", *HEAD)),
    llama("arcee-ai/AFM-4.5B", "ArceeForCausalLM", {**dense(
        2560, 18432, 36, 20, 4, 128004, 65536, attention_bias=False, head_dim=128, mlp_bias=False, rope_theta=10000.0,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "original_max_position_embeddings": 4096,
                      "rope_type": "yarn", "mscale": 1.0}, model_type="arcee"), "hidden_act": "relu2"}, mlp=MLP[1:]),
    Published("meta-llama/Llama-4-Scout-17B-16E-Instruct", {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
        "image_token_index": 200092, "model_type": "llama4", "text_config": LLAMA_4_TEXT,
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model", "num_hidden_layers": 34}},
        llama_4("language_model.", ("vision_model.class_embedding 64", "multi_modal_projector.linear_1.weight 64,64")),
        {"moe": range(4)}, sizes={"M": 96}, has_reference=False),
    Published("meta-llama/Llama-4-Scout-17B-16E-Instruct, text only", {"architectures": ["Llama4ForCausalLM"], **LLAMA_4_TEXT},
        llama_4("", ()), {"moe": range(4)}, sizes={"M": 96}, is_derived=True),
    Published("openai/gpt-oss-20b", {"architectures": ["GptOssForCausalLM"], **dense(
        2880, 2880, 24, 64, 8, 201088, 131072, attention_bias=True, experts_per_token=4, head_dim=64,
        initial_context_length=4096, layer_types=["sliding_attention", "full_attention"] * 12, num_experts_per_tok=4,
        num_local_experts=32, output_router_logits=False, rope_theta=150000, sliding_window=128, swiglu_limit=7.0,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                      "rope_type": "yarn", "truncate": False}, model_type="gpt_oss")},
        {"": TOP + HEAD, "*": under(L, NORMS, ATTENTION, QKV_BIAS, ("self_attn.o_proj.bias H", "self_attn.sinks 4",
         "mlp.router.weight E,H", "mlp.router.bias E", "mlp.experts.gate_up_proj_blocks E,2*I,H//32,16:u8",
         "mlp.experts.gate_up_proj_scales E,2*I,H//32:u8", "mlp.experts.gate_up_proj_bias E,2*I",
         "mlp.experts.down_proj_blocks E,H,I//32,16:u8", "mlp.experts.down_proj_scales E,H,I//32:u8",
         "mlp.experts.down_proj_bias E,H"))}),
    Published("deepseek-ai/DeepSeek-V2-Lite-Chat", {"architectures": ["DeepseekV2ForCausalLM"],
        **DEEPSEEK, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_size": 2048, "n_group": 1, "topk_group": 1,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 0, "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "topk_method": "greedy", "model_type": "deepseek_v2"},
        sparse(1, SHARED, attention=(MLA, ("self_attn.q_proj.weight 4*24,H",)), correction=()),
        {"dense": [0], "moe": [1, 2, 3]}, sizes={"R": 32, "S": 64}),
    Published("deepseek-ai/DeepSeek-V3", {"architectures": ["DeepseekV3ForCausalLM"], **DEEPSEEK, "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]}},
        {"": TOP + HEAD, "*": under(L, NORMS, in_fp8_blocks(MLA, MLA_QUERIES)), "dense": under(L, in_fp8_blocks(MLP)),
         "moe": under(L, ROUTER, CORRECTION, in_fp8_blocks(EXPERTS, SHARED)), "mtp": under(L, NORMS, in_fp8_blocks(
             MLA, MLA_QUERIES), ("enorm.weight H", "hnorm.weight H", "eh_proj.weight H,2*H", "shared_head.norm.weight H"))},
        {"dense": [0, 1, 2], "moe": [3], "mtp": [4]}, sizes={"R": 32, "S": 32}),
    Published("moonshotai/Moonlight-16B-A3B-Instruct", {"architectures": ["DeepseekV3ForCausalLM"],
        **DEEPSEEK, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_size": 2048, "n_group": 1, "topk_group": 1,
        "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 6, "num_nextn_predict_layers": 0,
        "q_lora_rank": None, "rope_scaling": None, "rope_theta": 50000.0, "seq_aux": True, "model_type": "deepseek_v3"},
        sparse(1, SHARED, attention=(MLA, ("self_attn.q_proj.weight 4*24,H",))),
        {"dense": [0], "moe": [1, 2, 3]}, sizes={"R": 32, "S": 64}),
    Published("tencent/Youtu-LLM-2B", {"architectures": ["YoutuForCausalLM"], **dense(
        2048, 6144, 32, 16, 16, 128256, 131072, attention_bias=False, kv_lora_rank=512, mlp_bias=False, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, rope_interleave=True, rope_theta=1600000, v_head_dim=128,
        model_type="youtu_llm"), "tie_word_embeddings": True},
        {"": TOP, "*": under(L, NORMS, MLA, MLA_QUERIES, MLP)}, sizes={"R": 32}, is_derived=True),
    Published("zai-org/GLM-4.7-Flash", {"architectures": ["Glm4MoeLiteForCausalLM"], **dense(
        2048, 10240, 47, 20, 20, 154880, 202752, attention_bias=False, first_k_dense_replace=1, kv_lora_rank=512,
        moe_intermediate_size=1536, n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
        num_experts_per_tok=4, num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=768, qk_nope_head_dim=192,
        qk_rope_head_dim=64, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8, topk_group=1,
        topk_method="noaux_tc", v_head_dim=256, model_type="glm4_moe_lite")},
        sparse(1, SHARED, attention=(MLA, MLA_QUERIES)), {"dense": [0], "moe": [1, 2, 3]}, sizes={"R": 32, "S": 32}),
    Published("openai-community/gpt2", {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
        {"": ("wte.weight V,H:f32", "wpe.weight 512,H:f32", "ln_f.weight H:f32", "ln_f.bias H:f32"),
         "*": under("h.{l}.", ("ln_1.weight H:f32", "ln_1.bias H:f32", "ln_2.weight H:f32", "ln_2.bias H:f32",
                               "attn.bias 1,1,512,512:f32", "attn.c_attn.weight H,3*H:f32", "attn.c_attn.bias 3*H:f32",
                               "attn.c_proj.weight H,H:f32", "attn.c_proj.bias H:f32", "mlp.c_fc.weight H,4*H:f32",
                               "mlp.c_fc.bias 4*H:f32", "mlp.c_proj.weight 4*H,H:f32", "mlp.c_proj.bias H:f32"))}),
    Published("google/flan-t5-base", {
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 768,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5",
        "n_positions": 512, "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12, "output_past": True,
        "pad_token_id": 0, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 32128},
        {"": ("shared.weight V,H:f32", "lm_head.weight V,H:f32", *(f"{half}.{name}" for half in ("encoder", "decoder") for name in (
            "final_layer_norm.weight H:f32", "block.0.layer.0.SelfAttention.relative_attention_bias.weight 32,4:f32"))),
         "*": (*t5_block("encoder", "SelfAttention", "DenseReluDense"),
               *t5_block("decoder", "SelfAttention", "EncDecAttention", "DenseReluDense"))}),
    Published("facebook/bart-large-cnn", {**BART, "architectures": ["BartForConditionalGeneration"], "d_model": 1024,
        "max_position_embeddings": 1024, "normalize_embedding": True, "normalize_before": False, "scale_embedding": False,
        "add_final_layer_norm": False, "force_bos_token_to_be_generated": True, "vocab_size": 50264, "model_type": "bart"},
        {"": BART_TOP, "*": BART_LAYERS}),
    Published("facebook/mbart-large-50-many-to-many-mmt", {**BART, "architectures": ["MBartForConditionalGeneration"],
        "max_position_embeddings": 1024, "normalize_embedding": True, "normalize_before": True, "scale_embedding": True,
        "add_final_layer_norm": True, "forced_eos_token_id": 2, "vocab_size": 250054, "model_type": "mbart"},
        {"": (*BART_TOP, *(f"model.{half}.layer_norm.{part} H:f32" for half in ("encoder", "decoder")
                           for part in ("weight", "bias"))), "*": BART_LAYERS}),
    Published("openai/whisper-small", {**BART, "architectures": ["WhisperForConditionalGeneration"], "num_mel_bins": 80,
        "d_model": 768, "max_source_positions": 1500, "max_target_positions": 448, "max_length": 448, "vocab_size": 51865,
        "decoder_start_token_id": 50258, "eos_token_id": 50257, "pad_token_id": 50257, "bos_token_id": 50257,
        "scale_embedding": False, "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]], "begin_suppress_tokens": [220],
        "suppress_tokens": [1, 2], "model_type": "whisper"},
        {"": ("model.encoder.conv1.weight H,80,3:f32", "model.encoder.conv1.bias H:f32", "model.encoder.conv2.weight H,H,3:f32",
              "model.encoder.conv2.bias H:f32", "model.encoder.embed_positions.weight 1500,H:f32",
              "model.decoder.embed_positions.weight 448,H:f32", "model.decoder.embed_tokens.weight V,H:f32",
              *(f"model.{half}.layer_norm.{part} H:f32" for half in ("encoder", "decoder") for part in ("weight", "bias"))),
         "*": tuple(name for name in BART_LAYERS if "k_proj.bias" not in name)},
        small={"max_source_positions": 1500, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
               "bos_token_id": 2, "forced_decoder_ids": None, "begin_suppress_tokens": None, "suppress_tokens": None}),
    Published("google-bert/bert-base-uncased", {**BERT, "architectures": ["BertForMaskedLM"], "gradient_checkpointing": False,
        "layer_norm_eps": 1e-12, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
        "transformers_version": "4.6.0.dev0", "vocab_size": 30522, "model_type": "bert"},
        bert("bert.", 512, 2, "gamma", "beta", "cls.predictions.bias V:f32", "cls.predictions.transform.dense.weight H,H:f32",
             "cls.predictions.transform.dense.bias H:f32", "cls.predictions.transform.LayerNorm.gamma H:f32",
             "cls.predictions.transform.LayerNorm.beta H:f32", "cls.seq_relationship.weight 2,H:f32",
             "cls.seq_relationship.bias 2:f32", "bert.pooler.dense.weight H,H:f32", "bert.pooler.dense.bias H:f32")),
    Published("FacebookAI/roberta-base", {**BERT, "architectures": ["RobertaForMaskedLM"], "bos_token_id": 0, "eos_token_id": 2,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1,
        "vocab_size": 50265, "model_type": "roberta"},
        bert("roberta.", 514, 1, "weight", "bias", "lm_head.bias V:f32", "lm_head.dense.weight H,H:f32",
             "lm_head.dense.bias H:f32", "lm_head.layer_norm.weight H:f32", "lm_head.layer_norm.bias H:f32",
             "roberta.embeddings.position_ids 1,514:i64"), small={"max_position_embeddings": 514}),
    Published("BAAI/bge-m3", {**BERT, "architectures": ["XLMRobertaModel"], "bos_token_id": 0, "eos_token_id": 2,
        "classifier_dropout": None, "layer_norm_eps": 1e-05, "max_position_embeddings": 8194, "output_past": True,
        "pad_token_id": 1, "position_embedding_type": "absolute", "type_vocab_size": 1, "vocab_size": 250002,
        "model_type": "xlm-roberta"},
        bert("", 514, 1, "weight", "bias", "pooler.dense.weight H,H:f32", "pooler.dense.bias H:f32"),
        small={"max_position_embeddings": 514}),
    Published("answerdotai/ModernBERT-base", {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281,
        "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean",
        "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0,
        "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu",
        "hidden_size": 768, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
        "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0,
        "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
        "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute", "reference_compile": True,
        "sep_token_id": 50282, "sparse_pred_ignore_index": -100, "sparse_prediction": False, "vocab_size": 50368},
        {"": ("model.embeddings.tok_embeddings.weight V,H:f32", "model.embeddings.norm.weight H:f32",
              "model.final_norm.weight H:f32", "head.dense.weight H,H:f32", "head.norm.weight H:f32", "decoder.bias V:f32"),
         "later": ("model.layers.{l}.attn_norm.weight H:f32",),
         "*": under("model.layers.{l}.", ("attn.Wqkv.weight 3*H,H:f32", "attn.Wo.weight H,H:f32", "mlp_norm.weight H:f32",
                                          "mlp.Wi.weight 2*I,H:f32", "mlp.Wo.weight H,I:f32"))},
        {"later": [1, 2, 3]}, small={"pad_token_id": 0}),
)  # fmt: skip
