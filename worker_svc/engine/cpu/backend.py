"""The CPU backend: compiled kernels; and the backends of CPUs by name."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref
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
    LatentAttention,
    LatentShape,
    LatentTokens,
    Linear,
    Norm,
    PackedAdapter,
    QkvPart,
    RecurrentWeights,
    SamplingColumns,
    TopLogprobs,
)
from worker_svc.engine.config import Determinism, Quantization
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.cpu.fused import ACTIVATIONS, NORM_KINDS, FusedModel, fuse, latent_struct, rotary_struct
from worker_svc.engine.cpu.recurrent import recurrence_struct, state_rows_struct
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.kernels.binding import Struct, address_of, struct
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

QK_NORMS, QKV_SHAPE, LATENT_TOKENS = struct("QkNorms"), struct("QkvShape"), struct("LatentTokens")
ATTENTION_ROWS, SCORES, POSITION_BIAS = struct("AttentionRows"), struct("Scores"), struct("PositionBias")


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
        self, qkv: torch.Tensor, part: QkvPart, batch: ForwardBatch, cache: Cache, q_out: torch.Tensor
    ) -> None:
        norms, rotation = QK_NORMS(), rotary_struct(part.rotary)
        if part.norms is not None:
            (q, k), kind = part.norms, NORM_KINDS[part.norms[0].kind]
            widths = {"q_width": len(q.weight), "k_width": len(k.weight)}
            norms = QK_NORMS(q=q.weight, k=k.weight, **widths, kind=kind, eps=q.eps)
        self._kernels.quire_qk_norm_rope_store(
            *(_is_bf16(qkv), qkv, byref(norms), byref(rotation), batch.positions, batch.slots, *cache, q_out),
            *(len(batch.positions), byref(_shape_struct(part.heads, cache)), self._threads),
        )

    def paged_attention(
        self, q: torch.Tensor, cache: Cache, batch: ForwardBatch, out: torch.Tensor, shape: AttentionShape
    ) -> None:
        bias = shape.bias
        scores = SCORES(
            scale=shape.scale, cap=shape.soft_cap or 0.0, window=shape.window or 0, chunk=shape.chunk or 0,
            bias=POSITION_BIAS() if bias is None else POSITION_BIAS.of(bias, stride=bias.values.shape[1]),
            sinks=shape.sinks,
        )  # fmt: skip
        rows = _rows_struct(batch, is_full=not shape.is_causal)
        self._kernels.quire_paged_attention(
            *(_is_bf16(q), q, *cache, out, byref(rows), byref(_shape_struct(shape.heads, cache)), byref(scores)),
            self._threads,
        )

    def gate_outputs(self, out: torch.Tensor, gate: torch.Tensor) -> None:
        self._kernels.quire_gate_outputs(_is_bf16(out), out, gate, *out.shape, self._threads)

    def recurrent(
        self, weights: RecurrentWeights, states: StatePool, index: int, batch: ForwardBatch, projected: torch.Tensor
    ) -> torch.Tensor:
        spec = states.spec(index)
        out = projected.new_empty(len(projected), spec.num_values)
        layer, rows = map(byref, (recurrence_struct(weights, states, index), state_rows_struct(batch)))
        self._kernels.quire_recurrent(
            *(_is_bf16(projected), layer, rows, projected, out),
            *(len(projected), self._threads),
        )
        return out

    def latent_rope_store(
        self, tokens: LatentTokens, part: LatentAttention, batch: ForwardBatch, cache: torch.Tensor, q_out: torch.Tensor
    ) -> None:
        q, latents = tokens.q, tokens.latents
        strides = {"q_stride": q.stride(0), "latent_stride": latents.stride(0)}
        given = LATENT_TOKENS(q=q, latents=latents, n=len(q), **strides)
        self._kernels.quire_latent_rope_store(
            *(_is_bf16(q), byref(given), part.norm.weight, part.norm.eps, byref(rotary_struct(tokens.rotary))),
            *(batch.positions, batch.slots, cache, q_out, byref(latent_struct(part.shape)), self._threads),
        )

    def latent_attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, shape: LatentShape, scale: float
    ) -> torch.Tensor:
        out = q.new_empty(len(q), shape.num_heads, shape.rank)
        self._kernels.quire_latent_attention(
            *(_is_bf16(q), q, cache, out, byref(_rows_struct(batch)), cache.shape[1], byref(latent_struct(shape))),
            *(scale, self._threads),
        )
        return out

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


def _rows_struct(batch: ForwardBatch, **fields: Any) -> Struct:
    return ATTENTION_ROWS.of(batch, table_stride=batch.tables.shape[1], count=len(batch.rows), **fields)


def _shape_struct(heads: HeadShape, cache: Cache) -> Struct:
    sizes = {"q_heads": heads.num_q_heads, "kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    return QKV_SHAPE(**sizes, block_size=cache[0].shape[-1])


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
