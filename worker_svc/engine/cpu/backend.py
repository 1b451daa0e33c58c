"""The CPU backend: compiled kernels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from step_protocol.columns import I32, I64, U32
from worker_svc.engine.adapters.adapter import Adapter
from worker_svc.engine.adapters.kernel_adapter import KernelAdapter, site_rows
from worker_svc.engine.adapters.packed import PackedAdapter
from worker_svc.engine.backend import (
    AttentionShape,
    ExpertLinears,
    ForwardBatch,
    HeadShape,
    LatentShape,
    Linear,
    Norm,
    RotaryTable,
    SamplingColumns,
    TopLogprobs,
)
from worker_svc.engine.checkpoint import features
from worker_svc.engine.config import Quantization
from worker_svc.engine.cpu import torch_ops
from worker_svc.engine.cpu.fused import ACTIVATIONS, NORM_KINDS, FusedModel, fuse, latent_struct, pointer
from worker_svc.engine.cpu.recurrent import recurrence_struct, state_rows_struct
from worker_svc.engine.kernels.build import load_kernels
from worker_svc.engine.kernels.four_bits import FourBitRows, FourBitUnits, units_of
from worker_svc.engine.kernels.linear import BFLOAT16, FLOAT32, INT8, KernelLinear, address_of
from worker_svc.engine.kernels.memory import WeightMemory, collapse
from worker_svc.engine.kernels.torch_linear import Int8Rows, check_int8_width
from worker_svc.engine.recurrent import RecurrentWeights, StatePool
from worker_svc.engine.sampling.processors import ProcessedRows

if TYPE_CHECKING:
    from worker_svc.engine.decoder.kv_cache import KVCachePool
    from worker_svc.engine.decoder.model import DecoderParts

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64
_FLOAT = ctypes.c_float

_SIGNATURES = {
    "quire_add_norm": [_INT, _INT, *[_POINTER] * 5, _LONG, _LONG, _FLOAT, _INT],
    "quire_activate": [_INT, _POINTER, _LONG, _LONG, _INT, _INT],
    "quire_soft_cap": [_INT, _POINTER, _LONG, _LONG, _FLOAT, _INT],
    "quire_gated_activation": [_INT, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT],
    "quire_qk_norm_rope_store": [
        *(_INT, _POINTER, _INT, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _INT, _INT),
        *([_POINTER] * 5 + [_LONG] * 5 + [_FLOAT, _INT]),
    ],
    "quire_paged_attention": [
        *(_INT, *[_POINTER] * 5, _LONG, *[_POINTER] * 4, *[_LONG] * 5),
        *(_FLOAT, _FLOAT, _LONG, _LONG, _POINTER, _INT, _POINTER, _LONG, _LONG, _INT),
    ],
    "quire_latent_rope_store": [
        *(_INT, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _FLOAT, *[_POINTER] * 7, _INT),
    ],
    "quire_latent_attention": [
        *(_INT, *[_POINTER] * 4, _LONG, *[_POINTER] * 3, _LONG, _LONG, _POINTER, _FLOAT, _INT),
    ],
    "quire_copy_blocks": [*[_POINTER] * 3, *[_LONG] * 4],
    "quire_sample": [_INT, _POINTER, _LONG, _LONG, *[_POINTER] * 5, _INT],
    "quire_process_logits": [_POINTER, _LONG, _POINTER, _LONG, *[_POINTER] * 3, _INT],
    "quire_logprobs": [_INT, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, *[_POINTER] * 4, _INT],
    "quire_filter_logits": [_INT, _POINTER, _POINTER, _LONG, _LONG, *[_POINTER] * 4, _INT],
    "quire_linear_pack": [_INT, _INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT],
    "quire_linear_pack_steps": [_POINTER, _LONG, _LONG, _POINTER, _INT],
    "quire_linear_4bit_pack": [_INT, *[_POINTER] * 3, *[_LONG] * 3, _POINTER, _INT],
    "quire_linear": [_INT, _INT, *[_POINTER] * 5, *[_LONG] * 4, _POINTER, _INT],
    "quire_recurrent": [_INT, *[_POINTER] * 4, _LONG, _INT],
    "quire_gate_outputs": [_INT, *[_POINTER] * 2, *[_LONG] * 2, _INT],
    "quire_forward": [_POINTER] * 4,
    "quire_forward_logits": [_POINTER, _LONG, _LONG, _LONG, *[_POINTER] * 2],
    "quire_add_adapters": [_INT, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _INT],
    "quire_forward_hidden": [_POINTER, _LONG, _LONG, _LONG, *[_POINTER] * 2],
    "quire_gumbel_noise": [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, _POINTER, _LONG, _POINTER],
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the argument types of every kernel."""
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = None
    library.quire_tile_product.argtypes = [_INT, *[_POINTER] * 3]
    library.quire_kv_is_paired.argtypes = [_INT, _LONG, _LONG]
    library.quire_forward_workspace.argtypes = [_POINTER]
    library.quire_forward_workspace.restype = _LONG
    library.quire_sampling_columns.argtypes = []
    library.quire_sampling_columns.restype = ctypes.c_char_p
    library.quire_processor_row_bytes.argtypes = []
    library.quire_processor_row_bytes.restype = _LONG
    library.quire_arithmetic.restype = ctypes.c_char_p
    library.quire_linear_packed_bytes.argtypes = [_INT, _LONG, _LONG]
    library.quire_linear_packed_bytes.restype = _LONG
    library.quire_linear_4bit_bytes.argtypes = [_INT, _LONG, _LONG, _LONG]
    library.quire_linear_4bit_bytes.restype = _LONG
    return library


def _is_bf16(x: torch.Tensor) -> int:
    return int(x.dtype is torch.bfloat16)


class _Addresses:
    """Addresses of a batch's columns, read once: reading one through numpy takes longer than a small kernel."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self.positions = address_of(batch.positions)
        self.slots = address_of(batch.slots)
        self.tables = address_of(batch.tables)
        self.rows = address_of(batch.rows)
        self.query_starts = address_of(batch.query_starts)
        self.context_lens = address_of(batch.context_lens)
        self.key_lens = None if batch.key_lens is None else address_of(batch.key_lens)


class CpuBackend:
    """The compiled kernels. Raises KernelBuildError where they cannot be compiled."""

    name = "cpu"
    copies_weights = True
    device = torch.device("cpu")
    is_batched = True
    features = features.CPU

    def __init__(self, threads: int, quantize: Quantization | None = None) -> None:
        self._kernels = declare(load_kernels())
        self.arithmetic = self._kernels.quire_arithmetic().decode().strip()
        self.formats: set[str] = set()
        self._quantize = quantize
        self._threads = threads
        self._weights = WeightMemory()
        self._addresses: _Addresses | None = None
        self._column_names = self._kernels.quire_sampling_columns().decode().split()
        self._columns: tuple[Mapping[str, npt.NDArray[Any]], ctypes.Array[ctypes.c_void_p]] | None = None

    def _addresses_of(self, batch: ForwardBatch) -> _Addresses:
        if self._addresses is None or self._addresses.batch is not batch:
            self._addresses = _Addresses(batch)
        return self._addresses

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
        self._kernels.quire_add_adapters(
            _is_bf16(x), ctypes.addressof(parts), len(parts), x.data_ptr(), y.data_ptr(), y.shape[1], self._threads
        )

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
        n, dim = x.shape
        self._kernels.quire_add_norm(
            _is_bf16(x),
            0 if norm is None else NORM_KINDS[norm.kind],
            x.data_ptr(),
            pointer(residual),
            None if norm is None else norm.weight.data_ptr(),
            None if norm is None else pointer(norm.bias),
            out.data_ptr(),
            n,
            dim,
            0.0 if norm is None else norm.eps,
            self._threads,
        )

    def qk_norm_rope_store(
        self,
        qkv: torch.Tensor,
        norms: tuple[Norm, Norm] | None,
        rotary: RotaryTable | None,
        batch: ForwardBatch,
        cache: tuple[torch.Tensor, torch.Tensor],
        q_out: torch.Tensor,
        shape: HeadShape,
    ) -> None:
        addresses = self._addresses_of(batch)
        q_norm, k_norm = norms or (None, None)
        self._kernels.quire_qk_norm_rope_store(
            _is_bf16(qkv),
            qkv.data_ptr(),
            0 if q_norm is None else NORM_KINDS[q_norm.kind],
            None if q_norm is None else q_norm.weight.data_ptr(),
            None if k_norm is None else k_norm.weight.data_ptr(),
            0 if q_norm is None else len(q_norm.weight),
            0 if k_norm is None else len(k_norm.weight),
            None if rotary is None else rotary.cos.data_ptr(),
            None if rotary is None else rotary.sin.data_ptr(),
            0 if rotary is None else 2 * rotary.cos.shape[1],
            None if rotary is None else pointer(rotary.q_scales),
            int(rotary is not None and rotary.is_interleaved),
            int(rotary is not None and rotary.is_first),
            addresses.positions,
            addresses.slots,
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            q_out.data_ptr(),
            len(batch.positions),
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            cache[0].shape[-1],
            0.0 if q_norm is None else q_norm.eps,
            self._threads,
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        out: torch.Tensor,
        shape: AttentionShape,
    ) -> None:
        addresses, heads, bias = self._addresses_of(batch), shape.heads, shape.bias
        self._kernels.quire_paged_attention(
            _is_bf16(q),
            q.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            out.data_ptr(),
            addresses.tables,
            batch.tables.shape[1],
            addresses.rows,
            addresses.query_starts,
            addresses.context_lens,
            addresses.key_lens,
            len(batch.rows),
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.head_dim,
            cache[0].shape[-1],
            shape.scale,
            shape.soft_cap or 0.0,
            shape.window or 0,
            shape.chunk or 0,
            pointer(shape.sinks),
            int(not shape.is_causal),
            None if bias is None else bias.values.data_ptr(),
            0 if bias is None else bias.zero,
            0 if bias is None else bias.values.shape[1],
            self._threads,
        )

    def gate_outputs(self, out: torch.Tensor, gate: torch.Tensor) -> None:
        self._kernels.quire_gate_outputs(_is_bf16(out), out.data_ptr(), gate.data_ptr(), *out.shape, self._threads)

    def recurrent(
        self, weights: RecurrentWeights, states: StatePool, index: int, batch: ForwardBatch, projected: torch.Tensor
    ) -> torch.Tensor:
        spec = states.spec(index)
        out = projected.new_empty(len(projected), spec.num_values)
        self._kernels.quire_recurrent(
            _is_bf16(projected),
            ctypes.byref(recurrence_struct(weights, states, index)),
            ctypes.byref(state_rows_struct(batch)),
            projected.data_ptr(),
            out.data_ptr(),
            len(projected),
            self._threads,
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
        addresses = self._addresses_of(batch)
        self._kernels.quire_latent_rope_store(
            _is_bf16(q),
            q.data_ptr(),
            q.stride(0),
            latents.data_ptr(),
            latents.stride(0),
            len(q),
            norm.weight.data_ptr(),
            norm.eps,
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            addresses.positions,
            addresses.slots,
            cache.data_ptr(),
            q_out.data_ptr(),
            ctypes.byref(latent_struct(shape)),
            self._threads,
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
        addresses = self._addresses_of(batch)
        self._kernels.quire_latent_attention(
            _is_bf16(q),
            q.data_ptr(),
            cache.data_ptr(),
            out.data_ptr(),
            addresses.tables,
            batch.tables.shape[1],
            addresses.rows,
            addresses.query_starts,
            addresses.context_lens,
            len(batch.rows),
            cache.shape[1],
            ctypes.byref(latent_struct(shape)),
            scale,
            self._threads,
        )

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        n, dim = out.shape
        self._kernels.quire_gated_activation(
            _is_bf16(out), gate_up.data_ptr(), out.data_ptr(), n, dim, ACTIVATIONS[activation], self._threads
        )

    def activation(self, x: torch.Tensor, activation: str) -> None:
        n, dim = x.shape
        self._kernels.quire_activate(_is_bf16(x), x.data_ptr(), n, dim, ACTIVATIONS[activation], self._threads)

    def experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, experts: ExpertLinears, activation: str, out: torch.Tensor
    ) -> None:
        torch_ops.experts(x, router_logits, experts, self, activation, out)

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        n, dim = x.shape
        self._kernels.quire_soft_cap(_is_bf16(x), x.data_ptr(), n, dim, cap, self._threads)

    def copy_blocks(self, pool: torch.Tensor, src: I64, dst: I64) -> None:
        num_layers, num_blocks = pool.shape[:2]
        block_bytes = pool[0, 0].numel() * pool.element_size()
        self._kernels.quire_copy_blocks(
            pool.data_ptr(), address_of(src), address_of(dst), len(src), num_layers, num_blocks, block_bytes
        )

    def process_logits(self, logits: torch.Tensor, selected: ProcessedRows) -> None:
        self._kernels.quire_process_logits(
            logits.data_ptr(),
            logits.shape[1],
            selected.table.records.ctypes.data,
            len(selected.lines),
            address_of(selected.lines),
            address_of(selected.rows),
            address_of(selected.num_tokens),
            self._threads,
        )

    def sample(self, logits: torch.Tensor, columns: SamplingColumns) -> tuple[U32, npt.NDArray[np.bool_]]:
        n, vocab = logits.shape
        tokens, status = np.empty(n, np.uint32), np.empty(n, np.uint8)
        self._kernels.quire_sample(
            _is_bf16(logits),
            logits.data_ptr(),
            n,
            vocab,
            self._columns_of(columns.params),
            address_of(columns.rows),
            address_of(columns.positions),
            address_of(tokens),
            address_of(status),
            self._threads,
        )
        return tokens, status != 0

    def logprobs(self, logits: torch.Tensor, lines: I64, token_ids: U32, num_top: int) -> TopLogprobs:
        n = len(lines)
        values, ids = np.full((n, 1 + num_top), np.nan, np.float32), np.zeros((n, 1 + num_top), np.uint32)
        ranks, status = np.zeros(n, np.uint32), np.empty(n, np.uint8)
        columns = (np.array(lines, np.int64), np.array(token_ids, np.uint32))
        self._kernels.quire_logprobs(
            _is_bf16(logits),
            logits.data_ptr(),
            address_of(columns[0]),
            n,
            logits.shape[1],
            address_of(columns[1]),
            num_top,
            address_of(values),
            address_of(ids),
            address_of(ranks),
            address_of(status),
            self._threads,
        )
        return TopLogprobs(values, ids, ranks, status != 0)

    def filter_logits(self, logits: torch.Tensor, lines: I64, columns: SamplingColumns) -> tuple[torch.Tensor, U32]:
        n, vocab = len(lines), logits.shape[1]
        found, num_kept = torch.empty(n, vocab), np.empty(n, np.uint32)
        of_lines, of_rows = np.array(lines, np.int64), np.array(columns.rows, np.int64)
        self._kernels.quire_filter_logits(
            _is_bf16(logits),
            logits.data_ptr(),
            address_of(of_lines),
            n,
            vocab,
            self._columns_of(columns.params),
            address_of(of_rows),
            found.data_ptr(),
            address_of(num_kept),
            self._threads,
        )
        return found, num_kept

    def _columns_of(self, params: Mapping[str, npt.NDArray[Any]]) -> ctypes.Array[ctypes.c_void_p]:
        """Addresses of the columns in the order of the kernel; read once, because a row table never replaces them."""
        if self._columns is None or self._columns[0] is not params:
            addresses = [address_of(params[name]) for name in self._column_names]
            self._columns = params, (_POINTER * len(addresses))(*addresses)
        return self._columns[1]
