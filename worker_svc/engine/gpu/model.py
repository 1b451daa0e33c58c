"""The decoder on the device: one forward pass over the columns of a step. It never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.backend import Norm, RotaryTable
from worker_svc.engine.gpu.attention import Attention, LayerCache
from worker_svc.engine.gpu.kernels.activation import gated_activation
from worker_svc.engine.gpu.kernels.rms_norm import add_rms_norm
from worker_svc.engine.gpu.kernels.rope_store import rope_store
from worker_svc.engine.gpu.parallel import Group
from worker_svc.engine.gpu.step_buffer import StepColumns
from worker_svc.engine.gpu.weights import kv_scales
from worker_svc.engine.weights import FeedForward, Layer, WeightLoader


class DeviceDecoder:
    """A loaded decoder, or one rank's shard. `forward` computes a step; `hidden` and `logits` compute its parts."""

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
        rotary = config.rotaries[0].table(max_positions)
        self._rotary = RotaryTable(rotary.cos.to(device), rotary.sin.to(device))
        self._vocab = group.vocab_part(config.vocab_size)
        self._embedding = loader.embedding()
        self._final_norm = loader.final_norm()
        self._layers: list[Layer] = []
        self._kv_scales: list[torch.Tensor | None] = []
        for index in range(config.num_layers):
            layer = loader.layer(index)
            self._layers.append(layer)
            self._kv_scales.append(kv_scales(layer, config.heads) if has_scaled_cache else None)
            progress((index + 1) / (config.num_layers + 1))
        self._head = loader.head()
        progress(1.0)

    def forward(self, columns: StepColumns, attention: Attention, cache: torch.Tensor) -> torch.Tensor | None:
        """Stores keys and values of all tokens in cache [layers, 2, num_blocks, block_size, kv_heads, head_dim].

        Returns logits [S, this rank's part of the vocabulary], or None if no row samples.
        """
        normed = self.hidden(columns, attention, cache, columns.sample_tokens)
        return None if normed is None else self.logits(normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [n, this rank's part of the vocabulary] of hidden states [n, dim]."""
        if self._head is None:
            raise RuntimeError("a model without logits was loaded; check_features refuses it")
        return self._head(normed)

    def hidden(
        self, columns: StepColumns, attention: Attention, cache: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """As `forward`, but returns the normalized hidden states [n, dim] of `tokens`, indices [n] of tokens of the
        step; None if n is 0."""
        x = self._embed(columns.token_ids)
        attention.begin(columns)
        residual = None
        for index, layer in enumerate(self._layers):
            pools = LayerCache(cache[index, 0], cache[index, 1], self._kv_scales[index])
            attended = self._attend(x, residual, index, columns, attention, pools)
            if index == len(self._layers) - 1:
                # From here on only these tokens are needed.
                x, attended = (y.index_select(0, tokens) for y in (x, attended))
            if not len(x):
                return None
            residual = self._feed_forward(x, self._group.all_reduce(layer.o(attended)), layer)
        normed = torch.empty_like(x)
        _add_norm(x, residual, self._final_norm, normed)
        return normed

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
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
        normed = torch.empty_like(x)
        _add_norm(x, residual, layer.input_norm, normed)
        q = x.new_empty(len(x), heads.num_q_heads, heads.head_dim)
        rope_store(
            layer.qkv(normed), _weights(layer.qk_norms), self._rotary, columns.positions, columns.slots, cache.pools, q,
            heads, self._config.norm_eps, cache.scales,
        )  # fmt: skip
        attended = torch.empty_like(q)
        attention.attend(q, cache, columns, self._config.attention(index), attended)
        return attended.view(len(x), -1)

    def _feed_forward(self, x: torch.Tensor, residual: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Adds the residual to x; returns the MLP output [n, hidden]."""
        normed = torch.empty_like(x)
        _add_norm(x, residual, layer.post_norm, normed)
        part = layer.feed_forward
        if not isinstance(part, FeedForward):
            raise TypeError("the device computes dense feed-forward parts; see features.py")
        gate_up = part.gate_up(normed)
        activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        gated_activation(gate_up, activated, self._config.activation)
        return self._group.all_reduce(part.down(activated))


def _add_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
    add_rms_norm(x, residual, norm.weight, out, norm.eps)


def _weights(norms: tuple[Norm, Norm] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if norms is None else (norms[0].weight, norms[1].weight)
