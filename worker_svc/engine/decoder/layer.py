"""The weights of one layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.backend import ExpertLinears, LatentAttention, Linear, Norm, RecurrentWeights
from worker_svc.engine.decoder.per_layer import PerLayerWeights
from worker_svc.engine.decoder.streams import Laurel, StreamWeights


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A dense feed-forward part. gate_up is [gate | up], or up alone if there is no gate."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """A feed-forward part of experts."""

    router: Linear
    experts: ExpertLinears
    router_norm: Norm | None = None  # of the layer's state. None: the router reads what the experts read

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Router logits [n, num_logits] of x [n, hidden]."""
        return self.router(x.float() if self.experts.routing.is_float32 else x)


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Experts beside a dense feed-forward part: both read the state of the layer through a norm of their own, and their
    outputs are added after another one."""

    experts: RoutedExperts
    norm: Norm
    output_norm: Norm
    dense_output_norm: Norm


@dataclass(frozen=True, slots=True)
class Beside:
    """A recurrence that reads the same input as attention, to whose output its own is added."""

    qkv: Linear
    recurrent: RecurrentWeights
    o: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer in the order of the forward pass. qkv is [q | k | v] of all heads. The norms are those of
    LAYER_NORMS; None: the decoder has none there."""

    input_layernorm: Norm | None
    qkv: Linear | None  # None: the layer has a feed-forward part only
    qk_norms: tuple[Norm, Norm] | None
    sinks: torch.Tensor | None  # float32 [q_heads]
    latents: LatentAttention | None  # with it, qkv is [source of queries | latent]
    o: Linear | None
    post_attention_layernorm: Norm | None
    pre_feedforward_layernorm: Norm | None
    feed_forward: FeedForward | RoutedExperts | None  # None: the layer has attention or recurrence only
    post_feedforward_layernorm: Norm | None
    is_parallel: bool  # the feed-forward part reads the input of the layer, as attention does
    recurrent: RecurrentWeights | None = None  # then `qkv` makes the projections of a recurrent layer
    beside: Beside | None = None
    per_layer: PerLayerWeights | None = None
    streams: StreamWeights | None = None
    laurel: Laurel | None = None
    experts_beside: ExpertsBeside | None = None
    value_norm: Norm | None = None
    scale: float = 1.0  # of the output
