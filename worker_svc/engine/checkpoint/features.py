"""What a decoder may need beyond RMSNorm, rotary positions and a gated feed-forward part, and which backend computes
it."""

from __future__ import annotations

from collections.abc import Set

from worker_svc.engine.checkpoint.architecture import Architecture
from worker_svc.engine.checkpoint.model_folder import CheckpointError

FEATURES = {
    "experts": "experts",
    "experts_beside": "experts beside a dense feed-forward part",
    "expert_scores": "experts chosen by corrected or sigmoid scores",
    "shared_experts": "shared experts",
    "layer_norm": "LayerNorm",
    "offset_norm": "RMSNorm with weights around 0",
    "output_norms": "norms of the outputs of attention and feed-forward part",
    "wide_qk_norm": "norms of queries and keys over all heads",
    "partial_rotary": "rotation of a part of each head",
    "learned_positions": "learned positions",
    "odd_heads": "heads of an odd size",
    "plain_feed_forward": "a feed-forward part without gate",
    "sliding_window": "sliding windows",
    "kv_layouts": "heads of other sizes in some layers, or layers that share keys and values",
    "layer_inputs": "an embedding per token and layer",
    "latents": "latent attention (MLA)",
    "streams": "several residual streams (AltUp)",
    "soft_caps": "soft caps of attention scores or logits",
    "embedding_scale": "scaled embeddings",
    "query_scales": "scales of queries that grow with the position",
    "interleaved_rotary": "rotation of neighbours",
    "late_qk_norm": "norms of queries and keys after the rotation",
    "sinks": "sinks of attention",
    "chunks": "chunks of attention",
    "parallel": "attention and feed-forward part side by side",
    "multipliers": "multipliers of outputs or logits",
    "relu2": "squared ReLU",
    "clamped_swiglu": "clamped SwiGLU",
    "expert_biases": "biases of experts",
    "plain_experts": "experts without gate",
    "scaled_inputs": "experts whose inputs are scaled",
    "attention_scale": "a scale of attention scores other than head_dim^-0.5",
    "quantized_weights": "quantized weights",
    "cross_attention": "an encoder and cross-attention",
    "encoder": "attention of encoders",
    "no_logits": "a model without language-model head",
    "images": "images",
    "recurrent": "recurrent layers",
    "output_gate": "a gate of attention outputs",
    "adapters": "LoRA adapters",
}
# Parts that no kernel of Triton computes, and the kernels that run in plain torch then.
IN_TORCH = {
    "chunks": ("attention",),
    "kv_layouts": ("attention",),
    "late_qk_norm": ("rope_store",),
    "latents": ("attention",),
    "odd_heads": ("attention", "rope_store"),
    "plain_experts": ("experts",),
    "scaled_inputs": ("experts",),
}
OF_BACKEND = dict.fromkeys(("cpu", "cuda", "reference"), frozenset(FEATURES))


def features_of(architecture: Architecture) -> set[str]:
    """What every model of an architecture needs."""
    names, experts = architecture.names, architecture.experts
    needed = {
        "experts": experts is not None,
        "expert_scores": experts is not None and (experts.has_correction or experts.scores != "softmax"),
        "shared_experts": experts is not None and experts.shared != "none",
        "plain_experts": experts is not None and not architecture.is_gated,
        "scaled_inputs": experts is not None and experts.scales_inputs,
        "expert_biases": architecture.has_expert_bias,
        "sinks": bool(names.sinks),
        "interleaved_rotary": architecture.is_interleaved,
        "late_qk_norm": architecture.rotates_first,
        "parallel": architecture.is_parallel,
        "clamped_swiglu": architecture.activation == "clamped_swiglu",
        "layer_norm": architecture.norm == "layer",
        "offset_norm": architecture.norm == "rms_offset",
        "output_norms": bool(names.post_attention_layernorm),
        "latents": architecture.has_latents,
        "layer_inputs": architecture.has_layer_shapes,
        "streams": architecture.has_streams,
        "wide_qk_norm": architecture.qk_norm == "projection",
        "learned_positions": bool(names.position_embedding),
        "plain_feed_forward": not architecture.is_gated,
        "multipliers": "residual_multiplier" in architecture.defaults or "logit_scale" in architecture.defaults,
        "embedding_scale": architecture.scales_embedding,
        "images": architecture.tower is not None,
        "recurrent": architecture.recurrence is not None,
        "output_gate": architecture.has_output_gate,
    }
    return {name for name, is_needed in needed.items() if is_needed and name not in architecture.may_need}


def check_features(needed: Set[str], backend: str) -> None:
    """Raises CheckpointError if a decoder needs a feature that the backend does not compute."""
    missing = needed - OF_BACKEND[backend]
    if missing:
        able = " or ".join(name for name, features in OF_BACKEND.items() if not needed - features)
        raise CheckpointError(
            f"this model needs {', '.join(FEATURES[name] for name in sorted(missing))}, which backend {backend} does "
            f"not compute; use --backend {able}"
        )
