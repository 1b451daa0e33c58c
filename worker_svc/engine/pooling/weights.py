"""Computes the numbers of a pooled row from its vector: the classification head, or dense layers and the normalization.

The linear layers are the backend's, in float32. On CPUs rows are computed one at a time, so that
they do not affect each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load_file

from step_protocol.columns import F32
from step_protocol.types import Pooling, PoolingInfo, PoolingKind, PoolingTask
from worker_svc.engine.backend import Linear, LinearMaker, Norm
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.checkpoint.tensors import Checkpoint
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.decoder.heads import HeadPart, HeadSpec
from worker_svc.engine.kernels.exact_ops import exp
from worker_svc.engine.pooling.config import DenseLayer, PoolingConfig

MIN_LENGTH = 1e-12


def _tanh(x: torch.Tensor) -> torch.Tensor:
    return 1.0 - 2.0 / (exp(2.0 * x) + 1.0)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x, "tanh": _tanh, "relu": torch.relu, "sigmoid": lambda x: 1.0 / (1.0 + exp(-x)),
    "gelu": lambda x: torch_ops.activate(x, "gelu"), "gelu_tanh": lambda x: torch_ops.activate(x, "gelu_tanh"),
    "silu": lambda x: torch_ops.activate(x, "silu"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolingLayer:
    """One linear layer, then an activation, then a norm."""

    linear: Linear
    activation: str
    norm: Norm | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = ACTIVATIONS[self.activation](self.linear(x))
        return y if self.norm is None else torch_ops.normed(y, self.norm)


@dataclass(frozen=True, slots=True)
class PoolingWeights:
    """The layers after the pooling, in float32."""

    dense: tuple[PoolingLayer, ...]
    head: tuple[PoolingLayer, ...] | None
    head_kind: PoolingKind  # the vector that the head reads
    dimensions: int  # of an embedding
    vocab_size: int
    generates: bool  # the model has a language-model head

    def kind_of(self, pooling: Pooling) -> PoolingKind:
        """The pooling of a row: that of the head, or that of the request."""
        if pooling.task is PoolingTask.LOGITS:
            return PoolingKind.LAST
        return self.head_kind if pooling.task is PoolingTask.CLASSES else pooling.kind

    def numbers(self, pooling: Pooling, vector: F32) -> F32:
        """The numbers of a row from its float32 vector [hidden_size]."""
        return self.finished(pooling, self.layers(pooling.task, torch.from_numpy(vector)[None])[0].numpy())

    def layers(self, task: PoolingTask, vectors: torch.Tensor) -> torch.Tensor:
        """The outputs [n, out] of the head or the dense layers for float32 vectors [n, hidden_size]."""
        for part in (self.head or ()) if task is PoolingTask.CLASSES else self.dense:
            vectors = part(vectors)
        return vectors

    def finished(self, pooling: Pooling, found: F32) -> F32:
        """The numbers of a row from the output [out] of its layers, or from its logits."""
        if pooling.task is PoolingTask.CLASSES:
            return found
        if pooling.task is PoolingTask.LOGITS:
            return found[: len(pooling.token_ids)]
        found = found[: pooling.dimensions or len(found)]
        return normalized(found) if pooling.normalize else found


def pooling_info(settings: PoolingConfig, weights: PoolingWeights, max_model_len: int) -> PoolingInfo:
    """What clients must know about the embeddings and scores of a model."""
    return PoolingInfo(
        kind=settings.kind,
        normalize=settings.normalize,
        dimensions=weights.dimensions,
        max_length=min(settings.max_length or max_model_len, max_model_len),
        num_classes=settings.num_classes,
        answer_token_ids=settings.answer_token_ids if weights.generates else (),
        has_sigmoid=settings.has_sigmoid,
        generates=weights.generates,
        embeds=settings.is_configured or not weights.generates,
    )


def normalized(vector: F32) -> F32:
    """The vector with length 1; zeros stay zeros."""
    length = math.sqrt(float(np.add.reduce(vector.astype(np.float64) ** 2)))
    scaled: F32 = (vector.astype(np.float64) / max(length, MIN_LENGTH)).astype(np.float32)
    return scaled


def load_pooling(
    checkpoint: Checkpoint, config: PoolingConfig, head: HeadSpec | None, maker: LinearMaker, *, sizes: tuple[int, int],
    generates: bool,
) -> PoolingWeights:  # fmt: skip
    """Loads dense layers and the head. `maker` gets tensors in host memory. `sizes`: hidden_size and vocab_size of the
    model. Raises CheckpointError."""
    hidden, vocab_size = sizes
    width, dense = hidden, []
    for layer in config.dense:
        if layer.in_features != width:
            raise CheckpointError(f"{layer.folder}/config.json: in_features is {layer.in_features}, expected {width}")
        dense.append(_load_dense(checkpoint, layer, maker))
        width = layer.out_features
    parts = None if head is None else tuple(_load_part(checkpoint, part, head, maker) for part in head.parts)
    kind = PoolingKind.LAST if head is None else head.kind
    return PoolingWeights(tuple(dense), parts, kind, width, vocab_size, generates)


def _load_dense(checkpoint: Checkpoint, layer: DenseLayer, maker: LinearMaker) -> PoolingLayer:
    path = checkpoint.folder / layer.folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in sorted(tensors.items()):
        checkpoint.add_to_digest(f"{layer.folder}.{name}", tensor)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias") if layer.has_bias else None
    shape = (layer.out_features, layer.in_features)
    if weight is None or tuple(weight.shape) != shape or (layer.has_bias and bias is None):
        raise CheckpointError(f"{path} has no linear.weight {list(shape)} with its bias; download the model again")
    return PoolingLayer(maker.make_linear(weight.float(), None if bias is None else bias.float()), layer.activation)


def _load_part(checkpoint: Checkpoint, part: HeadPart, head: HeadSpec, maker: LinearMaker) -> PoolingLayer:
    weight = checkpoint.tensor(f"{part.name}.weight", (part.out_features, part.in_features), torch.float32)
    bias = checkpoint.tensor(f"{part.name}.bias", (part.out_features,), torch.float32) if part.has_bias else None
    norm = None
    if part.norm:
        values = checkpoint.tensor(f"{part.norm}.weight", (part.out_features,), torch.float32)
        shift = f"{part.norm}.bias"
        offset = checkpoint.tensor(shift, (part.out_features,), torch.float32) if checkpoint.has(shift) else None
        norm = Norm(values, offset, head.norm_eps, "layer")
    return PoolingLayer(maker.make_linear(weight, bias), part.activation, norm)
