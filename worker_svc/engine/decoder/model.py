"""The decoder: the forward pass over a mixed batch, as ModelConfig describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from step_protocol.columns import I32, I64
from worker_svc.engine.adapters.packed import PackedAdapter
from worker_svc.engine.adapters.targets import SITES
from worker_svc.engine.backend import Backend, ForwardBatch, Linear, Norm, RotaryTable
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.kv_cache import KVCachePool
from worker_svc.engine.decoder.rotary import rotary_at
from worker_svc.engine.decoder.weights import Layer, RoutedExperts, WeightLoader

Progress = Callable[[float], None]
QKV, OUT, GATE_UP, DOWN = range(len(SITES))


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Everything that a forward pass reads."""

    config: ModelConfig
    embedding: torch.Tensor
    position_embedding: torch.Tensor | None
    layers: list[Layer]
    final_norm: Norm
    head: Linear | None  # None: the model has no logits
    rotaries: list[RotaryTable]

    def rotary(self, index: int) -> RotaryTable | None:
        """The rotation of a layer."""
        rotary = self.config.layers[index].rotary
        return None if rotary is None else self.rotaries[rotary]


class FusedForward(Protocol):
    """A whole forward pass in one call."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab], valid until the next call."""
        ...

    @property
    def hidden(self) -> torch.Tensor:
        """See `DecoderModel.hidden`."""
        ...

    def in_slices(self, batch: ForwardBatch, size: int) -> Iterator[torch.Tensor]:
        """The same logits, at most `size` rows at a time. Each slice overwrites the previous one."""
        ...


@runtime_checkable
class Fuser(Protocol):
    """A backend that may run a whole forward pass in one call."""

    def fuse(self, parts: DecoderParts, pool: KVCachePool) -> FusedForward | None:
        """None if this model must run operation by operation."""
        ...


class DecoderModel:
    """A loaded decoder. `forward` computes a step; `forward_in_slices` does the same for many rows of logits."""

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        backend: Backend,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._backend = backend
        rotaries = [rotary.table(max_model_len) for rotary in config.rotaries]
        total = config.num_layers + 1
        report = progress or (lambda fraction: None)
        tables = loader.embedding(), loader.position_embedding()
        final_norm = loader.final_norm()
        layers = []
        for index in range(config.num_layers):
            layers.append(loader.layer(index))
            report((index + 1) / total)
        self._parts = DecoderParts(config, *tables, layers, final_norm, loader.head(), rotaries)
        self._fused: FusedForward | None = None
        self._hidden_states = torch.empty(0)
        report(1.0)

    @property
    def hidden(self) -> torch.Tensor:
        """The float32 states [H, hidden] of the hidden tokens of the last step, after the final norm."""
        return self._hidden_states if self._fused is None else self._fused.hidden

    def fuse(self, pool: KVCachePool) -> None:
        """Makes each forward pass one call, if the backend supports it. `forward` must then be called with this pool,
        and its result is overwritten by the next call."""
        if isinstance(self._backend, Fuser):
            self._fused = self._backend.fuse(self._parts, pool)

    def at(self, batch: ForwardBatch, positions: I64) -> ForwardBatch:
        """The same batch with tokens at these positions [3, T] on three axes."""
        rows = np.arange(positions.shape[1], dtype=np.int32)
        return replace(batch, positions=rows, rotary=rotary_at(self._parts.rotaries[0], positions))

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """Stores keys and values of all tokens; returns logits [S, vocab] of the head tokens."""
        if self._fused is not None:
            return self._fused(batch)
        return self._logits(*self._head_states(batch, pool))

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]:
        """As `forward`, but returns the logits `size` rows at a time. Each slice may overwrite the previous one."""
        if self._fused is not None:
            yield from self._fused.in_slices(batch, size)
            return
        x, residual = self._head_states(batch, pool)
        for start in range(0, len(x), size):
            end = start + size
            yield self._logits(x[start:end], None if residual is None else residual[start:end])

    def _head_states(self, batch: ForwardBatch, pool: KVCachePool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`_hidden` of the head tokens. Keeps the states of the hidden tokens."""
        if batch.hidden_tokens is None:
            return self._hidden(batch, pool)
        heads, is_hidden = batch.merged_heads()
        x, residual = self._hidden(replace(batch, head_tokens=heads), pool)
        hidden, others = torch.from_numpy(is_hidden), torch.from_numpy(~is_hidden)
        self._hidden_states = self._final(x[hidden], None if residual is None else residual[hidden]).float()
        return x[others], None if residual is None else residual[others]

    def _final(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        normed = torch.empty_like(x)
        self._backend.add_norm(x, residual, self._parts.final_norm, normed)
        return normed

    def _hidden(self, batch: ForwardBatch, pool: KVCachePool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stores keys and values of all tokens; returns the output of the last layer for the head tokens, [S, hidden],
        as two terms of a sum."""
        x = self._embed(batch)
        heads = torch.from_numpy(batch.head_tokens)
        last = self._config.num_layers - 1
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._parts.layers):
            attended = self._attend(x, residual, index, batch, pool.layer(index))
            if index == last and len(heads) < len(x):
                x, attended = x[heads], attended[heads]  # the remaining operations need only these tokens
            if not len(x):
                return x, None
            rows = _adapter_rows(batch, of_heads=index == last)
            attended = self._adapted(layer.o, OUT, index, rows, attended)
            residual = self._feed(x, self._normed(attended, layer.attended_norm), index, rows)
            if batch.deep is not None and index < len(batch.deep.rows):
                _add_deep(x, residual, torch.from_numpy(batch.deep.tokens), batch.deep.rows[index])
        return x, residual

    def _adapted(
        self, linear: Linear, site: int, index: int, rows: Sequence[tuple[PackedAdapter, I32]], x: torch.Tensor
    ) -> torch.Tensor:
        """The output of a linear layer, with what adapters add to their rows of it."""
        y = linear(x)
        if rows:
            self._backend.add_adapters(index, site, rows, x, y)
        return y

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._parts.embedding[torch.from_numpy(batch.token_ids)]
        if self._config.embedding_scale != 1.0:
            x *= torch.tensor(self._config.embedding_scale, dtype=x.dtype)
        if batch.embedded is not None:
            x[torch.from_numpy(batch.embedded.tokens)] = batch.embedded.rows
        if self._parts.position_embedding is not None:
            x += self._parts.position_embedding[torch.from_numpy(batch.positions).long()]
        return x

    def _attend(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        index: int,
        batch: ForwardBatch,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Adds the residual to x; returns the attention output [T, q_heads * head_dim]."""
        backend, heads, layer = self._backend, self._config.heads, self._parts.layers[index]
        normed = torch.empty_like(x)
        backend.add_norm(x, residual, layer.input_norm, normed)
        qkv = self._adapted(layer.qkv, QKV, index, _adapter_rows(batch, of_heads=False), normed)
        q = x.new_empty(len(x), heads.num_q_heads, heads.head_dim)
        rotary = batch.rotary or self._parts.rotary(index)
        backend.qk_norm_rope_store(qkv, layer.qk_norms, rotary, batch, cache, q, heads)
        attended = torch.empty_like(q)
        backend.paged_attention(q, cache, batch, attended, self._config.attention(index))
        return attended.view(len(x), -1)

    def _feed(
        self, x: torch.Tensor, residual: torch.Tensor, index: int, rows: Sequence[tuple[PackedAdapter, I32]]
    ) -> torch.Tensor:
        """Adds the residual to x; returns the output of the feed-forward part [n, hidden]."""
        normed, layer = torch.empty_like(x), self._parts.layers[index]
        self._backend.add_norm(x, residual, layer.post_norm, normed)
        part = layer.feed_forward
        if isinstance(part, RoutedExperts):
            return self._normed(self._expert(normed, part), layer.fed_norm)
        hidden = self._activated(self._adapted(part.gate_up, GATE_UP, index, rows, normed))
        return self._normed(self._adapted(part.down, DOWN, index, rows, hidden), layer.fed_norm)

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._config.is_gated:
            self._backend.activation(hidden, self._config.activation)
            return hidden
        activated = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
        self._backend.gated_activation(hidden, activated, self._config.activation)
        return activated

    def _expert(self, normed: torch.Tensor, part: RoutedExperts) -> torch.Tensor:
        out = torch.empty_like(normed)
        self._backend.experts(normed, part.router(normed), part.experts, self._config.activation, out)
        return out

    def _normed(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            self._backend.add_norm(x, None, norm, x)
        return x

    def _logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if not len(x) or self._parts.head is None:
            return x.new_empty(0, self._config.vocab_size)
        logits = self._parts.head(self._final(x, residual))
        if self._config.logit_soft_cap is not None:
            self._backend.soft_cap(logits, self._config.logit_soft_cap)
        return logits


def _adapter_rows(batch: ForwardBatch, *, of_heads: bool) -> list[tuple[PackedAdapter, I32]]:
    """The adapters of a step, with their rows among all tokens or among the head tokens."""
    return [(part.adapter, part.heads if of_heads else part.tokens) for part in batch.adapters]


def _add_deep(x: torch.Tensor, residual: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds the residual and `rows` to some tokens of x; their residual is 0 then. Other tokens stay as they are."""
    x[tokens] = x[tokens] + residual[tokens] + rows
    residual[tokens] = 0
