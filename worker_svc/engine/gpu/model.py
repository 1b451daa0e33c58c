"""The decoder on the device: one forward pass over the columns of a step. It never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from step_protocol.columns import I64
from worker_svc.engine.backend import (
    SITES,
    AttentionShape,
    HeadShape,
    LatentAttention,
    LatentShape,
    LatentTokens,
    Linear,
    Norm,
    RecurrentWeights,
    RotaryTable,
)
from worker_svc.engine.cpu import recurrent, torch_ops
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.forward import compute_layers
from worker_svc.engine.decoder.layer import RoutedExperts
from worker_svc.engine.decoder.operations import DecoderParts, LayerOperations
from worker_svc.engine.decoder.rotary import rotary_at
from worker_svc.engine.decoder.weights import WeightLoader
from worker_svc.engine.gpu.attention.paged import Attention, DevicePool, LayerCache, host_lengths
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels.activation import activate, gated_activation, soft_cap
from worker_svc.engine.gpu.kernels.norm import add_norm, add_norm_rows, can_round
from worker_svc.engine.gpu.kernels.rope_store import rope_store
from worker_svc.engine.gpu.layers.experts import StackedExperts, compute_experts
from worker_svc.engine.gpu.layers.linears import Fp8Linear
from worker_svc.engine.gpu.layers.weights import kv_scales
from worker_svc.engine.gpu.step.step_buffer import StepColumns
from worker_svc.engine.recurrent import StatePool


class DeviceDecoder:
    """A loaded decoder, or one rank's shard. `forward` computes a step; `states` and `logits` compute its parts."""

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        group: Group,
        max_positions: int,
        device: torch.device,
        progress: Callable[[float], None],
        *,
        has_scaled_cache: bool = False,
    ) -> None:
        self.config = config
        self.group = group
        parts = DecoderParts.load(loader, config, max_positions, progress)
        self.parts = replace(parts, rotaries=[rotary.to(device) for rotary in parts.rotaries])
        self.states: StatePool | None = None  # None: no layer is recurrent
        self._vocab = group.vocab_part(config.vocab_size)
        # Rounded to the model's dtype before it multiplies, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=parts.embedding.dtype))
        self.max_positions = config.max_position_embeddings
        self.kv_scales = [
            kv_scales(layer, spec.heads) if has_scaled_cache and spec.attends else None
            for layer, spec in zip(parts.layers, config.layers, strict=True)
        ]

    def rotary_at(self, positions: I64) -> RotaryTable:
        """The rotation of tokens at these positions [3, T] on three axes."""
        return rotary_at(self.parts.rotaries[0], positions)

    @property
    def final_norm(self) -> Norm:
        if self.parts.final_norm is None:
            raise RuntimeError("a decoder has no final norm: a bug in its loader")
        return self.parts.final_norm

    @property
    def has_logits(self) -> bool:
        return self.parts.head is not None

    def forward(self, columns: StepColumns, attention: Attention, cache: DevicePool) -> torch.Tensor | None:
        """Stores keys and values of all tokens in the cache.

        Returns logits [S, this rank's part of the vocabulary], or None if no row samples or the model has no logits.
        """
        normed = self.hidden(columns, attention, cache, columns.sample_tokens)
        return self.logits(normed) if len(normed) and self.has_logits else None

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [n, this rank's part of the vocabulary] of hidden states [n, dim]."""
        if self.parts.head is None:
            raise RuntimeError("the model has no logits, but a row asks for some: PoolingTable refuses it")
        logits = self.parts.head(normed)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if self.config.logit_soft_cap is not None:
            soft_cap(logits, self.config.logit_soft_cap)
        return logits

    def hidden(
        self, columns: StepColumns, attention: Attention, cache: DevicePool, tokens: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, but returns the normalized hidden states [n, dim] of `tokens`, indices [n] of tokens of the
        step."""
        x, residual = compute_layers(_DeviceOperations(self, columns, attention, cache, tokens), self.parts.layers)
        if not len(x):
            return x
        normed = torch.empty_like(x)
        add_norm(x, residual, self.parts.final_norm, normed)
        return normed

    def embed(self, columns: StepColumns) -> torch.Tensor:
        """Input embeddings [T, dim]."""
        x = self._look_up(columns.token_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if columns.host is not None and (inputs := columns.host.inputs) is not None:
            x.index_copy_(0, inputs.tokens, inputs.rows)
        if (table := self.parts.position_embedding) is not None:
            x = x + F.embedding(columns.positions, table)
        return x

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.parts.embedding)
        local = token_ids - self._vocab.start
        is_here = (local >= 0) & (local < len(self._vocab))
        x = F.embedding(local.clamp(0, len(self._vocab) - 1), self.parts.embedding)
        return self.group.all_reduce(x.masked_fill(~is_here[:, None], 0.0))


class DeviceRows:
    """The operations on rows of a device."""

    add_norm = staticmethod(add_norm)
    gated_activation = staticmethod(gated_activation)
    activation = staticmethod(activate)
    gate_outputs = staticmethod(torch_ops.gate_outputs)
    soft_cap = staticmethod(soft_cap)


class _DeviceOperations(LayerOperations):
    """One step of a device."""

    def __init__(
        self,
        model: DeviceDecoder,
        columns: StepColumns,
        attention: Attention,
        cache: DevicePool,
        tokens: torch.Tensor,
    ) -> None:
        super().__init__(model.parts, DeviceRows())
        self._model = model
        self._columns = columns
        self._attends = attention
        self._cache = cache
        self._tokens = tokens
        self._adapters = columns.adapters

    def embed(self) -> torch.Tensor:
        x = self._model.embed(self._columns)
        self._attends.begin(self._columns)
        return self._embedded(x, self._columns.token_ids)

    def _adapt(self, index: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if self._adapters is not None:
            self._adapters.add(index, site, x, y)

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        if not (isinstance(linear, Fp8Linear) and can_round(x.shape[1], linear.weight.group)):
            return super().linear_of_norm(linear, x, residual, norm, index, site)
        y = linear.of_rows(add_norm_rows(x, residual, norm, linear.weight.group), x.dtype)
        # Inputs of adapters are not rounded; other rows keep the kernel of steps without adapters.
        if self._adapters is not None and site < len(SITES):
            self._adapters.add(index, site, self._normed(x, None, norm), y)
        return y

    def _attend(self, qkv: torch.Tensor, index: int, stored: HeadShape) -> torch.Tensor:
        heads, columns = self._config.layers[index].heads, self._columns
        q = qkv.new_empty(len(qkv), heads.num_q_heads, heads.head_dim)
        cache = LayerCache(*self._cache.layer(index), self._model.kv_scales[index])
        rotary, positions = self._parts.rotary(index), columns.positions
        if columns.host is not None and columns.host.rotary is not None:
            rotary, positions = columns.host.rotary, torch.arange(len(q), dtype=torch.int32, device=q.device)
        rope_store(
            qkv, self._parts.layers[index].qk_norms, rotary, positions, columns.slots, cache.pools, q, stored,
            cache.scales,
        )  # fmt: skip
        attended = torch.empty_like(q)
        self._attends.attend(q, cache, columns, self._attention(index), attended)
        return attended

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        states, columns = self._model.states, self._columns
        if states is None:
            raise RuntimeError("a recurrent layer has no states: a bug in the engine")
        spec, of_layer, queries = states.spec(index), states.layer(index), columns.queries
        if columns.bucket.is_decode:
            is_row = torch.arange(len(projected), device=projected.device) < columns.num_rows
            rows = queries.rows.where(is_row, states.padding).long()
            return recurrent.advance_each(spec, layer, of_layer, rows, queries.contexts == 0, projected)
        host = host_lengths(columns)
        return recurrent.advance(
            spec, layer, of_layer, (host.rows, host.starts, host.contexts), host.snapshots, projected
        )

    def _store_latents(
        self, queries: torch.Tensor, latents: torch.Tensor, part: LatentAttention, index: int, q: torch.Tensor
    ) -> None:
        (cache, _), slots = self._cache.layer(index), self._columns.slots
        tokens = LatentTokens(queries, latents, self._rotary(index))
        torch_ops.latent_rope_store(tokens, part, self._columns.positions.long(), slots, cache, q)

    def _over_latents(self, q: torch.Tensor, shape: LatentShape, index: int) -> torch.Tensor:
        attended = torch.empty_like(q)
        one_head = AttentionShape(HeadShape(shape.num_heads, 1, shape.width), self._config.attention_scale)
        self._attends.attend(q, LayerCache(*self._cache.layer(index), None), self._columns, one_head, attended)
        return attended[..., : shape.rank]

    def keep_heads(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        if self._adapters is not None:
            self._adapters = self._adapters.at(self._tokens)
        self._keep(self._tokens)
        return [part.index_select(0, self._tokens) for part in rows]

    def _routed(self, part: RoutedExperts, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not isinstance(part.experts, StackedExperts):
            raise TypeError(f"experts are {type(part.experts).__name__}; the device computes StackedExperts")
        return compute_experts(x, logits, part.experts, self._config.activation)

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return super().output(self._model.group.all_reduce(x), norm)

    def _add_deep(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        host = self._columns.host
        if host is None or (deep := host.deep) is None or index >= len(deep.rows):
            return
        if index < self._config.num_layers - 1:
            x.index_add_(0, deep.tokens, deep.rows[index])
            return
        added = x.new_zeros(len(self._columns.token_ids), x.shape[1])  # only the rows of self._tokens are left
        x += added.index_copy_(0, deep.tokens, deep.rows[index]).index_select(0, self._tokens)
