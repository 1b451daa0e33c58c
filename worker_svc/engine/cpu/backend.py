"""The CPU backend: compiled kernels; and the backends of CPUs by name."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from step_protocol.columns import I32, I64, U32
from worker_svc.engine.adapters.kernel_adapter import KernelAdapter, site_rows
from worker_svc.engine.backend import (
    Adapter,
    AttentionShape,
    Backend,
    BackendUnavailableError,
    Cache,
    ExpertLinears,
    ForwardBatch,
    HeadShape,
    LatentShape,
    Linear,
    Norm,
    PackedAdapter,
    RecurrentWeights,
    RotaryTable,
    SamplingColumns,
    TopLogprobs,
)
from worker_svc.engine.config import Determinism, Quantization
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.cpu.fused import ACTIVATIONS, NORM_KINDS, FusedModel, fuse, latent_struct
from worker_svc.engine.cpu.recurrent import recurrence_struct, state_rows_struct
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.kernels.binding import address_of
from worker_svc.engine.kernels.build import KernelBuildError, load_kernels
from worker_svc.engine.kernels.four_bits import FourBitRows, FourBitUnits, units_of
from worker_svc.engine.kernels.linear import BFLOAT16, FLOAT32, INT8, KernelLinear
from worker_svc.engine.kernels.memory import WeightMemory, collapse
from worker_svc.engine.kernels.paths import PATH_ENV, CpuPathError
from worker_svc.engine.kernels.torch_linear import Int8Rows, check_int8_width
from worker_svc.engine.recurrent import StatePool
from worker_svc.engine.sampling.processors import ProcessedRows

if TYPE_CHECKING:
    from worker_svc.engine.decoder.operations import DecoderParts
    from worker_svc.engine.decoder.pool.kv_cache import KVCachePool

logger = logging.getLogger(__name__)


def _is_bf16(x: torch.Tensor) -> bool:
    return x.dtype is torch.bfloat16


class CpuBackend:
    """The compiled kernels. Raises KernelBuildError where they cannot be compiled."""

    name = "cpu"
    copies_weights = True
    device = torch.device("cpu")
    is_batched = True

    def __init__(self, threads: int, quantize: Quantization | None = None) -> None:
        self._kernels = load_kernels()
        self.arithmetic = self._kernels.quire_arithmetic().decode().strip()
        self.formats: set[str] = set()
        self._quantize = quantize
        self._threads = threads
        self._weights = WeightMemory()
        self._column_names = self._kernels.quire_sampling_columns().decode().split()
        self._columns: tuple[Mapping[str, npt.NDArray[Any]], ctypes.Array[ctypes.c_void_p]] | None = None

    @property
    def num_weight_bytes(self) -> int:
        return self._weights.num_bytes

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._kernel_linear(self._kind_of(weight), weight, bias)

    def make_int8_linear(self, rows: Int8Rows, bias: torch.Tensor | None) -> Linear:
        return self._kernel_linear(INT8, rows, bias)

    def make_four_bit_linear(self, rows: FourBitRows, bias: torch.Tensor | None) -> Linear | None:
        units = None if self._quantize else units_of(rows)
        if units is None:
            return None
        self.formats.add("int4" if rows.zeros is not None else "fp4")
        return self._kernel_linear(units.kind, units, bias)

    def _kernel_linear(
        self, kind: int, weight: torch.Tensor | Int8Rows | FourBitUnits, bias: torch.Tensor | None
    ) -> KernelLinear:
        return KernelLinear(self._kernels, kind, weight, bias, self._threads, self._weights.zeros)

    def end_load(self) -> None:
        threading.Thread(target=collapse, args=(self._weights.take(),), name="huge-pages", daemon=True).start()

    def _kind_of(self, weight: torch.Tensor) -> int:
        if self._quantize == "int8":
            check_int8_width(weight.shape[1])
            return INT8
        return {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}[weight.dtype]

    def fuse(self, parts: DecoderParts, pool: KVCachePool) -> FusedModel | None:
        """The whole forward pass in one call; see fused.py."""
        return fuse(self._kernels, parts, pool, self._threads)

    def pack_adapter(self, adapter: Adapter, num_layers: int) -> PackedAdapter:
        return KernelAdapter(self._kernels, adapter, num_layers)

    def add_adapters(
        self, layer: int, site: int, rows: Sequence[tuple[PackedAdapter, I32]], x: torch.Tensor, y: torch.Tensor
    ) -> None:
        parts = site_rows(layer, site, rows)
        self._kernels.quire_add_adapters(_is_bf16(x), parts, len(parts), x, y, y.shape[1], self._threads)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
        kind, weight, bias, eps = _parts_of(norm)
        self._kernels.quire_add_norm(
            _is_bf16(x), kind, x, residual, weight, bias, out, *x.shape, eps, self._threads
        )  # fmt: skip

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
        q_norm, k_norm = norms or (None, None)
        kind, q_weight, _, eps = _parts_of(q_norm)
        k_weight = None if k_norm is None else k_norm.weight
        widths = (0 if weight is None else len(weight) for weight in (q_weight, k_weight))
        rotation: tuple[Any, ...] = (None, None, 0, None, False, False)
        if rotary is not None:
            dims = 2 * rotary.cos.shape[1]
            rotation = rotary.cos, rotary.sin, dims, rotary.q_scales, rotary.is_interleaved, rotary.is_first
        self._kernels.quire_qk_norm_rope_store(
            *(_is_bf16(qkv), qkv, kind, q_weight, k_weight, *widths, *rotation, batch.positions, batch.slots, *cache),
            *(q_out, len(batch.positions), shape.num_q_heads, shape.num_kv_heads, shape.head_dim, cache[0].shape[-1]),
            *(eps, self._threads),
        )

    def paged_attention(
        self, q: torch.Tensor, cache: Cache, batch: ForwardBatch, out: torch.Tensor, shape: AttentionShape
    ) -> None:
        heads, bias = shape.heads, shape.bias
        biases = (None, 0, 0) if bias is None else (bias.values, bias.zero, bias.values.shape[1])
        self._kernels.quire_paged_attention(
            *(_is_bf16(q), q, *cache, out, *_rows_of(batch), batch.key_lens, len(batch.rows)),
            *(heads.num_q_heads, heads.num_kv_heads, heads.head_dim, cache[0].shape[-1]),
            *(shape.scale, shape.soft_cap or 0.0, shape.window or 0, shape.chunk or 0, shape.sinks),
            *(not shape.is_causal, *biases, self._threads),
        )

    def gate_outputs(self, out: torch.Tensor, gate: torch.Tensor) -> None:
        self._kernels.quire_gate_outputs(_is_bf16(out), out, gate, *out.shape, self._threads)

    def recurrent(
        self, weights: RecurrentWeights, states: StatePool, index: int, batch: ForwardBatch, projected: torch.Tensor
    ) -> torch.Tensor:
        spec = states.spec(index)
        out = projected.new_empty(len(projected), spec.num_values)
        layer, rows = map(ctypes.byref, (recurrence_struct(weights, states, index), state_rows_struct(batch)))
        self._kernels.quire_recurrent(
            *(_is_bf16(projected), layer, rows, projected, out),
            *(len(projected), self._threads),
        )
        return out

    def latent_rope_store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        norm: Norm,
        rotary: RotaryTable,
        batch: ForwardBatch,
        cache: torch.Tensor,
        q_out: torch.Tensor,
        shape: LatentShape,
    ) -> None:
        sizes = ctypes.byref(latent_struct(shape))
        self._kernels.quire_latent_rope_store(
            *(_is_bf16(q), q, q.stride(0), latents, latents.stride(0), len(q), norm.weight, norm.eps),
            *(rotary.cos, rotary.sin, batch.positions, batch.slots, cache, q_out),
            *(sizes, self._threads),
        )

    def latent_attention(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
        shape: LatentShape,
        scale: float,
    ) -> None:
        sizes = ctypes.byref(latent_struct(shape))
        self._kernels.quire_latent_attention(
            *(_is_bf16(q), q, cache, out, *_rows_of(batch), len(batch.rows), cache.shape[1]),
            *(sizes, scale, self._threads),
        )

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        kind = ACTIVATIONS[activation]
        self._kernels.quire_gated_activation(_is_bf16(out), gate_up, out, *out.shape, kind, self._threads)

    def activation(self, x: torch.Tensor, activation: str) -> None:
        self._kernels.quire_activate(_is_bf16(x), x, *x.shape, ACTIVATIONS[activation], self._threads)

    def experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, experts: ExpertLinears, activation: str, out: torch.Tensor
    ) -> None:
        torch_ops.experts(x, router_logits, experts, self, activation, out)

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        self._kernels.quire_soft_cap(_is_bf16(x), x, *x.shape, cap, self._threads)

    def copy_blocks(self, pool: torch.Tensor, src: I64, dst: I64) -> None:
        num_layers, num_blocks = pool.shape[:2]
        block_bytes = pool[0, 0].numel() * pool.element_size()
        self._kernels.quire_copy_blocks(pool, src, dst, len(src), num_layers, num_blocks, block_bytes)

    def process_logits(self, logits: torch.Tensor, selected: ProcessedRows) -> None:
        self._kernels.quire_process_logits(
            *(logits, logits.shape[1], selected.table.records.ctypes.data, len(selected.lines)),
            *(selected.lines, selected.rows, selected.num_tokens, self._threads),
        )

    def sample(self, logits: torch.Tensor, columns: SamplingColumns) -> tuple[U32, npt.NDArray[np.bool_]]:
        n = len(logits)
        tokens, status = np.empty(n, np.uint32), np.empty(n, np.uint8)
        self._kernels.quire_sample(
            *(_is_bf16(logits), logits, *logits.shape, self._columns_of(columns.params)),
            *(columns.rows, columns.positions, tokens, status, self._threads),
        )
        return tokens, status != 0

    def logprobs(self, logits: torch.Tensor, lines: I64, token_ids: U32, num_top: int) -> TopLogprobs:
        n = len(lines)
        values, ids = np.full((n, 1 + num_top), np.nan, np.float32), np.zeros((n, 1 + num_top), np.uint32)
        ranks, status = np.zeros(n, np.uint32), np.empty(n, np.uint8)
        self._kernels.quire_logprobs(
            *(_is_bf16(logits), logits, np.array(lines, np.int64), n, logits.shape[1]),
            *(np.array(token_ids, np.uint32), num_top, values, ids, ranks, status, self._threads),
        )
        return TopLogprobs(values, ids, ranks, status != 0)

    def filter_logits(self, logits: torch.Tensor, lines: I64, columns: SamplingColumns) -> tuple[torch.Tensor, U32]:
        n, vocab = len(lines), logits.shape[1]
        found, num_kept = torch.empty(n, vocab), np.empty(n, np.uint32)
        self._kernels.quire_filter_logits(
            *(_is_bf16(logits), logits, np.array(lines, np.int64), n, vocab, self._columns_of(columns.params)),
            *(np.array(columns.rows, np.int64), found, num_kept, self._threads),
        )
        return found, num_kept

    def _columns_of(self, params: Mapping[str, npt.NDArray[Any]]) -> ctypes.Array[ctypes.c_void_p]:
        """Addresses of the columns in the order of the kernel; read once, because a row table never replaces them."""
        if self._columns is None or self._columns[0] is not params:
            addresses = [address_of(params[name]) for name in self._column_names]
            self._columns = params, (ctypes.c_void_p * len(addresses))(*addresses)
        return self._columns[1]


def _parts_of(norm: Norm | None) -> tuple[int, torch.Tensor | None, torch.Tensor | None, float]:
    """Kind, weight, bias and eps as kernels take them."""
    return (0, None, None, 0.0) if norm is None else (NORM_KINDS[norm.kind], norm.weight, norm.bias, norm.eps)


def _rows_of(batch: ForwardBatch) -> tuple[Any, ...]:
    return batch.tables, batch.tables.shape[1], batch.rows, batch.query_starts, batch.context_lens


def make_backend(name: str, threads: int, determinism: Determinism, quantize: Quantization | None = None) -> Backend:
    """Makes the named backend. `cpu` falls back to `reference` if the kernels cannot be compiled.

    Raises BackendUnavailableError for an unknown name, and if the path that QUIRE_CPU_PATH names cannot run here.
    """
    if name == "reference":
        return ReferenceBackend(determinism, quantize)
    if name != "cpu":
        raise BackendUnavailableError(f"backend {name!r} is not one of cpu, cuda and reference")
    try:
        return CpuBackend(threads, quantize)
    except CpuPathError as error:
        raise BackendUnavailableError(str(error)) from error
    except KernelBuildError as error:
        if path := os.environ.get(PATH_ENV):
            raise BackendUnavailableError(f"{PATH_ENV} = {path}: {error}") from error
        logger.warning("no CPU kernels; plain torch operations are used, about 8 times slower: %s", error)
        return ReferenceBackend(determinism, quantize)
