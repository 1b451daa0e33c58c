"""A loaded decoder on a CPU. forward.py describes its pass, which one native call or single operations compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from step_protocol.columns import I64
from worker_svc.engine.backend import (
    Backend,
    ForwardBatch,
    HeadShape,
    LatentAttention,
    LatentShape,
    LatentTokens,
    QkvPart,
    RecurrentWeights,
)
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.forward import compute_layers
from worker_svc.engine.decoder.layer import RoutedExperts
from worker_svc.engine.decoder.operations import DecoderParts, LayerOperations, Progress
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.rotary import rotary_at
from worker_svc.engine.decoder.weights import WeightLoader


class FusedForward(Protocol):
    """A whole forward pass in one call."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab], valid until the next call."""

    @property
    def hidden(self) -> torch.Tensor:
        """See `DecoderModel.hidden`."""

    @property
    def captured(self) -> torch.Tensor:
        """See `DecoderModel.captured`."""

    def in_slices(self, batch: ForwardBatch, size: int) -> Iterator[torch.Tensor]:
        """The same logits, at most `size` rows at a time. Each slice overwrites the previous one."""


@runtime_checkable
class Fuser(Protocol):
    """A backend that may run a whole forward pass in one call."""

    def fuse(self, parts: DecoderParts, pool: KVCachePool) -> FusedForward | None:
        """None if this model must run operation by operation."""


class DecoderModel:
    """A loaded decoder. `forward` computes a step; `forward_in_slices` does the same for many rows of logits."""

    def __init__(self, parts: DecoderParts, backend: Backend) -> None:
        self.parts, self._config, self._backend = parts, parts.config, backend
        self._fused: FusedForward | None = None
        self._hidden_states = self._captured = torch.empty(0)

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        config: ModelConfig,
        backend: Backend,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> DecoderModel:
        """Reads all tensors. Raises CheckpointError."""
        return cls(DecoderParts.load(loader, config, max_model_len, progress), backend)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def hidden(self) -> torch.Tensor:
        """The float32 states [H, hidden] of the hidden tokens of the last step, after the final norm."""
        return self._hidden_states if self._fused is None else self._fused.hidden

    def capture(self, layers: tuple[int, ...]) -> None:
        """Keep the outputs of these layers, none of which is the last one. `fuse` follows."""
        self.parts = replace(self.parts, captures=layers)

    @property
    def captured(self) -> torch.Tensor:
        """The outputs [layers, T, hidden] of the captured layers in the last step."""
        return self._captured if self._fused is None else self._fused.captured

    def fuse(self, pool: KVCachePool) -> None:
        """Makes each forward pass one call, if the backend supports it. `forward` must then be called with this pool,
        and its result is overwritten by the next call."""
        if isinstance(self._backend, Fuser):
            self._fused = self._backend.fuse(self.parts, pool)

    def at(self, batch: ForwardBatch, positions: I64) -> ForwardBatch:
        """The same batch with tokens at these positions [3, T] on three axes."""
        rows = np.arange(positions.shape[1], dtype=np.int32)
        return replace(batch, positions=rows, rotary=rotary_at(self.parts.rotaries[0], positions))

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
        merged, *lines = batch.merged_heads()
        x, residual = self._hidden(replace(batch, head_tokens=merged), pool)
        heads, hidden = map(torch.from_numpy, lines)
        self._hidden_states = self._final(x[hidden], None if residual is None else residual[hidden]).float()
        return x[heads], None if residual is None else residual[heads]

    def _final(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        normed = torch.empty_like(x)
        self._backend.add_norm(x, residual, self.parts.final_norm, normed)
        return normed

    def _hidden(self, batch: ForwardBatch, pool: KVCachePool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stores keys and values of all tokens; returns the output of the last layer for the head tokens, [S, hidden],
        as two terms of a sum."""
        operations = _BackendOperations(self.parts, self._backend, batch, pool)
        found = compute_layers(operations, self.parts.layers)
        if self.parts.captures:
            self._captured = torch.stack([operations.captured[layer] for layer in self.parts.captures])
        return found

    def _logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if not len(x) or self.parts.head is None:
            return x.new_empty(0, self._config.vocab_size)
        logits = self.parts.head(self._final(x, residual))
        if self._config.logit_scale != 1.0:
            logits *= self._config.logit_scale
        if self._config.logit_soft_cap is not None:
            self._backend.soft_cap(logits, self._config.logit_soft_cap)
        return logits


class _BackendOperations(LayerOperations):
    """One step of a backend, operation by operation."""

    def __init__(self, parts: DecoderParts, backend: Backend, batch: ForwardBatch, pool: KVCachePool) -> None:
        super().__init__(parts, backend)
        self._backend = backend
        self._batch = batch
        self._pool = pool
        self._adapters = [(part.adapter, part.tokens) for part in batch.adapters]

    def embed(self) -> torch.Tensor:
        batch = self._batch
        token_ids = torch.from_numpy(batch.token_ids)
        x = self._parts.embedding[token_ids]
        if self._config.embedding_scale != 1.0:
            x *= torch.tensor(self._config.embedding_scale, dtype=x.dtype)
        if batch.embedded is not None:
            x[torch.from_numpy(batch.embedded.tokens)] = batch.embedded.rows
        if self._parts.position_embedding is not None:
            x += self._parts.position_embedding[torch.from_numpy(batch.positions).long()]
        return self._embedded(x, token_ids)

    def _adapt(self, index: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if self._adapters:
            self._backend.add_adapters(index, site, self._adapters, x, y)

    def _attend(self, qkv: torch.Tensor, index: int, stored: HeadShape) -> torch.Tensor:
        batch, backend, heads = self._of_layer(index), self._backend, self._config.layers[index].heads
        q, cache = qkv.new_empty(len(qkv), heads.num_q_heads, heads.head_dim), self._pool.layer(index)
        rotary = batch.rotary or self._parts.rotary(index)
        to = cache if stored.num_kv_heads else (cache[0][:, :0], cache[1][:, :0])
        part = QkvPart(stored, rotary, self._parts.layers[index].qk_norms)
        backend.qk_norm_rope_store(qkv, part, batch, to, q)
        attended = torch.empty_like(q)
        backend.paged_attention(q, cache, batch, attended, self._attention(index))
        return attended

    def _of_layer(self, index: int) -> ForwardBatch:
        return self._batch.of_group(self._pool.group_of[index])

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        states = self._pool.states
        if states is None:
            raise RuntimeError("a recurrent layer has no states: a bug in the engine")
        return self._backend.recurrent(layer, states, index, self._batch, projected)

    def _store_latents(
        self, queries: torch.Tensor, latents: torch.Tensor, part: LatentAttention, index: int, q: torch.Tensor
    ) -> None:
        tokens = LatentTokens(queries, latents, self._rotary(index))
        self._backend.latent_rope_store(tokens, part, self._of_layer(index), self._pool.latents(index), q)

    def _over_latents(self, q: torch.Tensor, shape: LatentShape, index: int) -> torch.Tensor:
        cache, scale = self._pool.latents(index), self._config.attention_scale
        return self._backend.latent_attention(q, cache, self._of_layer(index), shape, scale)

    def keep_heads(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        self._adapters = [(part.adapter, part.heads) for part in self._batch.adapters]
        heads = torch.from_numpy(self._batch.head_tokens)
        self._keep(heads)
        return [part[heads] for part in rows] if len(heads) < len(rows[0]) else list(rows)

    def _routed(self, part: RoutedExperts, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._backend.experts(x, logits, part.experts, self._config.activation, out)
        return out

    def _add_deep(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        deep = self._batch.deep
        if deep is None or index >= len(deep.rows):
            return
        tokens, rows = deep.tokens, deep.rows[index]
        if index == self._config.num_layers - 1:  # only the rows of head tokens are left
            heads = self._batch.head_tokens
            rows, tokens = rows[torch.from_numpy(np.isin(tokens, heads))], np.flatnonzero(np.isin(heads, tokens))
        places = torch.from_numpy(tokens)
        x[places] = x[places] + residual[places] + rows
        residual[places] = 0
