"""The forward pass of an encoder over whole texts, as EncoderConfig describes it. Texts are not padded.

The keys and values of one layer at a time are in the blocks of a pool with one layer, where the kernels read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.engine.backend import Backend, ForwardBatch, Linear, Norm, RotaryTable
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.decoder.kv_cache import KVCachePool
from worker_svc.engine.decoder.model import Progress
from worker_svc.engine.decoder.weights import LinearMaker
from worker_svc.engine.encoder.config import EncoderConfig

Cache = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer

# of heads that are not computed, and of buffers
IGNORED_ENDINGS = (
    "position_ids", "pooler.dense.weight", "pooler.dense.bias", "decoder.weight", "decoder.bias",
    "cls.predictions.bias", "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight", "cls.seq_relationship.bias", "lm_head.bias", "lm_head.dense.weight",
    "lm_head.dense.bias", "lm_head.layer_norm.weight", "lm_head.layer_norm.bias",
    "head.dense.weight", "head.norm.weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Weights of one layer. qkv is [q | k | v] of all heads."""

    qkv: Linear
    o: Linear
    up: Linear  # [gate | up] if the feed-forward part has a gate
    down: Linear
    attention_norm: Norm | None  # None: in the first layer of an encoder whose norms precede
    feed_norm: Norm


class EncoderLoader:
    """Reads the tensors of an encoder."""

    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, maker: LinearMaker, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._maker = maker
        self._dtype = dtype

    def check(self) -> None:
        """Raises CheckpointError unless the checkpoint has all tensors and no others."""
        config, names = self._config, self._config.names
        tables = [names.embedding, names.position_embedding, names.type_embedding]
        expected = [f"{name}.weight" for name in tables if name]
        norms, linears = [names.embedding_norm, names.final_norm], []
        for index in range(len(config.layers)):
            prefix = names.layer.format(index)
            norms += [prefix + names.attention_norm] if self._has_attention_norm(index) else []
            norms.append(prefix + names.feed_norm)
            linears += [(prefix + name, config.has_attention_bias) for name in (*names.qkv, names.o)]
            linears += [(prefix + name, config.has_mlp_bias) for name in (names.up, names.down)]
        linears += [(name, config.has_norm_bias) for name in norms if name]
        for name, has_bias in linears:
            expected += [f"{name}.weight", f"{name}.bias"] if has_bias else [f"{name}.weight"]
        if config.head is not None:
            expected += config.head.tensors()
        self._checkpoint.check_names(expected, IGNORED_ENDINGS)

    def _has_attention_norm(self, index: int) -> bool:
        return index > 0 or not self._config.family.norms_precede

    def table(self, name: str, num_rows: int) -> torch.Tensor:
        """An embedding table."""
        return self._checkpoint.tensor(f"{name}.weight", (num_rows, self._config.hidden_size), self._dtype)

    def norm(self, name: str) -> Norm:
        size = (self._config.hidden_size,)
        bias = torch.zeros(size, dtype=self._dtype)  # the kernels read one
        if self._config.has_norm_bias:
            bias = self._checkpoint.tensor(f"{name}.bias", size, self._dtype)
        weight = self._checkpoint.tensor(f"{name}.weight", size, self._dtype)
        return Norm(weight, bias, self._config.norm_eps, "layer")

    def layer(self, index: int) -> EncoderLayer:
        config, names, prefix = self._config, self._config.names, self._config.names.layer.format(index)
        hidden, inner = config.hidden_size, config.inner
        up_size = 2 * inner if config.family.is_gated else inner
        return EncoderLayer(
            self._linear([prefix + name for name in names.qkv], 3 * hidden, hidden, has_bias=config.has_attention_bias),
            self._linear([prefix + names.o], hidden, hidden, has_bias=config.has_attention_bias),
            self._linear([prefix + names.up], up_size, hidden, has_bias=config.has_mlp_bias),
            self._linear([prefix + names.down], hidden, inner, has_bias=config.has_mlp_bias),
            self.norm(prefix + names.attention_norm) if self._has_attention_norm(index) else None,
            self.norm(prefix + names.feed_norm),
        )

    def _linear(self, names: list[str], outputs: int, inputs: int, *, has_bias: bool) -> Linear:
        """A layer whose outputs are those of all `names`."""
        size = outputs // len(names)
        weight = torch.cat([self._checkpoint.tensor(f"{name}.weight", (size, inputs), self._dtype) for name in names])
        bias = None
        if has_bias:
            bias = torch.cat([self._checkpoint.tensor(f"{name}.bias", (size,), self._dtype) for name in names])
        return self._maker.make_linear(weight, bias)


class EncoderModel:
    """A loaded encoder. `forward` computes the hidden states of whole texts; there are no logits."""

    def __init__(
        self,
        loader: EncoderLoader,
        config: EncoderConfig,
        backend: Backend,
        max_length: int,
        progress: Progress | None = None,
    ) -> None:
        names, report = config.names, progress or (lambda fraction: None)
        self._config = config
        self._backend = backend
        self._embedding = loader.table(names.embedding, config.vocab_size)
        self._positions = None
        if names.position_embedding:
            self._positions = loader.table(names.position_embedding, config.num_positions)
        self._types = loader.table(names.type_embedding, config.num_types) if config.num_types else None
        self._embedding_norm = loader.norm(names.embedding_norm)
        self._final_norm = loader.norm(names.final_norm) if names.final_norm else None
        self._rotaries = [rotary.table(max_length) for rotary in config.rotaries]
        self._layers = []
        for index in range(len(config.layers)):
            self._layers.append(loader.layer(index))
            report((index + 1) / len(config.layers))
        self.hidden = torch.empty(0)  # float32 states of the hidden tokens of the last step

    def fuse(self, pool: KVCachePool) -> None:
        """Encoders run one operation at a time: their batches are large."""

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """Computes the states of the hidden tokens. There are no logits: [0, 0]."""
        x = self._encode(batch, pool)
        if batch.hidden_tokens is not None:
            self.hidden = x[torch.from_numpy(batch.hidden_tokens)].float()
        return x.new_empty(0, 0)

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]:
        """No slices: there are no logits."""
        self.forward(batch, pool)
        return iter(())

    def _encode(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        x = self._embed(batch)
        layers = self._encode_before if self._config.family.norms_precede else self._encode_after
        return layers(x, batch, pool.layer(0))

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._embedding[torch.from_numpy(batch.token_ids)]
        if self._types is not None:
            types = np.zeros(len(x), np.int64) if batch.token_types is None else batch.token_types
            x += self._types[torch.from_numpy(types)]
        if self._positions is not None:
            x += self._positions[torch.from_numpy(batch.positions).long() + self._config.position_offset]
        self._backend.add_norm(x, None, self._embedding_norm, x)
        return x

    def _encode_after(self, x: torch.Tensor, batch: ForwardBatch, cache: Cache) -> torch.Tensor:
        """Norms follow attention and feed-forward part."""
        for index, layer in enumerate(self._layers):
            attended, normed = layer.o(self._attend(x, index, batch, cache)), torch.empty_like(x)
            if layer.attention_norm is not None:
                self._backend.add_norm(attended, x, layer.attention_norm, normed)
            fed = self._feed(normed, layer)
            self._backend.add_norm(fed, normed, layer.feed_norm, x)
        return x

    def _encode_before(
        self, x: torch.Tensor, batch: ForwardBatch, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Norms precede attention and feed-forward part; a last one follows."""
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = x
            if layer.attention_norm is not None:
                normed = torch.empty_like(x)
                self._backend.add_norm(x, residual, layer.attention_norm, normed)
            attended, middle = layer.o(self._attend(normed, index, batch, cache)), torch.empty_like(x)
            self._backend.add_norm(attended, x, layer.feed_norm, middle)
            x, residual = self._feed(middle, layer), attended
        if self._final_norm is not None:
            self._backend.add_norm(x, residual, self._final_norm, x)
        return x

    def _attend(
        self, x: torch.Tensor, index: int, batch: ForwardBatch, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads, qkv = self._config.heads, self._layers[index].qkv(x)
        q = x.new_empty(len(x), heads.num_q_heads, heads.head_dim)
        self._backend.qk_norm_rope_store(qkv, None, self._rotary(index), batch, cache, q, heads)
        attended = torch.empty_like(q)
        self._backend.paged_attention(q, cache, batch, attended, self._config.attention(index))
        return attended.view(len(x), -1)

    def _rotary(self, index: int) -> RotaryTable | None:
        rotary = self._config.layers[index].rotary
        return None if rotary is None else self._rotaries[rotary]

    def _feed(self, x: torch.Tensor, layer: EncoderLayer) -> torch.Tensor:
        inner = layer.up(x)
        if not self._config.family.is_gated:
            self._backend.activation(inner, self._config.activation)
            return layer.down(inner)
        activated = inner.new_empty(len(inner), inner.shape[1] // 2)
        self._backend.gated_activation(inner, activated, self._config.activation)
        return layer.down(activated)
