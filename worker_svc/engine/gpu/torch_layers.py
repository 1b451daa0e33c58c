"""Layers of encoders, encoder-decoder models and vision towers in plain torch, on any device.

In exact mode a text, an image, an audio input, or a token of a decoder is computed alone: libraries choose their
kernels by the sizes of a batch, so nothing else decides the order of its sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import (
    AttentionShape,
    BackendUnavailableError,
    Cache,
    ForwardBatch,
    Linear,
)
from worker_svc.engine.config import Determinism, EngineConfig
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.gpu.kernels.activation import reference, reference_activate
from worker_svc.engine.gpu.kernels.norm import normed
from worker_svc.engine.gpu.layers.linears import DeviceLinear
from worker_svc.engine.gpu.start.setup import find_device
from worker_svc.engine.kernels.numerics import torch_numerics


class TorchLayers(ReferenceBackend):
    """The operations of encoders on a device, of which libraries compute those that take time."""

    name = "cuda"
    _normed = staticmethod(normed)

    def __init__(self, device: torch.device, determinism: Determinism) -> None:
        super().__init__(determinism)
        self.device = device
        self.is_batched = determinism == "best_effort"
        self.arithmetic = torch_numerics(device)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return DeviceLinear(F.linear, weight, bias)

    def paged_attention(
        self, q: torch.Tensor, cache: Cache, batch: ForwardBatch, out: torch.Tensor, shape: AttentionShape
    ) -> None:
        for i, row in enumerate(batch.rows.tolist()):
            tokens = slice(int(batch.query_starts[i]), int(batch.query_starts[i + 1]))
            context = int(batch.context_lens[i])
            positions = torch.arange(context, context + tokens.stop - tokens.start, device=self.device)
            num_keys = context + len(positions)
            if not shape.is_causal and batch.key_lens is not None:
                num_keys = int(batch.key_lens[i])
            table = torch.from_numpy(batch.tables[row, : -(-num_keys // cache[0].shape[-1])])
            k = cache[0][table].permute(1, 0, 3, 2).flatten(1, 2)[:, :num_keys]  # [heads, keys, dim]
            v = cache[1][table].transpose(0, 1).flatten(1, 2)[:, :num_keys]
            mask = _mask(shape, positions, num_keys, q.dtype)
            found = F.scaled_dot_product_attention(
                q[None, tokens].transpose(1, 2), k[None], v[None], mask, scale=shape.scale
            )
            out[tokens] = found[0].transpose(0, 1)

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        out.copy_(reference(gate_up, activation))

    def activation(self, x: torch.Tensor, activation: str) -> None:
        x.copy_(reference_activate(x, activation))


def _mask(shape: AttentionShape, positions: torch.Tensor, num_keys: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores of queries at these positions; None: nothing."""
    is_causal = shape.is_causal and len(positions) > 1  # one query sees all keys
    if not is_causal and shape.window is None and shape.bias is None:
        return None
    distances = torch.arange(num_keys, device=positions.device) - positions[:, None]
    added = torch.zeros(distances.shape, device=positions.device)
    if shape.bias is not None:
        added = shape.bias.values[:, shape.bias.zero + distances]
    if is_causal:
        added = added.masked_fill(distances > 0, -torch.inf)
    if shape.window is not None:
        added = added.masked_fill(distances.abs() > shape.window // 2, -torch.inf)
    return added.to(dtype)


def layers_for(config: EngineConfig) -> TorchLayers:
    """The layers of a model that is no decoder. Raises BackendUnavailableError for settings of decoders."""
    for name, value, wanted in (
        ("tensor_parallel_size", config.tensor_parallel_size, 1),
        ("kv_cache_dtype", config.kv_cache_dtype, "auto"),
        ("quantize", config.quantize, None),
    ):
        if value != wanted:
            raise BackendUnavailableError(
                f"{name} is {value}, but encoders and encoder-decoder models run unquantized on one GPU; leave it out"
            )
    return TorchLayers(find_device(config), config.determinism)
