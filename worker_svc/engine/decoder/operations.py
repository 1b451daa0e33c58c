"""What all backends compute of a decoder's step in the same way: `StepOperations` over the operations on rows that a
backend has. A backend adds the embedding, attention, recurrence, and what its experts and adapters need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from worker_svc.engine.backend import (
    SITES,
    AttentionShape,
    DecoderRowOperations,
    HeadShape,
    LatentAttention,
    LatentShape,
    Linear,
    Norm,
    RotaryTable,
)
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.layer import Layer, RoutedExperts
from worker_svc.engine.decoder.per_layer import PerLayerTable, PerLayerWeights
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
    final_norm: Norm | None  # None: of a part of a decoder
    head: Linear | None  # None: the model has no logits
    rotaries: list[RotaryTable]
    per_layer: PerLayerTable | None = None
    streams: StreamTable | None = None
    captures: tuple[int, ...] = ()  # layers whose outputs are kept

    @classmethod
    def load(
        cls, loader: WeightLoader, config: ModelConfig, max_model_len: int, progress: Progress | None = None
    ) -> DecoderParts:
        """Reads all tensors. Raises CheckpointError."""
        rotaries = [rotary.table(max_model_len) for rotary in config.rotaries]
        report = progress or (lambda fraction: None)
        tables = loader.embedding(), loader.position_embedding()
        final_norm, layers = loader.final_norm(), list[Layer]()
        for index in range(config.num_layers):
            layers.append(loader.layer(index))
            report((index + 1) / (config.num_layers + 1))
        of_layers = loader.plain(config.per_layer_table()), loader.plain(config.stream_table())
        parts = cls(config, *tables, layers, final_norm, loader.head(), rotaries, *of_layers)
        report(1.0)
        return parts

    def rotary(self, index: int) -> RotaryTable | None:
        """The rotation of a layer."""
        rotary = self.config.layers[index].rotary
        return None if rotary is None else self.rotaries[rotary]


class LayerOperations(ABC):
    """One step; see `StepOperations`."""

    def __init__(self, parts: DecoderParts, rows: DecoderRowOperations) -> None:
        self._parts, self._config, self._rows = parts, parts.config, rows
        self._layer_inputs = torch.empty(0)  # [tokens, layers, width], if layers have inputs
        self._streams: ResidualStreams | None = None
        self.captured: dict[int, torch.Tensor] = {}  # by layer

    # Hooks of a backend

    @abstractmethod
    def _adapt(self, index: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """y += what adapters add to a linear layer of x."""

    @abstractmethod
    def _attend(self, qkv: torch.Tensor, index: int, stored: HeadShape) -> torch.Tensor:
        """Stores keys and values; the attention output [T, q_heads, head_dim]. Without KV heads in `stored`, another
        layer has stored them."""

    @abstractmethod
    def _store_latents(
        self, queries: torch.Tensor, latents: torch.Tensor, part: LatentAttention, index: int, q: torch.Tensor
    ) -> None:
        """Stores normed latents; writes the rotated parts of queries to q [T, heads, width], behind `rank` numbers."""

    @abstractmethod
    def _over_latents(self, q: torch.Tensor, shape: LatentShape, index: int) -> torch.Tensor:
        """The attention output [T, heads, rank] of q."""

    @abstractmethod
    def _routed(self, part: RoutedExperts, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The experts' output for x [n, hidden]."""

    @abstractmethod
    def _add_deep(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        """Adds the rows of DeepStack to x."""

    # Operations of all backends

    def _embedded(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The input of the first layer for input embeddings x."""
        if self._parts.per_layer is not None:
            self._layer_inputs = self._inputs_of_layers(self._parts.per_layer, x, token_ids)
        if self._parts.streams is None:
            return x
        self._streams = ResidualStreams(self._rows, self._parts.streams, x)
        return self._predicted(self._streams, 0)

    def _inputs_of_layers(self, part: PerLayerTable, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        width, hidden = self._config.layer_input_width, self._config.hidden_size
        projected = (part.projection(x) * hidden**-0.5).view(-1, width)
        self._rows.add_norm(projected, None, part.norm, projected)
        scale = float(torch.tensor(width**0.5, dtype=x.dtype))
        embedded = part.embedded(token_ids) * scale
        inputs: torch.Tensor = (projected.view(embedded.shape) + embedded) * 2.0**-0.5
        return inputs.view(len(x), -1, width)

    def _keep(self, tokens: torch.Tensor) -> None:
        """Only these tokens are left."""
        if len(self._layer_inputs):
            self._layer_inputs = self._layer_inputs[tokens]
        if self._streams is not None:
            self._streams.keep(tokens)

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = linear(x)
        if site < len(SITES):
            self._adapt(index, site, x, y)
        return y if onto is None else onto.add_(y)

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        return self.linear(linear, self._normed(x, residual, norm), index, site)

    def _normed(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        """Adds the residual to x; returns the norm of x."""
        normed = torch.empty_like(x)
        self._rows.add_norm(x, residual, norm, normed)
        return normed

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        spec, layer, gate = self._config.layers[index], self._parts.layers[index], None
        stored, q_size = spec.heads, spec.heads.num_q_heads * spec.heads.head_dim
        if spec.has_output_gate:
            qkv, gate = (part.contiguous() for part in torch.split(qkv, [qkv.shape[1] - q_size, q_size], 1))
        if spec.kv_owner is not None:  # the owner has stored keys and values
            stored = replace(stored, num_kv_heads=0)
        elif layer.value_norm is not None:
            values = qkv[:, -stored.num_kv_heads * stored.head_dim :]
            rows = values.reshape(-1, stored.head_dim).contiguous()
            values.copy_(self._normed(rows, None, layer.value_norm).view(values.shape))
        attended = self._attend(qkv, index, stored)
        if gate is not None:
            self._rows.gate_outputs(attended.view(gate.shape), gate)
        return attended.view(len(qkv), -1)

    def _attention(self, index: int) -> AttentionShape:
        return replace(self._config.attention(index), sinks=self._parts.layers[index].sinks)

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        shape = part.shape
        kept = shape.rank + shape.rope_dim
        queries, latents = torch.split(joined, [joined.shape[1] - kept, kept], 1)
        if part.query is not None and part.query_norm is not None:
            queries = part.query(self._normed(queries.contiguous(), None, part.query_norm))
        q = joined.new_empty(len(joined), shape.num_heads, shape.width)
        self._store_latents(queries, latents, part, index, q)
        for head, (linear, own) in enumerate(zip(part.absorb, torch.split(queries, shape.query_dim, 1), strict=True)):
            q[:, head, : shape.rank] = linear(own[:, : shape.key_dim].contiguous())
        return self._over_latents(q, shape, index).reshape(len(q), -1)

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        heads = torch.split(attended, part.shape.rank, 1)
        return torch.cat([linear(x.contiguous()) for linear, x in zip(part.expand, heads, strict=True)], 1)

    def _rotary(self, index: int) -> RotaryTable:
        rotary = self._parts.rotary(index)
        if rotary is None:
            raise TypeError(f"layer {index} has latent attention and no rotation: a bug in config.py")
        return rotary

    def activated(self, gate_up: torch.Tensor, index: int) -> torch.Tensor:
        if not self._config.is_gated:
            self._rows.activation(gate_up, self._config.activation)
            return gate_up
        if (cutoff := self._config.layers[index].gate_cutoff) is not None:
            gate_up = sparse_gates(gate_up, cutoff)
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._rows.gated_activation(gate_up, activated, self._config.activation)
        return activated

    def experts(
        self, part: RoutedExperts, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        normed = self._normed(x, residual, norm)
        routed = normed if part.router_norm is None else self._normed(x, None, part.router_norm)
        return self._routed(part, normed, part.logits(routed))

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            self._rows.add_norm(x, None, norm, x)
        if self._config.residual_scale != 1.0:
            x *= self._config.residual_scale
        return x

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x.add_(other)

    def end_attention(self, x: torch.Tensor, output: torch.Tensor, index: int) -> None:
        layer = self._parts.layers[index]
        if layer.laurel is not None:
            layer.laurel.add(self._rows, x, output, layer.input_layernorm)

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
        self._rows.activation(gate, self._config.activation)
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
