"""Layers of encoders, encoder-decoder models and vision towers in plain torch, on any device.

In exact mode a text, an image, an audio input, or a token of a decoder is computed alone: libraries choose their
kernels by the sizes of a batch, so nothing else decides the order of its sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from step_protocol.columns import I64
from worker_svc.engine.backend import (
    AttentionShape,
    BackendUnavailableError,
    Cache,
    ForwardBatch,
    HeadShape,
    Linear,
    Norm,
    RotaryTable,
)
from worker_svc.engine.config import Determinism, EngineConfig
from worker_svc.engine.cpu.torch_ops import split_heads
from worker_svc.engine.gpu.kernels.activation import reference, reference_activate
from worker_svc.engine.gpu.kernels.norm import normed, torch_add_norm
from worker_svc.engine.gpu.layers.linears import DeviceLinear
from worker_svc.engine.gpu.start.setup import find_device
from worker_svc.engine.kernels.numerics import torch_numerics


class TorchLayers:
    """See `LayerBackend` for the contracts."""

    name = "cuda"
    copies_weights = False

    def __init__(self, device: torch.device, determinism: Determinism) -> None:
        self.device = device
        self.is_batched = determinism == "best_effort"
        self.arithmetic = torch_numerics(device)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return DeviceLinear(F.linear, weight, bias)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
        torch_add_norm(x, residual, norm, out)

    def qk_norm_rope_store(
        self,
        qkv: torch.Tensor,
        norms: tuple[Norm, Norm] | None,
        rotary: RotaryTable | None,
        batch: ForwardBatch,
        cache: Cache,
        q_out: torch.Tensor,
        shape: HeadShape,
    ) -> None:
        positions, slots = torch.from_numpy(batch.positions), torch.from_numpy(batch.slots)
        q, k, v = split_heads(qkv, norms, rotary, positions.to(self.device), shape, normed)
        q_out.copy_(q)
        block_size = cache[0].shape[-1]
        blocks, offsets = slots // block_size, slots % block_size
        cache[0][blocks, :, :, offsets] = k
        cache[1][blocks, :, offsets] = v

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

    def copy_blocks(self, pool: torch.Tensor, src: I64, dst: I64) -> None:
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            pool[:, target] = pool[:, source]


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
