"""The forward pass of an encoder over whole texts, as EncoderConfig describes it. Texts are not padded.

The keys and values of one layer at a time are in the blocks of a pool with one layer, where the kernels read them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from worker_svc.engine.backend import ForwardBatch, LayerBackend, Norm, RotaryTable
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.decoder.operations import Progress
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.encoder.config import EncoderConfig
from worker_svc.engine.layers import AttentionInput, LayerReader, LayerRunner, StackLayer, pieces

# of heads that are not computed, and of buffers
IGNORED_ENDINGS = (
    "position_ids", "pooler.dense.weight", "pooler.dense.bias", "decoder.weight", "decoder.bias",
    "cls.predictions.bias", "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight", "cls.seq_relationship.bias", "lm_head.bias", "lm_head.dense.weight",
    "lm_head.dense.bias", "lm_head.layer_norm.weight", "lm_head.layer_norm.bias",
    "head.dense.weight", "head.norm.weight",
)  # fmt: skip


class EncoderModel:
    """A loaded encoder. `forward` computes the hidden states of whole texts; there are no logits."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EncoderConfig,
        backend: LayerBackend,
        dtype: torch.dtype,
        max_length: int,
        progress: Progress | None = None,
    ) -> None:
        """Raises CheckpointError unless the checkpoint has all tensors and no others."""
        report = progress or (lambda fraction: None)
        self._config = config
        self._backend = backend
        self._runner = LayerRunner(backend, config.activation, config.family.is_gated, config.family.norms_precede)
        self._reader = LayerReader(checkpoint, backend, dtype, "layer", config.norm_eps)
        self._read_tables()
        self._rotaries = [rotary.table(max_length).to(backend.device) for rotary in config.rotaries]
        self._layers = []
        for index in range(len(config.layers)):
            self._layers.append(self._layer(index))
            report((index + 1) / len(config.layers))
        of_head = () if config.head is None else config.head.tensors()
        checkpoint.check_names(self._reader.read.union(of_head), IGNORED_ENDINGS)
        self.hidden = torch.empty(0)  # float32 states of the hidden tokens of the last step

    def _read_tables(self) -> None:
        config, names = self._config, self._config.names
        self._embedding = self._table(names.embedding, config.vocab_size)
        self._positions = (
            self._table(names.position_embedding, config.num_positions) if names.position_embedding else None
        )
        self._types = self._table(names.type_embedding, config.num_types) if config.num_types else None
        self._embedding_norm = self._norm(names.embedding_norm)
        self._final_norm = self._norm(names.final_norm) if names.final_norm else None

    def _table(self, name: str, num_rows: int) -> torch.Tensor:
        return self._reader.tensor(f"{name}.weight", (num_rows, self._config.hidden_size))

    def _norm(self, name: str) -> Norm:
        return self._reader.norm(name, self._config.hidden_size, has_bias=self._config.has_norm_bias)

    def _layer(self, index: int) -> StackLayer:
        config, names, read = self._config, self._config.names, self._reader
        prefix, hidden, inner = names.layer.format(index), config.hidden_size, config.inner
        qkv, has_norm = [prefix + name for name in names.qkv], index > 0 or not config.family.norms_precede
        return StackLayer(
            self._norm(prefix + names.attention_norm) if has_norm else None,
            read.linear(qkv, 3 * hidden // len(qkv), hidden, config.has_attention_bias),
            read.linear([prefix + names.o], hidden, hidden, config.has_attention_bias),
            self._norm(prefix + names.feed_norm),
            read.linear([prefix + names.up], (1 + config.family.is_gated) * inner, hidden, config.has_mlp_bias),
            read.linear([prefix + names.down], hidden, inner, config.has_mlp_bias),
        )

    def fuse(self, pool: KVCachePool) -> None:
        """Encoders run one operation at a time: their batches are large."""

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """Computes the states of the hidden tokens. There are no logits: [0, 0]."""
        parts = [batch] if self._backend.is_batched else pieces(batch)
        x = torch.cat([self._encode(part, pool) for part in parts])
        if batch.hidden_tokens is not None:
            self.hidden = x[torch.from_numpy(batch.hidden_tokens)].float().cpu()
        return x.new_empty(0, 0)

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]:
        """No slices: there are no logits."""
        self.forward(batch, pool)
        return iter(())

    def _encode(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        x, residual, cache = self._embed(batch), None, pool.layer(0)
        for index, layer in enumerate(self._layers):
            own = AttentionInput(batch, cache, self._config.attention(index), self._rotary(index))
            residual = self._runner.run(layer, x, residual, own)
        if self._final_norm is not None:
            self._backend.add_norm(x, residual, self._final_norm, x)
        return x

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._embedding[torch.from_numpy(batch.token_ids)]
        if self._types is not None:
            types = np.zeros(len(x), np.int64) if batch.token_types is None else batch.token_types
            x += self._types[torch.from_numpy(types)]
        if self._positions is not None:
            x += self._positions[torch.from_numpy(batch.positions).long() + self._config.position_offset]
        self._backend.add_norm(x, None, self._embedding_norm, x)
        return x

    def _rotary(self, index: int) -> RotaryTable | None:
        rotary = self._config.layers[index].rotary
        return None if rotary is None else self._rotaries[rotary]
