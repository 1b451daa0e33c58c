"""The forward pass of an encoder-decoder model over a mixed batch.

The first positions of a row are encoder positions (`ForwardBatch.encoders`): their slots hold the keys and values of
cross-attention, in all layers of the decoder. A row whose chunk begins at position 0 computes them from its encoder
input. The chunks of other rows run through the decoder, whose own positions begin after those of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from step_protocol.columns import I32, I64
from worker_svc.engine.backend import AttentionShape, ForwardBatch, KVLayout, LayerBackend, QkvPart
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.encoder_decoder.config import CONV_STRIDE, EncoderDecoderConfig
from worker_svc.engine.encoder_decoder.weights import KERNEL, EncoderDecoderLoader, LayerStack
from worker_svc.engine.layers import AttentionInput, LayerRunner, pieces

NO_HEADS: I64 = np.empty(0, np.int64)


class EncoderDecoderModel:
    """A loaded model, with the interface of `DecoderModel`. `num_encoder_runs` counts encoder inputs since the
    start.
    """

    def __init__(
        self,
        loader: EncoderDecoderLoader,
        config: EncoderDecoderConfig,
        backend: LayerBackend,
        max_encoder: int,
        max_decoder: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        report = progress or (lambda fraction: None)
        self._config = config
        self._backend = backend
        self._parts = loader.load(max_encoder, max_decoder, report)
        self._runner = LayerRunner(backend, config.activation, config.is_gated, config.family.is_pre_norm)
        self.num_encoder_runs = 0
        report(1.0)

    @property
    def hidden(self) -> torch.Tensor:
        """Nothing: rows that need hidden states are refused."""
        return torch.empty(0)

    def fuse(self, pool: KVCachePool) -> None:
        """The operations run one by one."""

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """Stores keys and values of all tokens; returns logits [S, vocab] of the head tokens."""
        return self._logits(self._hidden(batch, pool))

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]:
        """As `forward`, but returns the logits `size` rows at a time."""
        hidden = self._hidden(batch, pool)
        for start in range(0, len(hidden), size):
            yield self._logits(hidden[start : start + size])

    def _hidden(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """The decoder's output for the head tokens, [S, hidden]."""
        for index in np.flatnonzero(batch.context_lens == 0).tolist():
            self._encode(batch, index, pool)
        own, cross = decoder_batches(batch, pool.block_size)
        if not len(own.rows):
            return torch.empty(0, self._config.hidden_size, dtype=self._parts.embedding.dtype)
        if self._backend.is_batched:
            return self._decode(own, cross, pool)[torch.from_numpy(own.head_tokens)]
        pairs = zip(pieces(own, 1), pieces(cross, 1), strict=True)
        return torch.cat([self._decode(*pair, pool) for pair in pairs])[torch.from_numpy(own.head_tokens)]

    def _decode(self, own: ForwardBatch, cross: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """The decoder's output for all tokens, [T, hidden]."""
        x = self._embed(torch.from_numpy(own.token_ids), self._parts.decoder, own.positions)
        return self._run(x, self._parts.decoder, own, pool, cross)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return torch.empty(0, self._config.vocab_size, dtype=x.dtype)
        if self._config.head_scale != 1.0:
            x = x * torch.tensor(self._config.head_scale, dtype=x.dtype)
        if self._backend.is_batched:
            return self._parts.head(x).cpu()
        return torch.cat([self._parts.head(row[None]) for row in x]).cpu()

    # -- the encoder --------------------------------------------------------------------------------------------------

    def _encode(self, batch: ForwardBatch, index: int, pool: KVCachePool) -> None:
        """Computes the encoder input of one row and stores the keys and values of cross-attention."""
        columns = batch.encoders
        if columns is None:
            raise RuntimeError("a batch of an encoder-decoder model has no encoder columns: a bug in the worker")
        start, num = int(batch.query_starts[index]), int(columns.lens[index])
        x = self._encoder_input(batch.token_ids[start : start + num], columns.inputs.get(int(batch.rows[index])))
        own = whole_batch(num, pool.block_size)
        layout = KVLayout.of(self._config.heads)
        scratch = KVCachePool([layout], own.tables.shape[1], pool.block_size, x.dtype, device=x.device)
        x = self._run(x, self._parts.encoder, own, scratch, None)
        self._store_cross(x, replace(own, slots=batch.slots[start : start + num]), pool)
        self.num_encoder_runs += 1

    def _encoder_input(self, token_ids: I64, features: torch.Tensor | None) -> torch.Tensor:
        positions = np.arange(len(token_ids), dtype=np.int32)
        if self._parts.convolutions is None:
            return self._embed(torch.from_numpy(token_ids), self._parts.encoder, positions)
        if features is None:
            raise RuntimeError("a row of an audio model has no audio: a bug in the worker")
        frames = features.to(self._parts.embedding)
        for linear, stride in ((self._parts.convolutions.first, 1), (self._parts.convolutions.second, CONV_STRIDE)):
            x = linear(_windows(frames, stride))
            self._backend.activation(x, "gelu")
            frames = x.T
        return self._placed(x, self._parts.encoder, positions)

    def _store_cross(self, encoded: torch.Tensor, batch: ForwardBatch, pool: KVCachePool) -> None:
        heads = self._config.heads
        inner = heads.num_q_heads * heads.head_dim
        q = encoded.new_empty(len(encoded), heads.num_q_heads, heads.head_dim)
        qkv = encoded.new_zeros(len(encoded), 3 * inner)
        for index, layer in enumerate(self._parts.decoder.layers):
            if layer.cross is not None:
                qkv[:, inner:] = layer.cross.kv(encoded)
                self._backend.qk_norm_rope_store(qkv, QkvPart(heads, None), batch, pool.layer(index), q)

    # -- both stacks --------------------------------------------------------------------------------------------------

    def _embed(self, token_ids: torch.Tensor, stack: LayerStack, positions: I32) -> torch.Tensor:
        x = self._parts.embedding[token_ids]
        if self._config.embedding_scale != 1.0:
            x *= torch.tensor(self._config.embedding_scale, dtype=x.dtype)
        return self._placed(x, stack, positions)

    def _placed(self, x: torch.Tensor, stack: LayerStack, positions: I32) -> torch.Tensor:
        """Adds the embeddings of positions, and norms."""
        if stack.positions is not None:
            x = x + stack.positions[torch.from_numpy(positions).long()]
        if stack.embedding_norm is not None:
            self._backend.add_norm(x, None, stack.embedding_norm, x)
        return x

    def _run(
        self, x: torch.Tensor, stack: LayerStack, own: ForwardBatch, cache: KVCachePool, cross: ForwardBatch | None
    ) -> torch.Tensor:
        """The output of a stack for x [T, hidden]. `cache` has one layer, which all layers of an encoder share, or
        those of the decoder.
        """
        heads, scale, residual = self._config.heads, self._config.attention_scale, None
        own_shape = AttentionShape(heads, scale, is_causal=cross is not None, bias=stack.bias)
        cross_shape = AttentionShape(heads, scale, is_causal=False)
        for index, layer in enumerate(stack.layers):
            kv = cache.layer(index if cross is not None else 0)
            to_encoder = None if cross is None else AttentionInput(cross, kv, cross_shape)
            residual = self._runner.run(layer, x, residual, AttentionInput(own, kv, own_shape), to_encoder)
        if stack.final_norm is not None:
            self._backend.add_norm(x, residual, stack.final_norm, x)
        elif residual is not None:
            x += residual
        return x


def _windows(frames: torch.Tensor, stride: int) -> torch.Tensor:
    """The input of a convolution as a linear layer: [positions, width * KERNEL] for frames [width, n]."""
    padded = torch.nn.functional.pad(frames, (1, 1))
    windows = padded.unfold(1, KERNEL, stride)  # [width, positions, KERNEL]
    return windows.transpose(0, 1).reshape(windows.shape[1], -1)


def whole_batch(num_tokens: int, block_size: int) -> ForwardBatch:
    """One row that computes all its tokens in blocks of its own, as an encoder does."""
    positions = np.arange(num_tokens)
    return ForwardBatch(
        token_ids=positions,
        positions=positions.astype(np.int32),
        slots=positions,
        rows=np.zeros(1, np.int32),
        query_starts=np.array([0, num_tokens], np.int32),
        context_lens=np.zeros(1, np.int32),
        tables=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
        head_tokens=NO_HEADS,
    )


def decoder_batches(batch: ForwardBatch, block_size: int) -> tuple[ForwardBatch, ForwardBatch]:
    """The rows that run through the decoder: their own positions for self-attention, and the encoder's for
    cross-attention."""
    columns = batch.encoders
    if columns is None:
        raise RuntimeError("a batch of an encoder-decoder model has no encoder columns: a bug in the worker")
    query_lens = np.diff(batch.query_starts)
    is_decoder = batch.context_lens > 0
    is_kept = np.repeat(is_decoder, query_lens)
    rows, lens = batch.rows[is_decoder], query_lens[is_decoder]
    ends = columns.ends[is_decoder]
    context_lens = batch.context_lens[is_decoder] - ends
    num_blocks = -(-int((context_lens + lens).max(initial=0)) // block_size)
    indices = np.minimum(ends[:, None] // block_size + np.arange(num_blocks), batch.tables.shape[1] - 1)
    own = ForwardBatch(
        token_ids=batch.token_ids[is_kept],
        positions=batch.positions[is_kept] - np.repeat(ends, lens),
        slots=batch.slots[is_kept],
        rows=np.arange(len(rows), dtype=np.int32),
        query_starts=np.append(0, np.cumsum(lens)).astype(np.int32),
        context_lens=context_lens,
        tables=np.ascontiguousarray(batch.tables[rows[:, None], indices]),
        head_tokens=np.cumsum(is_kept)[batch.head_tokens] - 1,
    )
    return own, replace(own, rows=rows, tables=batch.tables, key_lens=columns.lens[is_decoder])
