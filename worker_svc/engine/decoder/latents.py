"""Multi-head latent attention (MLA: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash): its configuration and its weights.

A token keeps a latent c and a rotated part r, which all heads share. With the matrices K_h and V_h of a head, its key
is [K_h c | r] and its value V_h c. There are two ways to compute this:

    expanded   K_h c and V_h c of every key; then attention of key_dim + rope_dim and value_dim numbers per head
    absorbed   q . (K_h c) = (K_h^T q) . c, so queries absorb K_h, attention reads latents, and V_h expands its output

Servers usually expand for prompts and absorb for decoding. The two round differently, so the output of a token would
depend on where the chunks of its prompt end, on prefix hits and on recomputation. Here all tokens are absorbed: one
arithmetic, and a cache that is read once per token for all heads. The price: attention multiplies 2 * rank + rope_dim
numbers per head and key, instead of key_dim + rope_dim + value_dim (half as many in GLM-4.7-Flash), which long prompts
notice. Expanding would have to compute the keys of earlier chunks again.

K_h^T and V_h stay linear layers of each head. Multiplied into the matrices before and after them they would be several
times larger, and round the weights of the checkpoint.
"""

from __future__ import annotations

from typing import Any

from worker_svc.engine.backend import LatentShape
from worker_svc.engine.checkpoint.model_folder import CheckpointError, size_of
from worker_svc.engine.decoder.config import LatentSpec
from worker_svc.engine.decoder.rotary import yarn_mscale

NORM_EPS = 1e-6  # of the norms of queries and latents: transformers reads it from no field
ATTENTION = "self_attn."
QUERY, QUERY_DOWN, QUERY_NORM, QUERY_UP = (
    ATTENTION + name for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
)
DOWN, NORM, UP = (ATTENTION + name for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"))


def parse_latents(config: dict[str, Any], *, is_interleaved: bool) -> LatentSpec:
    """Raises CheckpointError naming the field. `is_interleaved`: unless config.json says otherwise."""
    num_heads = size_of(config, "num_attention_heads")
    if size_of(config, "num_key_value_heads", num_heads) != num_heads:
        raise CheckpointError(
            f"num_key_value_heads: {config['num_key_value_heads']} is not supported; latent attention has a key and a "
            f"value for each of the {num_heads} attention heads"
        )
    interleave = config.get("rope_interleave", is_interleaved)
    if not isinstance(interleave, bool):
        raise CheckpointError(f"rope_interleave: config.json must hold true or false, found {interleave!r}")
    query_rank = None if config.get("q_lora_rank") is None else size_of(config, "q_lora_rank")
    if query_rank is None and config.get("attention_bias"):
        raise CheckpointError("attention_bias: true is not supported without q_lora_rank; only false is computed")
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    rank, rope_dim, key_dim, value_dim = (size_of(config, name) for name in names)
    return LatentSpec(LatentShape(num_heads, rank, rope_dim, key_dim, value_dim, interleave), query_rank)


def latent_scale(shape: LatentShape, rope: dict[str, Any]) -> float:
    """The scale of attention scores. YaRN's `mscale_all_dim` scales queries and keys, not only their rotated parts."""
    return float(shape.query_dim**-0.5 * yarn_mscale(rope) ** 2)
