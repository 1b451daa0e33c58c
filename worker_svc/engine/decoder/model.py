"""A loaded decoder on a CPU. forward.py describes its pass, which one native call or single operations compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from step_protocol.columns import I64
from worker_svc.engine.backend import (
    SITES,
    AttentionShape,
    Backend,
    ForwardBatch,
    LatentAttention,
    Linear,
    Norm,
    RecurrentWeights,
    RotaryTable,
)
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.forward import compute_layers
from worker_svc.engine.decoder.layer import Layer, RoutedExperts
from worker_svc.engine.decoder.per_layer import PerLayerTable, PerLayerWeights
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.rotary import rotary_at
from worker_svc.engine.decoder.streams import ResidualStreams, StreamTable, sparse_gates
from worker_svc.engine.decoder.weights import WeightLoader

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Everything that a forward pass reads."""

    config: ModelConfig
    embedding: torch.Tensor
    position_embedding: torch.Tensor | None
    layers: list[Layer]
    final_norm: Norm | None
    head: Linear | None  # None: the model has no logits
    rotaries: list[RotaryTable]
    per_layer: PerLayerTable | None = None
    streams: StreamTable | None = None
    captures: tuple[int, ...] = ()  # layers whose outputs are kept

    def rotary(self, index: int) -> RotaryTable | None:
        """The rotation of a layer."""
        rotary = self.config.layers[index].rotary
        return None if rotary is None else self.rotaries[rotary]


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
        rotaries = [rotary.table(max_model_len) for rotary in config.rotaries]
        total = config.num_layers + 1
        report = progress or (lambda fraction: None)
        tables = loader.embedding(), loader.position_embedding()
        final_norm = loader.final_norm()
        layers = []
        for index in range(config.num_layers):
            layers.append(loader.layer(index))
            report((index + 1) / total)
        of_layers = loader.plain(config.per_layer_table()), loader.plain(config.stream_table())
        parts = DecoderParts(config, *tables, layers, final_norm, loader.head(), rotaries, *of_layers)
        report(1.0)
        return cls(parts, backend)

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


class _BackendOperations:
    """One step of a backend, operation by operation; see `StepOperations`."""

    def __init__(self, parts: DecoderParts, backend: Backend, batch: ForwardBatch, pool: KVCachePool) -> None:
        self._parts = parts
        self._config = parts.config
        self._backend = backend
        self._batch = batch
        self._pool = pool
        self._adapters = [(part.adapter, part.tokens) for part in batch.adapters]
        self._layer_inputs = torch.empty(0)  # [tokens, layers, width], if layers have inputs
        self._streams: ResidualStreams | None = None
        self.captured: dict[int, torch.Tensor] = {}  # by layer

    def embed(self) -> torch.Tensor:
        batch = self._batch
        x = self._parts.embedding[torch.from_numpy(batch.token_ids)]
        if self._config.embedding_scale != 1.0:
            x *= torch.tensor(self._config.embedding_scale, dtype=x.dtype)
        if batch.embedded is not None:
            x[torch.from_numpy(batch.embedded.tokens)] = batch.embedded.rows
        if self._parts.position_embedding is not None:
            x += self._parts.position_embedding[torch.from_numpy(batch.positions).long()]
        if self._parts.per_layer is not None:
            self._layer_inputs = self._inputs_of_layers(self._parts.per_layer, x)
        if self._parts.streams is None:
            return x
        self._streams = ResidualStreams(self._backend, self._parts.streams, x)
        return self._predicted(self._streams, 0)

    def _inputs_of_layers(self, part: PerLayerTable, x: torch.Tensor) -> torch.Tensor:
        width, hidden = self._config.layer_input_width, self._config.hidden_size
        projected = (part.projection(x) * hidden**-0.5).view(-1, width)
        self._backend.add_norm(projected, None, part.norm, projected)
        embedded = part.embedded(torch.from_numpy(self._batch.token_ids)) * torch.tensor(width**0.5, dtype=x.dtype)
        inputs: torch.Tensor = (projected.view(embedded.shape) + embedded) * 2.0**-0.5
        return inputs.view(len(x), -1, width)

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = linear(x)
        if self._adapters and site < len(SITES):
            self._backend.add_adapters(index, site, self._adapters, x, y)
        return y if onto is None else onto.add_(y)

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        return self.linear(linear, self._normed(x, residual, norm), index, site)

    def _normed(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        normed = torch.empty_like(x)
        self._backend.add_norm(x, residual, norm, normed)
        return normed

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        batch, backend, spec = self._of_layer(index), self._backend, self._config.layers[index]
        heads, gate, layer = spec.heads, None, self._parts.layers[index]
        q_size = heads.num_q_heads * heads.head_dim
        if spec.has_output_gate:
            qkv, gate = (part.contiguous() for part in torch.split(qkv, [qkv.shape[1] - q_size, q_size], 1))
        q, cache = qkv.new_empty(len(qkv), heads.num_q_heads, heads.head_dim), self._pool.layer(index)
        rotary = batch.rotary or self._parts.rotary(index)
        stored, to = heads, cache
        if spec.kv_owner is not None:  # the owner has stored keys and values
            stored, to = replace(heads, num_kv_heads=0), (cache[0][:, :0], cache[1][:, :0])
        elif layer.value_norm is not None:
            values = qkv[:, -heads.num_kv_heads * heads.head_dim :]
            values.copy_(
                self._normed(values.reshape(-1, heads.head_dim).contiguous(), None, layer.value_norm).view(values.shape)
            )
        backend.qk_norm_rope_store(qkv, layer.qk_norms, rotary, batch, to, q, stored)
        attended = torch.empty_like(q)
        backend.paged_attention(q, cache, batch, attended, self._attention(index))
        if gate is not None:
            backend.gate_outputs(attended.view(gate.shape), gate)
        return attended.view(len(qkv), -1)

    def _of_layer(self, index: int) -> ForwardBatch:
        return self._batch.of_group(self._pool.group_of[index])

    def _attention(self, index: int) -> AttentionShape:
        return replace(self._config.attention(index), sinks=self._parts.layers[index].sinks)

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        states = self._pool.states
        if states is None:
            raise RuntimeError("a recurrent layer has no states: a bug in the engine")
        return self._backend.recurrent(layer, states, index, self._batch, projected)

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        shape, backend, rotary = part.shape, self._backend, self._parts.rotary(index)
        if rotary is None:
            raise TypeError(f"layer {index} has latent attention and no rotation: a bug in config.py")
        kept = shape.rank + shape.rope_dim
        source, latents = torch.split(joined, [joined.shape[1] - kept, kept], 1)
        queries = source
        if part.query is not None and part.query_norm is not None:
            queries = part.query(self._normed(source.contiguous(), None, part.query_norm))
        q, cache = joined.new_empty(len(joined), shape.num_heads, shape.width), self._pool.latents(index)
        batch = self._of_layer(index)
        backend.latent_rope_store(queries, latents, part.norm, rotary, batch, cache, q, shape)
        for head, (linear, own) in enumerate(zip(part.absorb, torch.split(queries, shape.query_dim, 1), strict=True)):
            q[:, head, : shape.rank] = linear(own[:, : shape.key_dim].contiguous())
        attended = q.new_empty(len(q), shape.num_heads, shape.rank)
        backend.latent_attention(q, cache, batch, attended, shape, self._config.attention_scale)
        return attended.view(len(q), -1)

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        heads = torch.split(attended, part.shape.rank, 1)
        return torch.cat([linear(x.contiguous()) for linear, x in zip(part.expand, heads, strict=True)], 1)

    def keep_heads(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        self._adapters = [(part.adapter, part.heads) for part in self._batch.adapters]
        heads = torch.from_numpy(self._batch.head_tokens)
        if len(self._layer_inputs):
            self._layer_inputs = self._layer_inputs[heads]
        if self._streams is not None:
            self._streams.keep(heads)
        return [part[heads] for part in rows] if len(heads) < len(rows[0]) else list(rows)

    def activated(self, gate_up: torch.Tensor, index: int) -> torch.Tensor:
        if not self._config.is_gated:
            self._backend.activation(gate_up, self._config.activation)
            return gate_up
        if (cutoff := self._config.layers[index].gate_cutoff) is not None:
            gate_up = sparse_gates(gate_up, cutoff)
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._backend.gated_activation(gate_up, activated, self._config.activation)
        return activated

    def experts(
        self, part: RoutedExperts, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        normed, out = self._normed(x, residual, norm), torch.empty_like(x)
        routed = normed if part.router_norm is None else self._normed(x, None, part.router_norm)
        self._backend.experts(normed, part.logits(routed), part.experts, self._config.activation, out)
        return out

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            self._backend.add_norm(x, None, norm, x)
        if self._config.residual_scale != 1.0:
            x *= self._config.residual_scale
        return x

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x += other
        return x

    def end_attention(self, x: torch.Tensor, output: torch.Tensor, index: int) -> None:
        layer = self._parts.layers[index]
        if layer.laurel is not None:
            layer.laurel.add(self._backend, x, output, layer.input_layernorm)

    def _predicted(self, streams: ResidualStreams, index: int) -> torch.Tensor:
        """The input of a layer, or after the last one the output of all."""
        if index == len(self._parts.layers):
            return streams.merged()
        part = self._parts.layers[index].streams
        if part is None:
            raise RuntimeError(f"layer {index} has no streams, but the model has: a bug in config.py")
        return streams.predict(part)

    def _of_input(self, part: PerLayerWeights, x: torch.Tensor, index: int) -> torch.Tensor:
        """What a layer's own input adds, gated with x [n, hidden]."""
        gate = part.gate(x)
        self._backend.activation(gate, self._config.activation)
        return self._normed(part.projection(gate * self._layer_inputs[:, index]), None, part.norm)

    def end_layer(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        """Adds the residual, what the layer's own input says, and the rows of DeepStack to x: the residual of changed
        tokens is 0 then."""
        layer = self._parts.layers[index]
        if layer.per_layer is not None or layer.scale != 1.0:
            x += residual
            residual.zero_()
        if self._streams is not None and layer.streams is not None:
            corrected = self._streams.correct(layer.streams, x)
            if layer.per_layer is not None:
                self._streams.add(self._of_input(layer.per_layer, corrected, index))
            x.copy_(self._predicted(self._streams, index + 1))
        elif layer.per_layer is not None:
            x += self._of_input(layer.per_layer, x, index)
        if layer.scale != 1.0:
            x *= layer.scale
        self._add_deep(x, residual, index)
        if index in self._parts.captures:
            self.captured[index] = x + residual

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
