"""The layers of encoders, encoder-decoders and vision towers: attention, perhaps cross-attention, and a feed-forward
part, each added to a residual, and how their tensors are read.

A norm precedes each part (pre-norm), or follows its sum. As in decoder/forward.py, x and residual are two terms of a
sum: the first operation of a part adds the output of the part before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from worker_svc.engine.backend import (
    AttentionShape,
    Cache,
    ForwardBatch,
    LayerBackend,
    Linear,
    Norm,
    QkvPart,
    RotaryTable,
)
from worker_svc.engine.checkpoint.architecture import NormKind
from worker_svc.engine.checkpoint.tensors import Checkpoint

QUICK_GELU = 1.702


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Queries of a decoder; kv is [k | v] of the encoder's output."""

    norm: Norm
    q: Linear
    kv: Linear
    o: Linear


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Weights of one layer. qkv is [q | k | v] of all heads; up is [gate | up] if the feed-forward part has a gate."""

    attention_norm: Norm | None  # None: in the first layer of ModernBERT
    qkv: Linear
    o: Linear
    feed_norm: Norm
    up: Linear
    down: Linear
    cross: CrossAttention | None = None


class LayerReader:
    """Reads the tensors of a model that is not quantized, in one number type. `read`: their names so far."""

    def __init__(
        self, checkpoint: Checkpoint, maker: LayerBackend, dtype: torch.dtype, norm: NormKind, norm_eps: float
    ) -> None:
        self._checkpoint = checkpoint
        self._maker = maker
        self._dtype = dtype
        self._norm = norm
        self._norm_eps = norm_eps
        self.read: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.read.add(name)
        return self._checkpoint.tensor(name, shape, self._dtype).to(self._maker.device)

    def linear(self, names: Sequence[str], outputs: int, inputs: int, has_bias: bool | Sequence[bool]) -> Linear:
        """Layers of `outputs` each as one. `has_bias`: of all, or of each; a bias that one of several lacks is 0."""
        weight = torch.cat([self.tensor(f"{name}.weight", (outputs, inputs)) for name in names])
        has_biases = [has_bias] * len(names) if isinstance(has_bias, bool) else has_bias
        if not any(has_biases):
            return self._maker.make_linear(weight, None)
        biases = (
            self.tensor(f"{name}.bias", (outputs,)) if has else self._zeros(outputs)
            for name, has in zip(names, has_biases, strict=True)
        )
        return self._maker.make_linear(weight, torch.cat(list(biases)))

    def norm(self, name: str, size: int, *, has_bias: bool = True) -> Norm:
        weight, bias = self.tensor(f"{name}.weight", (size,)), None
        if self._norm == "layer":  # the kernels read a bias
            bias = self.tensor(f"{name}.bias", (size,)) if has_bias else self._zeros(size)
        return Norm(weight, bias, self._norm_eps, self._norm)

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self._dtype, device=self._maker.device)


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """The rows of a batch, where their keys and values are, and how they attend to them."""

    batch: ForwardBatch
    cache: Cache
    shape: AttentionShape
    rotary: RotaryTable | None = None


@dataclass(frozen=True, slots=True)
class LayerRunner:
    """Computes layers of one form."""

    backend: LayerBackend
    activation: str
    is_gated: bool
    is_pre_norm: bool

    def run(
        self,
        layer: StackLayer,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        own: AttentionInput,
        cross: AttentionInput | None = None,
    ) -> torch.Tensor | None:
        """Adds the residual to x; returns the residual of the layer, if norms precede its parts."""
        part, to = layer.cross, cross
        residual = self._add(x, residual, layer.attention_norm, lambda y: layer.o(self._attend(layer.qkv(y), own)))
        if part is not None and to is not None:
            residual = self._add(x, residual, part.norm, lambda y: part.o(self._heads(part.q(y), to)))
        return self._add(x, residual, layer.feed_norm, lambda y: layer.down(self._activated(layer.up(y))))

    def _add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm | None,
        compute: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """Adds a part of a layer."""
        if not self.is_pre_norm:
            self.backend.add_norm(x, compute(x), norm, x)
            return None
        normed = torch.empty_like(x)
        self.backend.add_norm(x, residual, norm, normed)
        return compute(normed)

    def _attend(self, qkv: torch.Tensor, own: AttentionInput) -> torch.Tensor:
        """Stores the keys and values of [q | k | v]; the output of the heads [T, q_heads * head_dim]."""
        heads = own.shape.heads
        q = qkv.new_empty(len(qkv), heads.num_q_heads, heads.head_dim)
        self.backend.qk_norm_rope_store(qkv, QkvPart(heads, own.rotary), own.batch, own.cache, q)
        return self._heads(q, own)

    def _heads(self, q: torch.Tensor, to: AttentionInput) -> torch.Tensor:
        """The output of the heads for queries, over keys and values that are stored."""
        q = q.view(len(q), to.shape.heads.num_q_heads, to.shape.heads.head_dim)
        attended = torch.empty_like(q)
        self.backend.paged_attention(q, to.cache, to.batch, attended, to.shape)
        return attended.view(len(q), -1)

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        """The activation of up, or of [gate | up]."""
        if self.activation == "relu":
            gate, up = hidden.chunk(2, dim=-1) if self.is_gated else (hidden, None)
            return gate.relu() if up is None else gate.relu() * up
        if self.is_gated:
            activated = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
            self.backend.gated_activation(hidden, activated, self.activation)
            return activated
        if self.activation == "quick_gelu":
            wide = hidden.float() * QUICK_GELU  # x * sigmoid(1.702 x) = silu(1.702 x) / 1.702
            self.backend.activation(wide, "silu")
            return (wide / QUICK_GELU).to(hidden.dtype)
        self.backend.activation(hidden, self.activation)
        return hidden


def pieces(batch: ForwardBatch, size: int | None = None) -> Iterator[ForwardBatch]:
    """The rows of a batch one after the other, as batches of up to `size` tokens. None: of all tokens of a row."""
    for i, (start, end) in enumerate(
        zip(batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist(), strict=True)
    ):
        for first in range(start, end, size or end - start):
            tokens = slice(first, min(first + (size or end), end))
            yield replace(
                batch,
                token_ids=batch.token_ids[tokens],
                positions=batch.positions[tokens],
                slots=batch.slots[tokens],
                rows=batch.rows[i : i + 1],
                query_starts=np.array([0, tokens.stop - first], np.int32),
                context_lens=batch.context_lens[i : i + 1] + (first - start),
                key_lens=None if batch.key_lens is None else batch.key_lens[i : i + 1],
                token_types=None if batch.token_types is None else batch.token_types[tokens],
            )
