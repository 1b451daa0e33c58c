"""The forward pass of a decoder: the parts of a layer in their order. Every backend executes this description.

    x += residual;  input_layernorm;  qkv;  norms of q and k, rotation, store of k and v;  attention;  or: recurrence
        o;  post_attention_layernorm                                                            -> residual
    x += residual;  pre_feedforward_layernorm;  gate_up, activation, down, or the experts;
        post_feedforward_layernorm                                                              -> residual

In a parallel layer (`Layer.is_parallel`) the feed-forward part also reads the layer's input, and its output is added to
that of attention.

x and residual are two terms of a sum: the first operation of a part adds the output of the part before it, because
each backend computes this sum and a norm in one pass over the rows. With latent attention, qkv is the first of
several linear layers (decoder/latents.py). `Layer` is the layer as data. What a layer lacks is
None there, and no operation here asks whether it exists.

model.py computes the operations on a CPU one after the other, gpu/model.py on a device, where they may be recorded as a
CUDA graph. For kernels/forward.cpp the operations are recorded once (cpu/fused.py) and computed in one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from worker_svc.engine.adapters.targets import SITES
from worker_svc.engine.backend import Linear, Norm
from worker_svc.engine.decoder.latents import LatentAttention
from worker_svc.engine.decoder.weights import FeedForward, Layer, RoutedExperts
from worker_svc.engine.recurrent import RecurrentWeights

QKV, OUT, GATE_UP, DOWN = range(len(SITES))


class StepOperations(Protocol):
    """What a backend computes for one step of T tokens; n of them after `keep_heads`. `index` is that of a layer, and
    `site` that of a linear layer which adapters may change."""

    def embed(self) -> torch.Tensor:
        """Input embeddings [T, hidden]."""
        ...

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output of a linear layer, with what adapters add to their rows of it. With `onto` it is added to that
        output of the linear layer before."""
        ...

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        """x += residual; `linear` of the norm of x."""
        ...

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        """Stores keys and values; the attention output [T, q_heads * head_dim]."""
        ...

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        """Advances the states of a recurrent layer; its output [T, num_values]."""
        ...

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        """Stores latents; the attention output [T, heads * rank]. joined: see `LatentAttention`."""
        ...

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        """The output [n, heads * value_dim] of the heads for attended latents [n, heads * rank]."""
        ...

    def keep_heads(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the tokens whose states are needed after the last layer."""
        ...

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of [gate | up], or of up alone."""
        ...

    def experts(
        self, part: RoutedExperts, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        """x += residual; the experts' output for the norm of x."""
        ...

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """The norm of a part's output x times `residual_scale`, in place. With several ranks x is summed before."""
        ...

    def end_layer(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        """May add to the output of a layer, x + residual, in place."""
        ...


def compute_layers(operations: StepOperations, layers: Sequence[Layer]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stores keys and values of all tokens; the output of the last layer [n, hidden] as two terms of a sum."""
    x, residual = operations.embed(), None
    for index, layer in enumerate(layers):
        qkv = operations.linear_of_norm(layer.qkv, x, residual, layer.input_layernorm, index, QKV)
        if layer.recurrent is not None:
            attended = operations.recur(layer.recurrent, qkv, index)
        elif layer.latents is not None:
            attended = operations.attend_latents(layer.latents, qkv, index)
        else:
            attended = operations.attend(qkv, index)
        if index == len(layers) - 1:
            x, attended = operations.keep_heads(x, attended)
        if not len(x):
            return x, None
        if layer.latents is not None:
            attended = operations.expand_latents(layer.latents, attended)
        output = operations.linear(layer.o, attended, index, OUT)
        if layer.is_parallel:
            residual = operations.output(_feed_forward(operations, layer, x, None, index, output), None)
        else:
            residual = operations.output(output, layer.post_attention_layernorm)
            output = _feed_forward(operations, layer, x, residual, index)
            residual = operations.output(output, layer.post_feedforward_layernorm)
        operations.end_layer(x, residual, index)
    return x, residual


def _feed_forward(
    operations: StepOperations,
    layer: Layer,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    index: int,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    part, norm = layer.feed_forward, layer.pre_feedforward_layernorm
    if not isinstance(part, FeedForward):
        return operations.experts(part, x, residual, norm)
    gate_up = operations.linear_of_norm(part.gate_up, x, residual, norm, index, GATE_UP)
    return operations.linear(part.down, operations.activated(gate_up), index, DOWN, onto)
