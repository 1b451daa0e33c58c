"""The forward pass of a decoder: the parts of a layer in their order. Every backend executes this description.

    x += residual;  input_layernorm;  qkv;  norms of q and k, rotation, store of k and v;  attention;  or: recurrence
        o;  beside attention maybe a recurrence, with its own linear layers;
        post_attention_layernorm                                                                -> residual
    x += residual;  pre_feedforward_layernorm;  gate_up, activation, down, or the experts;
        post_feedforward_layernorm                                                              -> residual

A layer may lack the first part or the second one. In a parallel layer (`Layer.is_parallel`) the feed-forward part also
reads the layer's input, and its output is added to that of attention.

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

from worker_svc.engine.backend import SITES, LatentAttention, Linear, Norm, RecurrentWeights
from worker_svc.engine.decoder.layer import Beside, FeedForward, Layer, RoutedExperts

QKV, OUT, GATE_UP, DOWN = range(len(SITES))
BESIDE_QKV, BESIDE_OUT = len(SITES), len(SITES) + 1  # of a recurrence beside attention; adapters do not change them


class StepOperations(Protocol):
    """What a backend computes for one step of T tokens; n of them after `keep_heads`. `index` is that of a layer, and
    `site` that of a linear layer which adapters may change."""

    def embed(self) -> torch.Tensor:
        """Input embeddings [T, hidden]."""

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output of a linear layer, with what adapters add to their rows of it. With `onto` it is added to that
        output of the linear layer before."""

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        """x += residual; `linear` of the norm of x."""

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        """Stores keys and values; the attention output [T, q_heads * head_dim]."""

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        """Advances the states of a recurrent layer; its output [T, num_values]."""

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        """Stores latents; the attention output [T, heads * rank]. joined: see `LatentAttention`."""

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        """The output [n, heads * value_dim] of the heads for attended latents [n, heads * rank]."""

    def keep_heads(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Of tensors [T, ..], the rows of the tokens whose states are needed after the last layer."""

    def activated(self, gate_up: torch.Tensor, index: int) -> torch.Tensor:
        """The activation of [gate | up], or of up alone."""

    def experts(
        self, part: RoutedExperts, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        """x += residual; the experts' output for the norm of x."""

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """The norm of a part's output x times `residual_scale`, in place. With several ranks x is summed before."""

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """x += other."""

    def end_attention(self, x: torch.Tensor, output: torch.Tensor, index: int) -> None:
        """May add to what attention leaves, x + output, in place."""

    def end_layer(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        """May add to the output of a layer, x + residual, in place."""


def compute_layers(operations: StepOperations, layers: Sequence[Layer]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stores keys and values of all tokens; the output of the last layer [n, hidden] as two terms of a sum."""
    x, residual = operations.embed(), None
    for index, layer in enumerate(layers):
        x, residual = _mixed(operations, layer, x, residual, index, is_last=index == len(layers) - 1)
        if not len(x):
            return x, None
        if layer.feed_forward is not None:
            residual = _fed(operations, layer, layer.feed_forward, x, residual, index)
        if residual is not None:
            operations.end_layer(x, residual, index)
    return x, residual


def _mixed(
    operations: StepOperations,
    layer: Layer,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    index: int,
    *,
    is_last: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first part of a layer: the sum of x and residual, and the part's output. Without this part both as they
    are."""
    if layer.qkv is None or layer.o is None:
        kept = [part for part in (x, residual) if part is not None]
        x, *rest = operations.keep_heads(*kept) if is_last else kept
        return x, rest[0] if rest else None
    attended = _attended(operations, layer, layer.qkv, x, residual, index)
    if layer.beside is not None:
        output = operations.linear(layer.o, attended, index, OUT)
        return _with_recurrence(operations, layer, layer.beside, x, output, index, is_last=is_last)
    if is_last:
        x, attended = operations.keep_heads(x, attended)
    if not len(x):
        return x, None
    if layer.latents is not None:
        attended = operations.expand_latents(layer.latents, attended)
    output = operations.linear(layer.o, attended, index, OUT)
    if layer.is_parallel:
        return x, output
    output = operations.output(output, layer.post_attention_layernorm)
    operations.end_attention(x, output, index)
    return x, output


def _attended(
    operations: StepOperations, layer: Layer, qkv: Linear, x: torch.Tensor, residual: torch.Tensor | None, index: int
) -> torch.Tensor:
    projected = operations.linear_of_norm(qkv, x, residual, layer.input_layernorm, index, QKV)
    if layer.recurrent is not None:
        return operations.recur(layer.recurrent, projected, index)
    if layer.latents is not None:
        return operations.attend_latents(layer.latents, projected, index)
    return operations.attend(projected, index)


def _with_recurrence(
    operations: StepOperations,
    layer: Layer,
    part: Beside,
    x: torch.Tensor,
    output: torch.Tensor,
    index: int,
    *,
    is_last: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `_mixed`, for `output` of attention and a recurrence of the same input."""
    projected = operations.linear_of_norm(part.qkv, x, None, layer.input_layernorm, index, BESIDE_QKV)
    mixed = operations.recur(part.recurrent, projected, index)
    if is_last:
        x, output, mixed = operations.keep_heads(x, output, mixed)
    if not len(x):
        return x, None
    output = operations.linear(part.o, mixed, index, BESIDE_OUT, output)
    return x, operations.output(output, layer.post_attention_layernorm)


def _fed(
    operations: StepOperations,
    layer: Layer,
    part: FeedForward | RoutedExperts,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    index: int,
) -> torch.Tensor:
    """The output of the second part of a layer."""
    norm = layer.pre_feedforward_layernorm
    added, onto = (None, residual) if layer.is_parallel else (residual, None)
    if not isinstance(part, FeedForward):
        return operations.output(operations.experts(part, x, added, norm), layer.post_feedforward_layernorm)
    gate_up = operations.linear_of_norm(part.gate_up, x, added, norm, index, GATE_UP)
    output = operations.linear(part.down, operations.activated(gate_up, index), index, DOWN, onto)
    if (beside := layer.experts_beside) is not None:
        routed = operations.output(operations.experts(beside.experts, x, None, beside.norm), beside.output_norm)
        output = operations.add(operations.output(output, beside.dense_output_norm), routed)
    return operations.output(output, layer.post_feedforward_layernorm)
