"""Reads the tensors of an encoder-decoder checkpoint and prepares them for a backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.engine.backend import LayerBackend, Linear, Norm, PositionBias
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.encoder_decoder.config import (
    AttentionNames,
    EncoderDecoderConfig,
    RelativePositions,
    StackConfig,
)
from worker_svc.engine.layers import CrossAttention, LayerReader, StackLayer

KERNEL = 3  # width of Whisper's convolutions
BIAS_PADDING = 127  # see PositionBias
LOGITS_BIAS = "final_logits_bias"


@dataclass(frozen=True, slots=True)
class LayerStack:
    """An encoder or a decoder."""

    positions: torch.Tensor | None  # [.., hidden]
    embedding_norm: Norm | None
    layers: list[StackLayer]
    final_norm: Norm | None
    bias: PositionBias | None


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Whisper's front end, as linear layers over windows of three frames."""

    first: Linear
    second: Linear


@dataclass(frozen=True, slots=True)
class EncoderDecoderParts:
    """All weights of a model."""

    embedding: torch.Tensor  # [vocab, hidden]
    convolutions: Convolutions | None
    encoder: LayerStack
    decoder: LayerStack
    head: Linear


class EncoderDecoderLoader:
    """Reads the tensors of a model."""

    def __init__(
        self, checkpoint: Checkpoint, config: EncoderDecoderConfig, backend: LayerBackend, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._backend = backend
        self._reader = LayerReader(checkpoint, backend, dtype, config.family.norm, config.norm_eps)
        self._tensor = self._reader.tensor

    def load(self, max_encoder: int, max_decoder: int, report: Callable[[float], None]) -> EncoderDecoderParts:
        """All weights. Raises CheckpointError unless the checkpoint has all tensors and no others."""
        config, family = self._config, self._config.family
        embedding = self._tensor(f"{family.embedding}.weight", (config.vocab_size, config.hidden_size))
        encoder = self._stack(config.encoder, max_encoder, is_causal=False)
        report(0.4)
        decoder = self._stack(config.decoder, max_decoder, is_causal=True)
        report(0.9)
        convolutions = self._convolutions() if family.is_audio else None
        head = self._head(embedding)
        self._check_copies(embedding)
        self._checkpoint.check_names(self._reader.read, family.ignored)
        return EncoderDecoderParts(embedding, convolutions, encoder, decoder, head)

    def _stack(self, stack: StackConfig, max_len: int, *, is_causal: bool) -> LayerStack:
        config, names = self._config, stack.names
        num_positions = stack.num_positions + config.family.position_offset
        positions = None
        if names.positions:
            positions = self._tensor(f"{names.positions}.weight", (num_positions, config.hidden_size))
        bias = None
        if config.relative is not None:
            shape = (config.relative.num_buckets, config.heads.num_q_heads)
            table = self._tensor(f"{names.relative_bias}.weight", shape).float()
            bias = position_bias(table, config.relative, max_len, is_causal=is_causal)
        return LayerStack(
            positions=None if positions is None else positions[config.family.position_offset :],
            embedding_norm=self._norm(names.embedding_norm) if names.embedding_norm else None,
            layers=[self._layer(stack, index) for index in range(stack.num_layers)],
            final_norm=self._norm(names.final_norm) if names.final_norm else None,
            bias=bias,
        )

    def _layer(self, stack: StackConfig, index: int) -> StackLayer:
        config, names, prefix = self._config, stack.names, stack.names.layer.format(index)
        own, linear, has_bias = names.attention, self._reader.linear, config.family.has_biases
        hidden, heads = config.hidden_size, config.heads.num_q_heads * config.heads.head_dim
        ups = [prefix + name for name in (names.gate, names.up) if name]
        return StackLayer(
            attention_norm=self._norm(prefix + own.norm),
            qkv=linear([prefix + name for name in (own.q, own.k, own.v)], heads, hidden, self._has_biases()),
            o=linear([prefix + own.o], hidden, heads, has_bias),
            feed_norm=self._norm(prefix + names.feed_norm),
            up=linear(ups, stack.inner, hidden, has_bias),
            down=linear([prefix + names.down], hidden, stack.inner, has_bias),
            cross=None if names.cross is None else self._cross(prefix, names.cross, heads),
        )

    def _cross(self, prefix: str, names: AttentionNames, heads: int) -> CrossAttention:
        hidden, linear, biases = self._config.hidden_size, self._reader.linear, self._has_biases()
        return CrossAttention(
            norm=self._norm(prefix + names.norm),
            q=linear([prefix + names.q], heads, hidden, biases[:1]),
            kv=linear([prefix + names.k, prefix + names.v], heads, hidden, biases[1:]),
            o=linear([prefix + names.o], hidden, heads, biases[:1]),
        )

    def _has_biases(self) -> list[bool]:
        """Of the projections of queries, keys and values."""
        family = self._config.family
        return [family.has_biases, family.has_key_bias, family.has_biases]

    def _norm(self, name: str) -> Norm:
        return self._reader.norm(name, self._config.hidden_size)

    def _convolutions(self) -> Convolutions:
        config = self._config
        return Convolutions(
            self._convolution("model.encoder.conv1", config.num_mel_bins),
            self._convolution("model.encoder.conv2", config.hidden_size),
        )

    def _convolution(self, name: str, width: int) -> Linear:
        hidden = self._config.hidden_size
        weight = self._tensor(f"{name}.weight", (hidden, width, KERNEL)).reshape(hidden, width * KERNEL)
        return self._backend.make_linear(weight.contiguous(), self._tensor(f"{name}.bias", (hidden,)))

    def _head(self, embedding: torch.Tensor) -> Linear:
        """The head is the embedding unless the checkpoint has one of its own."""
        name = f"{self._config.family.head}.weight"
        weight = self._tensor(name, tuple(embedding.shape)) if self._checkpoint.has(name) else embedding
        bias = None
        if self._checkpoint.has(LOGITS_BIAS):
            bias = self._tensor(LOGITS_BIAS, (1, self._config.vocab_size)).reshape(-1)
        return self._backend.make_linear(weight, bias)

    def _check_copies(self, embedding: torch.Tensor) -> None:
        """Raises CheckpointError if encoder and decoder have embeddings of their own."""
        for name in (f"{copy}.weight" for copy in self._config.family.copies):
            if self._checkpoint.has(name) and not torch.equal(self._tensor(name, tuple(embedding.shape)), embedding):
                raise CheckpointError(
                    f"{name} differs from {self._config.family.embedding}.weight; models whose encoder and decoder "
                    "have different embeddings are not supported"
                )


def position_bias(table: torch.Tensor, relative: RelativePositions, max_len: int, *, is_causal: bool) -> PositionBias:
    """The biases of all distances between positions below `max_len`; `table` is [buckets, heads]."""
    last = 0 if is_causal else max_len - 1
    distances = torch.arange(1 - max_len, last + 1 + BIAS_PADDING)
    buckets = _buckets(distances, relative, is_causal=is_causal)
    return PositionBias(table[buckets].T.contiguous(), max_len - 1)


def _buckets(distances: torch.Tensor, relative: RelativePositions, *, is_causal: bool) -> torch.Tensor:
    """The bucket of each distance of key and query, as transformers computes it: half of the buckets have one distance
    each, and the sizes of the others grow."""
    count, first = relative.num_buckets, torch.zeros_like(distances)
    if is_causal:
        sizes = -distances.clamp_max(0)
    else:
        count //= 2
        first, sizes = (distances > 0).long() * count, distances.abs()
    exact = count // 2
    growth = torch.log(sizes.float().clamp_min(1) / exact) / math.log(relative.max_distance / exact)
    large = exact + (growth * (count - exact)).long()
    return first + torch.where(sizes < exact, sizes, large.clamp_max(count - 1))
