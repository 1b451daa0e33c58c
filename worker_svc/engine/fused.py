"""All layers of a decoder in one call into the kernels.

Between two operations Python takes as long as a small operation does, and lets other threads of the worker take the
interpreter. With one call a step's layers run undisturbed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from worker_svc.engine.backend import ForwardBatch, RotaryTable
from worker_svc.engine.kernel_linear import KernelLinear, LinearStruct

if TYPE_CHECKING:
    from worker_svc.engine.architectures import ModelConfig
    from worker_svc.engine.kv_cache import KVCachePool
    from worker_svc.engine.model import Layer

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("k_cache", "v_cache")),
    )


class _ModelStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("layers", "cos", "sin")),
        *((name, _LONG) for name in ("num_layers", "hidden", "inner", "q_heads", "kv_heads", "head_dim")),
        *((name, _LONG) for name in ("block_size", "activation", "is_bf16", "threads")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _BatchStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in ("positions", "slots", "tables", "rows", "query_starts", "context_lens", "heads")
        ),
        *((name, _LONG) for name in ("num_tokens", "num_rows", "num_heads", "table_stride")),
    )


def can_fuse(layers: Sequence[Layer]) -> bool:
    """Whether all linear layers are our own kernels'."""
    linears = (linear for layer in layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return all(isinstance(linear, KernelLinear) for linear in linears)


class FusedLayers:
    """The layers of one model over one KV pool. `can_fuse` must hold."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        layers: Sequence[Layer],
        config: ModelConfig,
        rotary: RotaryTable,
        pool: KVCachePool,
        threads: int,
    ) -> None:
        self._run = kernels.quire_forward
        self._kept = (layers, rotary, pool)  # what the structs point to
        self._hidden = config.hidden_size
        self._layers = (_LayerStruct * len(layers))(
            *(_describe(layer, pool.layer(index)) for index, layer in enumerate(layers))
        )
        heads = config.heads
        self._model = _ModelStruct(
            ctypes.addressof(self._layers),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            len(layers),
            config.hidden_size,
            config.intermediate_size,
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.head_dim,
            pool.block_size,
            ACTIVATIONS[config.activation],
            int(layers[0].input_norm.dtype is torch.bfloat16),
            threads,
            config.rms_norm_eps,
            heads.head_dim**-0.5,
        )
        self._workspace_bytes = kernels.quire_forward_workspace(ctypes.byref(self._model))

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all layers on embedded tokens x [T, hidden], which it overwrites. Returns hidden states and residual
        [S, hidden] of the head tokens, to be added and normed."""
        num_tokens, num_heads = len(x), len(batch.head_tokens)
        columns = (batch.positions, batch.slots, batch.tables, batch.rows, batch.query_starts, batch.context_lens)
        addresses = (column.ctypes.data for column in (*columns, batch.head_tokens))
        struct = _BatchStruct(*addresses, num_tokens, len(batch.rows), num_heads, batch.tables.shape[1])
        residual = torch.empty_like(x)
        workspace = torch.empty(num_tokens * self._workspace_bytes, dtype=torch.uint8)
        self._run(
            ctypes.byref(self._model), ctypes.byref(struct), x.data_ptr(), residual.data_ptr(), workspace.data_ptr()
        )
        return x[:num_heads], residual[:num_heads]


def _describe(layer: Layer, cache: tuple[torch.Tensor, torch.Tensor]) -> _LayerStruct:
    norms = (layer.input_norm, layer.post_norm, *(layer.qk_norms or (None, None)))
    linears = [
        linear.struct()
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
        if isinstance(linear, KernelLinear)
    ]
    return _LayerStruct(
        *(None if norm is None else norm.data_ptr() for norm in norms), *linears, *(part.data_ptr() for part in cache)
    )
