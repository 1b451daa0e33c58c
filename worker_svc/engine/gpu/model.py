"""The decoder on the device: one forward pass over the columns of a step. It never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from step_protocol.columns import I64
from worker_svc.engine.backend import LatentAttention, Linear, Norm, RecurrentWeights, RotaryTable
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.forward import compute_layers
from worker_svc.engine.decoder.layer import Layer, RoutedExperts
from worker_svc.engine.decoder.rotary import rotary_at
from worker_svc.engine.decoder.weights import WeightLoader
from worker_svc.engine.gpu.attention.paged import Attention, LayerCache
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels.activation import activate, gated, soft_cap
from worker_svc.engine.gpu.kernels.norm import add_norm, add_norm_rows, can_round
from worker_svc.engine.gpu.kernels.rope_store import rope_store
from worker_svc.engine.gpu.layers.experts import StackedExperts, compute_experts
from worker_svc.engine.gpu.layers.linears import Fp8Linear
from worker_svc.engine.gpu.layers.weights import kv_scales
from worker_svc.engine.gpu.step.step_buffer import StepColumns


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
        tables = (rotary.table(max_positions) for rotary in config.rotaries)
        self._rotaries = [table.to(device) for table in tables]
        self._vocab = group.vocab_part(config.vocab_size)
        self._embedding = loader.embedding()
        self._position_embedding = loader.position_embedding()
        # Rounded to the model's dtype before it multiplies, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self._embedding.dtype))
        self.final_norm = loader.final_norm()
        self.max_positions = config.max_position_embeddings
        self.layers: list[Layer] = []
        self.kv_scales: list[torch.Tensor | None] = []
        for index in range(config.num_layers):
            layer = loader.layer(index)
            self.layers.append(layer)
            self.kv_scales.append(kv_scales(layer, config.heads) if has_scaled_cache else None)
            progress((index + 1) / (config.num_layers + 1))
        self._head = loader.head()
        progress(1.0)

    def rotary_at(self, positions: I64) -> RotaryTable:
        """The rotation of tokens at these positions [3, T] on three axes."""
        return rotary_at(self._rotaries[0], positions)

    def rotary(self, index: int) -> RotaryTable | None:
        """The rotation of a layer."""
        rotary = self.config.layers[index].rotary
        return None if rotary is None else self._rotaries[rotary]

    @property
    def has_logits(self) -> bool:
        return self._head is not None

    def forward(self, columns: StepColumns, attention: Attention, cache: torch.Tensor) -> torch.Tensor | None:
        """Stores keys and values of all tokens in cache [layers, 2, num_blocks, block_size, kv_heads, head_dim].

        Returns logits [S, this rank's part of the vocabulary], or None if no row samples or the model has no logits.
        """
        normed = self.states(columns, attention, cache, columns.sample_tokens)
        return self.logits(normed) if len(normed) and self.has_logits else None

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [n, this rank's part of the vocabulary] of hidden states [n, dim]."""
        if self._head is None:
            raise RuntimeError("the model has no logits, but a row asks for some: PoolingTable refuses it")
        logits = self._head(normed)
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if self.config.logit_soft_cap is not None:
            soft_cap(logits, self.config.logit_soft_cap)
        return logits

    def states(
        self, columns: StepColumns, attention: Attention, cache: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, but returns the normalized hidden states [n, dim] of `tokens`, indices [n] of tokens of the
        step."""
        x, residual = compute_layers(_DeviceOperations(self, columns, attention, cache, tokens), self.layers)
        if not len(x):
            return x
        normed = torch.empty_like(x)
        add_norm(x, residual, self.final_norm, normed)
        return normed

    def embed(self, columns: StepColumns) -> torch.Tensor:
        """Input embeddings [T, dim]."""
        x = self._look_up(columns.token_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if columns.host is not None and (inputs := columns.host.inputs) is not None:
            x.index_copy_(0, inputs.tokens, inputs.rows)
        if self._position_embedding is not None:
            x = x + F.embedding(columns.positions, self._position_embedding)
        return x

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self._embedding)
        local = token_ids - self._vocab.start
        is_here = (local >= 0) & (local < len(self._vocab))
        x = F.embedding(local.clamp(0, len(self._vocab) - 1), self._embedding)
        return self.group.all_reduce(x.masked_fill(~is_here[:, None], 0.0))


class _DeviceOperations:
    """One step of a device; see `StepOperations`."""

    def __init__(
        self,
        model: DeviceDecoder,
        columns: StepColumns,
        attention: Attention,
        cache: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        self._model = model
        self._config = model.config
        self._columns = columns
        self._attention = attention
        self._cache = cache
        self._tokens = tokens
        self._adapters = columns.adapters

    def embed(self) -> torch.Tensor:
        x = self._model.embed(self._columns)
        self._attention.begin(self._columns)
        return x

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = linear(x)
        if self._adapters is not None:
            self._adapters.add(index, site, x, y)
        return y if onto is None else onto.add_(y)

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        if not (isinstance(linear, Fp8Linear) and can_round(x.shape[1], linear.weight.group)):
            return self.linear(linear, _normed(x, residual, norm), index, site)
        y = linear.of_rows(add_norm_rows(x, residual, norm, linear.weight.group), x.dtype)
        # Inputs of adapters are not rounded; other rows keep the kernel of steps without adapters.
        if self._adapters is not None:
            self._adapters.add(index, site, _normed(x, None, norm), y)
        return y

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        heads, columns = self._config.heads, self._columns
        q = qkv.new_empty(len(qkv), heads.num_q_heads, heads.head_dim)
        cache = LayerCache(self._cache[index, 0], self._cache[index, 1], self._model.kv_scales[index])
        rotary, positions = self._model.rotary(index), columns.positions
        if columns.host is not None and columns.host.rotary is not None:
            rotary, positions = columns.host.rotary, torch.arange(len(q), dtype=torch.int32, device=q.device)
        rope_store(
            qkv, self._model.layers[index].qk_norms, rotary, positions, columns.slots, cache.pools, q, heads,
            cache.scales,
        )  # fmt: skip
        attended = torch.empty_like(q)
        shape = replace(self._config.attention(index), sinks=self._model.layers[index].sinks)
        self._attention.attend(q, cache, columns, shape, attended)
        return attended.view(len(qkv), -1)

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        raise RuntimeError("check_features refuses recurrent layers on a device: a bug in the engine")

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        raise TypeError("latent attention is not computed on a device: features.py refuses the model")

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        raise TypeError("latent attention is not computed on a device: features.py refuses the model")

    def keep_heads(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        if self._adapters is not None:
            self._adapters = self._adapters.at(self._tokens)
        return [part.index_select(0, self._tokens) for part in rows]

    def activated(self, gate_up: torch.Tensor, index: int) -> torch.Tensor:
        if not self._config.is_gated:
            activate(gate_up, self._config.activation)
            return gate_up
        return gated(gate_up, self._config.activation)

    def experts(
        self, part: RoutedExperts, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        if not isinstance(part.experts, StackedExperts):
            raise TypeError(f"experts are {type(part.experts).__name__}; the device computes StackedExperts")
        normed = _normed(x, residual, norm)
        return compute_experts(normed, part.logits(normed), part.experts, self._config.activation)

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        summed = self._model.group.all_reduce(x)
        if norm is not None:
            add_norm(summed, None, norm, summed)
        if self._config.residual_scale != 1.0:
            summed *= self._config.residual_scale
        return summed

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x.add_(other)

    def end_attention(self, x: torch.Tensor, output: torch.Tensor, index: int) -> None:
        """Nothing is added: features.py refuses models with streams."""

    def end_layer(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        """Adds the rows of DeepStack to x."""
        host = self._columns.host
        if host is None or (deep := host.deep) is None or index >= len(deep.rows):
            return
        if index < self._config.num_layers - 1:
            x.index_add_(0, deep.tokens, deep.rows[index])
            return
        added = x.new_zeros(len(self._columns.token_ids), x.shape[1])  # only the rows of self._tokens are left
        x += added.index_copy_(0, deep.tokens, deep.rows[index]).index_select(0, self._tokens)


def _normed(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
    """Adds the residual to x; returns the norm of x."""
    normed = torch.empty_like(x)
    add_norm(x, residual, norm, normed)
    return normed
