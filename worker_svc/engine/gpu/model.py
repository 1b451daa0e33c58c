"""The decoder on the device: one forward pass over the columns of a step. It never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from worker_svc.engine.adapters.targets import SITES
from worker_svc.engine.backend import Linear, Norm, RotaryTable
from worker_svc.engine.decoder.config import ModelConfig
from worker_svc.engine.decoder.weights import FeedForward, Layer, RoutedExperts, WeightLoader
from worker_svc.engine.gpu.attention.paged import Attention, LayerCache
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import norm_rows
from worker_svc.engine.gpu.kernels.activation import activate, gated_activation, soft_cap
from worker_svc.engine.gpu.kernels.norm import add_norm
from worker_svc.engine.gpu.kernels.rope_store import rope_store
from worker_svc.engine.gpu.layers.device_slots import StepAdapters
from worker_svc.engine.gpu.layers.experts import StackedExperts, compute_experts
from worker_svc.engine.gpu.layers.linears import Fp8Linear
from worker_svc.engine.gpu.layers.weights import kv_scales
from worker_svc.engine.gpu.step.step_buffer import StepColumns

QKV, OUT, GATE_UP, DOWN = range(len(SITES))


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
        self._config = config
        self._group = group
        tables = (rotary.table(max_positions) for rotary in config.rotaries)
        self._rotaries = [RotaryTable(table.cos.to(device), table.sin.to(device)) for table in tables]
        self._vocab = group.vocab_part(config.vocab_size)
        self._embedding = loader.embedding()
        self._position_embedding = loader.position_embedding()
        # Rounded to the model's dtype before it multiplies, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self._embedding.dtype))
        self.final_norm = loader.final_norm()
        self.max_positions = config.max_position_embeddings
        self._layers: list[Layer] = []
        self._kv_scales: list[torch.Tensor | None] = []
        for index in range(config.num_layers):
            layer = loader.layer(index)
            self._layers.append(layer)
            self._kv_scales.append(kv_scales(layer, config.heads) if has_scaled_cache else None)
            progress((index + 1) / (config.num_layers + 1))
        self._head = loader.head()
        progress(1.0)

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
        if self._config.logit_soft_cap is not None:
            soft_cap(logits, self._config.logit_soft_cap)
        return logits

    def states(
        self, columns: StepColumns, attention: Attention, cache: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, but returns the normalized hidden states [n, dim] of `tokens`, indices [n] of tokens of the
        step."""
        x = self._embed(columns)
        attention.begin(columns)
        residual, adapters = None, columns.adapters
        for index, layer in enumerate(self._layers):
            pools = LayerCache(cache[index, 0], cache[index, 1], self._kv_scales[index])
            attended = self._attend(x, residual, index, columns, attention, pools)
            if index == len(self._layers) - 1:
                # From here on only these tokens are needed.
                x, attended = (y.index_select(0, tokens) for y in (x, attended))
                adapters = None if adapters is None else adapters.at(tokens)
            if not len(x):
                return x
            output = _adapted(layer.o, attended, adapters, index, OUT)
            output = _normed(self._group.all_reduce(output), layer.attended_norm)
            residual = self._feed_forward(x, output, index, adapters)
        normed = torch.empty_like(x)
        add_norm(x, residual, self.final_norm, normed)
        return normed

    def _embed(self, columns: StepColumns) -> torch.Tensor:
        x = self._look_up(columns.token_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if columns.host is not None and (inputs := columns.host.inputs) is not None:
            x.index_copy_(0, inputs.tokens, inputs.rows)
        if self._position_embedding is not None:
            x = x + F.embedding(columns.positions, self._position_embedding)
        return x

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return F.embedding(token_ids, self._embedding)
        local = token_ids - self._vocab.start
        is_here = (local >= 0) & (local < len(self._vocab))
        x = F.embedding(local.clamp(0, len(self._vocab) - 1), self._embedding)
        return self._group.all_reduce(x.masked_fill(~is_here[:, None], 0.0))

    def _attend(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        index: int,
        columns: StepColumns,
        attention: Attention,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Adds the residual to x; returns the attention output [T, q_heads * head_dim]."""
        heads, layer = self._config.heads, self._layers[index]
        qkv = _of_norm(x, residual, layer.input_norm, layer.qkv, columns.adapters, index, QKV)
        q = x.new_empty(len(x), heads.num_q_heads, heads.head_dim)
        rotary = self._config.layers[index].rotary
        rope_store(
            qkv, layer.qk_norms, None if rotary is None else self._rotaries[rotary], columns.positions,
            columns.slots, cache.pools, q, heads, cache.scales,
        )  # fmt: skip
        attended = torch.empty_like(q)
        attention.attend(q, cache, columns, self._config.attention(index), attended)
        return attended.view(len(x), -1)

    def _feed_forward(
        self, x: torch.Tensor, residual: torch.Tensor, index: int, adapters: StepAdapters | None
    ) -> torch.Tensor:
        """Adds the residual to x; returns the MLP output [n, hidden]."""
        layer = self._layers[index]
        part = layer.feed_forward
        if not isinstance(part, FeedForward):
            normed = torch.empty_like(x)
            add_norm(x, residual, layer.post_norm, normed)
            fed = self._experts(normed, part)
        else:
            gate_up = _of_norm(x, residual, layer.post_norm, part.gate_up, adapters, index, GATE_UP)
            fed = _adapted(part.down, self._activated(gate_up), adapters, index, DOWN)
        return _normed(self._group.all_reduce(fed), layer.fed_norm)

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The activation of [gate | up], or of up alone."""
        if not self._config.is_gated:
            activate(gate_up, self._config.activation)
            return gate_up
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        gated_activation(gate_up, activated, self._config.activation)
        return activated

    def _experts(self, normed: torch.Tensor, part: RoutedExperts) -> torch.Tensor:
        if not isinstance(part.experts, StackedExperts):
            raise TypeError(f"experts are {type(part.experts).__name__}; the device computes StackedExperts")
        return compute_experts(normed, part.router(normed), part.experts, self._config.activation)


def _adapted(linear: Linear, x: torch.Tensor, adapters: StepAdapters | None, layer: int, site: int) -> torch.Tensor:
    """The linear layer of x, with what adapters add to their rows of it."""
    y = linear(x)
    if adapters is not None:
        adapters.add(layer, site, x, y)
    return y


def _of_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    linear: Linear,
    adapters: StepAdapters | None,
    layer: int,
    site: int,
) -> torch.Tensor:
    """Adds the residual to x; returns the linear layer of its norm, as `_adapted`."""
    if not (isinstance(linear, Fp8Linear) and norm_rows.serves(x.shape[1], linear.weight.group)):
        normed = torch.empty_like(x)
        add_norm(x, residual, norm, normed)
        return _adapted(linear, normed, adapters, layer, site)
    y = linear.of_rows(norm_rows.add_norm_rows(x, residual, norm, linear.weight.group), x.dtype)
    if adapters is not None:  # their inputs are not rounded; other rows keep the kernel of steps without adapters
        normed = torch.empty_like(x)
        add_norm(x, None, norm, normed)
        adapters.add(layer, site, normed, y)
    return y


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """x after a norm of outputs, in place, if the model has one."""
    if norm is not None:
        add_norm(x, None, norm, x)
    return x
