"""A decoder from token ids to logits in one call into the kernels.

The Python code between two operations takes as long as a small operation. Nearly every torch operation also releases
the interpreter lock, and the worker's event loop can then take it and hold it for a while. A single call is not
interrupted, and the event loop can use the interpreter during the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from step_protocol.columns import I64
from worker_svc.engine.adapters.kernel_adapter import adapter_structs
from worker_svc.engine.backend import ForwardBatch, LatentShape, Linear, Norm, RotaryTable
from worker_svc.engine.cpu.recurrent import RecurrenceStruct, recurrence_struct
from worker_svc.engine.decoder.config import LayerSpec
from worker_svc.engine.decoder.forward import BESIDE_OUT, compute_layers
from worker_svc.engine.decoder.latents import LatentAttention
from worker_svc.engine.decoder.layer import FeedForward, Layer, RoutedExperts
from worker_svc.engine.kernels.linear import PANEL, KernelLinear, LinearStruct, address_of
from worker_svc.engine.recurrent import RecurrentWeights

if TYPE_CHECKING:
    from worker_svc.engine.decoder.kv_cache import KVCachePool
    from worker_svc.engine.decoder.model import DecoderParts

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64

Structs = ctypes.Array[LinearStruct]

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "clamped_swiglu": 4}
SHARED_KINDS = {"none": 0, "whole": 1, "gated": 2}
NORM_KINDS = {"rms": 0, "rms_offset": 1, "layer": 2}


class _NormStruct(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class _RotaryStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("cos", "sin")),
        ("dims", _LONG),
        ("q_scales", _POINTER),
        *((name, _LONG) for name in ("is_interleaved", "is_first")),
    )


class _ExpertsStruct(ctypes.Structure):
    _fields_ = (
        ("router", LinearStruct),
        *((name, _POINTER) for name in ("gate_up", "down", "correction", "scales")),
        *((name, _LONG) for name in ("num_experts", "top_k", "is_normalized", "is_sigmoid", "num_groups")),
        *((name, _LONG) for name in ("top_groups", "group_best", "shared", "scales_inputs", "is_float32")),
        ("is_gated", _LONG),
        ("scale", ctypes.c_double),
    )


class _LatentShapeStruct(ctypes.Structure):
    _fields_ = tuple(
        (name, _LONG) for name in ("heads", "rank", "rope_dim", "key_dim", "value_dim", "width", "is_interleaved")
    )


class _LatentsStruct(ctypes.Structure):
    _fields_ = (
        ("query", LinearStruct),
        *((name, _POINTER) for name in ("q_norm", "norm", "absorb", "expand")),
        ("shape", _LatentShapeStruct),
        ("eps", ctypes.c_float),
    )


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("q_norm", "k_norm", "v_norm")),
        *((name, _LONG) for name in ("q_width", "k_width")),
        ("rotary", _RotaryStruct),
        *((name, _LONG) for name in ("window", "chunk")),
        *((name, _POINTER) for name in ("sinks", "k_cache", "v_cache")),
        *((name, _LONG) for name in ("q_heads", "kv_heads", "head_dim", "stores_kv")),
        ("recurrence", _POINTER),
        *((name, _LONG) for name in ("mixed_width", "has_gate", "group")),
    )


class _OpStruct(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("kind", "layer", "site", "adds_residual", "adds_output")),
        ("norm", _NormStruct),
        ("linear", LinearStruct),
        ("experts", _ExpertsStruct),
        ("latents", _LatentsStruct),
        ("router_norm", _NormStruct),
        ("is_beside", _LONG),
        ("scale", ctypes.c_float),
    )


class _ModelStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("layers", "ops", "embedding", "position_embedding", "layer_embedding")),
        *((name, _LONG) for name in ("layer_vocab", "layer_width")),
        ("final_norm", _NormStruct),
        ("head", LinearStruct),
        *(
            (name, _LONG)
            for name in ("num_layers", "num_ops", "hidden", "inner", "qkv", "q", "mixed", "beside", "queries")
        ),
        *((name, _LONG) for name in ("block_size", "norm_kind", "activation", "is_gated", "is_bf16", "threads")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "embedding_scale", "residual_scale", "logit_scale")),
        *((name, ctypes.c_float) for name in ("attention_cap", "logit_cap")),
    )


class _BatchStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("token_ids", "positions", "slots", "tables", "rows")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "heads", "embedded_tokens", "embedded")),
        *((name, _POINTER) for name in ("adapters", "cos", "sin", "deep_tokens", "deep")),
        *((name, _POINTER) for name in ("snapshot_starts", "snapshot_ends", "snapshot_slots")),
        *((name, _POINTER) for name in ("group_slots", "group_tables", "captures", "captured")),
        *((name, _LONG) for name in ("num_tokens", "num_rows", "num_heads", "num_embedded", "table_stride")),
        *((name, _LONG) for name in ("num_adapters", "num_deep_tokens", "num_deep_layers", "group_stride")),
        ("num_captures", _LONG),
    )


# In the order of `OpKind` in forward.cpp.
EMBED, LINEAR, LINEAR_OF_NORM, ATTEND, RECUR, KEEP_HEADS, EXPERTS, OUTPUT, END_LAYER = range(9)
ATTEND_LATENTS, EXPAND_LATENTS, ADD, LAYER_INPUTS, GATE_INPUT, SUM = range(9, 15)
INPUT = BESIDE_OUT + 1  # the site of the linear layers around a layer's own input
PLACE = torch.empty(1)  # stands for a tensor that is in the workspace
BESIDE = torch.empty(1)  # the same for the output of experts beside a dense part


class _Recorder:
    """Records the operations of a pass instead of computing them; see `StepOperations`."""

    def __init__(self, parts: DecoderParts) -> None:
        self._parts = parts
        self.ops: list[_OpStruct] = []
        self.experts_kept: list[tuple[Structs, Structs]] = []  # keeps alive the memory that the operations point to
        self.heads_kept: list[tuple[Structs, Structs]] = []  # the same of latent attention

    def _record(
        self, kind: int, layer: int = 0, site: int = 0, norm: Norm | None = None, **fields: Any
    ) -> torch.Tensor:
        self.ops.append(_OpStruct(kind=kind, layer=layer, site=site, norm=_norm_struct(norm), **fields))
        return PLACE

    def embed(self) -> torch.Tensor:
        self._record(EMBED)
        if (part := self._parts.per_layer) is not None:
            scale = self._parts.config.hidden_size**-0.5
            self._record(LAYER_INPUTS, site=INPUT, norm=part.norm, linear=_linear_struct(part.projection), scale=scale)
        return PLACE

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._record(LINEAR, index, site, linear=_linear_struct(linear), adds_output=int(onto is not None))

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        struct, adds = _linear_struct(linear), int(residual is not None)
        return self._record(LINEAR_OF_NORM, index, site, norm, linear=struct, adds_residual=adds)

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        return self._record(ATTEND, index)

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        return self._record(RECUR, index)

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        return self._record(ATTEND_LATENTS, index, latents=self._latents_struct(part))

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        return self._record(EXPAND_LATENTS, latents=self._latents_struct(part))

    def _latents_struct(self, part: LatentAttention) -> _LatentsStruct:
        absorb, expand = ((LinearStruct * len(side))(*map(_linear_struct, side)) for side in (part.absorb, part.expand))
        self.heads_kept.append((absorb, expand))
        query = None if part.query is None else _linear_struct(part.query)
        return _LatentsStruct(
            query or LinearStruct(),
            None if part.query_norm is None else part.query_norm.weight.data_ptr(),
            part.norm.weight.data_ptr(),
            *map(ctypes.addressof, (absorb, expand)),
            latent_struct(part.shape),
            part.norm.eps,
        )

    def keep_heads(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        self._record(KEEP_HEADS)
        return list(rows)

    def activated(self, gate_up: torch.Tensor, index: int) -> torch.Tensor:
        return gate_up  # the kernel of gate_up computes its activation

    def experts(
        self, part: RoutedExperts, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        experts, routing = part.experts, part.experts.routing
        sides = [(LinearStruct * len(side))(*map(_linear_struct, side)) for side in (experts.gate_up, experts.down)]
        self.experts_kept.append((sides[0], sides[1]))
        struct = _ExpertsStruct(
            _linear_struct(part.router),
            *map(ctypes.addressof, sides),
            pointer(experts.correction),
            pointer(experts.scales),
            routing.num_experts,
            routing.top_k,
            int(routing.is_normalized),
            int(routing.is_sigmoid),
            routing.num_groups,
            routing.top_groups,
            routing.group_best,
            SHARED_KINDS[routing.shared],
            int(routing.scales_inputs),
            int(routing.is_float32),
            int(experts.is_gated),
            routing.scale,
        )
        is_beside, router_norm = part.router_norm is not None, _norm_struct(part.router_norm)
        adds = int(residual is not None)
        self._record(
            EXPERTS, norm=norm, adds_residual=adds, experts=struct, router_norm=router_norm, is_beside=int(is_beside)
        )
        return BESIDE if is_beside else PLACE

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None or self._parts.config.residual_scale != 1.0:
            self._record(OUTPUT, norm=norm, is_beside=int(x is BESIDE))
        return x

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._record(ADD)

    def end_attention(self, x: torch.Tensor, output: torch.Tensor, index: int) -> None:
        """`fuse` refuses models with a part here."""

    def end_layer(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        layer = self._parts.layers[index]
        if (part := layer.per_layer) is not None:
            self._record(SUM, scale=1.0)
            self._record(GATE_INPUT, index, INPUT, linear=_linear_struct(part.gate))
            self._record(LINEAR, index, INPUT, linear=_linear_struct(part.projection))
            self._record(OUTPUT, norm=part.norm)
        if part is not None or layer.scale != 1.0:
            self._record(SUM, scale=layer.scale)
        self._record(END_LAYER, index)


class FusedModel:
    """One model over one KV pool. Called on a batch, it returns logits [S, vocab] that the next call overwrites."""

    def __init__(self, kernels: ctypes.CDLL, parts: DecoderParts, pool: KVCachePool, threads: int) -> None:
        config = parts.config
        self._run = kernels.quire_forward
        self._run_logits = kernels.quire_forward_logits
        self._run_hidden = kernels.quire_forward_hidden
        recorder = _Recorder(parts)
        compute_layers(recorder, parts.layers)
        recurrences = [_recurrence(layer, pool, index) for index, layer in enumerate(parts.layers)]
        # Keeps alive the memory that the structs point to
        self._kept = (parts, pool, recorder.experts_kept, recurrences, recorder.heads_kept)
        self._ops = (_OpStruct * len(recorder.ops))(*recorder.ops)
        self._layers = (_LayerStruct * len(parts.layers))(
            *(
                _describe(
                    layer,
                    config.layers[index],
                    parts.rotary(index),
                    pool.parts(index),
                    recurrences[index],
                    pool.group_of[index],
                )
                for index, layer in enumerate(parts.layers)
            )
        )
        self._model = _ModelStruct(
            ctypes.addressof(self._layers),
            ctypes.addressof(self._ops),
            parts.embedding.data_ptr(),
            pointer(parts.position_embedding),
            None if parts.per_layer is None else parts.per_layer.embedding.data_ptr(),
            config.layer_input_vocab,
            config.layer_input_width,
            _norm_struct(parts.final_norm),
            LinearStruct() if parts.head is None else _linear_struct(parts.head),
            len(parts.layers),
            len(self._ops),
            config.hidden_size,
            max(config.widest_inner, config.layer_input_width, config.hidden_size if recorder.experts_kept else 0),
            *_widest(parts),
            pool.block_size,
            NORM_KINDS[config.norm],
            ACTIVATIONS[config.activation],
            int(config.is_gated),
            int(parts.embedding.dtype is torch.bfloat16),
            threads,
            config.norm_eps,
            config.attention_scale,
            float(torch.tensor(config.embedding_scale, dtype=parts.embedding.dtype)),
            config.residual_scale,
            config.logit_scale,
            config.attention_soft_cap or 0.0,
            config.logit_soft_cap or 0.0,
        )
        self._captures = np.array(parts.captures, np.int64)
        self.captured = parts.embedding.new_empty(0)  # outputs [captures, T, hidden] of layers in the last step
        self._workspace_bytes = kernels.quire_forward_workspace(ctypes.byref(self._model))
        # Kept between steps: allocating would release the interpreter lock and fault in fresh pages.
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = parts.embedding.new_empty(0, config.vocab_size)
        self.hidden = torch.empty(0, config.hidden_size)  # float32 states of the hidden tokens of the last step

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        num_heads = len(batch.head_tokens)
        self._make_room(num_heads)
        if batch.hidden_tokens is not None:
            parts = [part.clone() for part in self.in_slices(batch, max(1, num_heads))]
            return torch.cat(parts) if parts else self._logits[:0]
        self._compute(batch, self._logits.data_ptr())
        return self._logits[:num_heads]

    def in_slices(self, batch: ForwardBatch, size: int) -> Iterator[torch.Tensor]:
        """The same logits, `size` rows at a time. Each slice overwrites the previous one."""
        self._make_room(size)
        merged, heads, hidden = batch.merged_heads()
        self._compute(replace(batch, head_tokens=merged), None)
        if batch.hidden_tokens is not None:
            self.hidden = torch.empty(len(hidden), self.hidden.shape[1])
        num_hidden, num_tokens = 0, len(batch.token_ids)
        for start, end in _runs(hidden):
            self._run_part(self._run_hidden, num_tokens, start, end - start, self.hidden[num_hidden:])
            num_hidden += end - start
        for start, end in _runs(heads):
            for first in range(start, end, size):
                count = min(size, end - first)
                self._run_part(self._run_logits, num_tokens, first, count, self._logits)
                yield self._logits[:count]

    def _run_part(self, function: Any, num_tokens: int, first: int, count: int, out: torch.Tensor) -> None:
        """Computes `count` rows from the states that the last `_compute` left in the workspace."""
        address = self._workspace.data_ptr()
        function(ctypes.byref(self._model), num_tokens, first, count, out.data_ptr(), address)

    def _make_room(self, num_logits: int) -> None:
        if len(self._logits) < num_logits:
            self._logits = self._logits.new_empty(num_logits, self._logits.shape[1])

    def _compute(self, batch: ForwardBatch, logits: int | None) -> None:
        num_tokens, num_heads, given = len(batch.token_ids), len(batch.head_tokens), batch.embedded
        if len(self._workspace) < num_tokens * self._workspace_bytes:
            self._workspace = torch.empty(num_tokens * self._workspace_bytes, dtype=torch.uint8)
        addresses = (
            address_of(batch.token_ids),
            address_of(batch.positions),
            address_of(batch.slots),
            address_of(batch.tables),
            address_of(batch.rows),
            address_of(batch.query_starts),
            address_of(batch.context_lens),
            address_of(batch.head_tokens),
            *((None, None) if given is None else (address_of(given.tokens), given.rows.data_ptr())),
        )
        adapters = adapter_structs(batch.adapters)
        counts = num_tokens, len(batch.rows), num_heads, 0 if given is None else len(given.tokens)
        rotary, deep = batch.rotary, batch.deep
        images = (
            *((None, None) if rotary is None else (rotary.cos.data_ptr(), rotary.sin.data_ptr())),
            *((None, None) if deep is None else (address_of(deep.tokens), deep.rows.data_ptr())),
        )
        taken = batch.snapshots
        snapshots = (None,) * 3 if taken is None else map(address_of, (taken.starts, taken.ends, taken.slots))
        deep_sizes = (0, 0) if deep is None else (len(deep.tokens), len(deep.rows))
        groups = batch.groups
        of_groups = (None, None) if groups is None else (address_of(groups.slots), address_of(groups.tables))
        if len(self._captures):
            self.captured = self._logits.new_empty(len(self._captures), num_tokens, self.hidden.shape[1])
        captures = address_of(self._captures), self.captured.data_ptr()
        sizes = *counts, batch.tables.shape[1], len(adapters), *deep_sizes, batch.tables.size, len(self._captures)
        struct = _BatchStruct(
            *addresses, ctypes.addressof(adapters), *images, *snapshots, *of_groups, *captures, *sizes
        )
        self._run(ctypes.byref(self._model), ctypes.byref(struct), logits, self._workspace.data_ptr())


def _runs(lines: I64) -> Iterator[tuple[int, int]]:
    """The runs of successive numbers: the first one and the end of each."""
    ends = (np.flatnonzero(np.diff(lines) != 1) + 1).tolist()
    for start, end in pairwise((0, *ends, len(lines))):
        if start < end:
            yield int(lines[start]), int(lines[end - 1]) + 1


def _widest(parts: DecoderParts) -> tuple[int, int, int, int, int]:
    """The widest numbers of a token around attention: see `Model` of forward.cpp."""
    specs = parts.config.layers
    latents = [spec.latents.shape for spec in specs if spec.latents is not None]
    # `expand_latents` exchanges the last two
    queries = max((shape.num_heads * max(shape.rank, shape.query_dim, shape.value_dim) for shape in latents), default=0)
    attended = [spec.heads.num_q_heads * spec.heads.head_dim for spec in specs]
    inputs = [layer.qkv for layer in parts.layers]
    inputs += [layer.beside.qkv for layer in parts.layers if layer.beside is not None]
    return (
        max(_outputs(linear) for linear in inputs if linear is not None),
        max(*attended, *(shape.num_heads * shape.width for shape in latents), 0),
        max(*(spec.mixed_width for spec in specs), *attended, queries),
        parts.config.hidden_size if any(spec.dense_inner for spec in specs) else 0,
        queries,
    )


def fuse(kernels: ctypes.CDLL, parts: DecoderParts, pool: KVCachePool, threads: int) -> FusedModel | None:
    """None unless all linear layers are KernelLinear, the experts of each layer have the same number type, and gates
    fill whole panels; or if there are several residual streams."""
    if parts.streams is not None:
        return None
    widths = [width for layer in parts.config.layers for width in (layer.expert_widths() or [layer.inner])]
    widths += [layer.dense_inner for layer in parts.config.layers]
    has_panels = not parts.config.is_gated or not any(width % PANEL for width in widths)
    if not has_panels:
        return None
    linears = [linear for layer in parts.layers for linear in _linears(layer)]
    linears += [] if parts.per_layer is None else [parts.per_layer.projection]
    if not all(linear is None or isinstance(linear, KernelLinear) for linear in (*linears, parts.head)):
        return None
    feeds = [part for layer in parts.layers for part in _feed_forward_parts(layer)]
    if not all(map(_have_one_kind, feeds)):
        return None
    return FusedModel(kernels, parts, pool, threads)


def _have_one_kind(part: FeedForward | RoutedExperts) -> bool:
    """Whether the experts can be multiplied together: a checkpoint may quantize only some of them."""
    if not isinstance(part, RoutedExperts):
        return True
    sides = part.experts.gate_up, part.experts.down
    return all(len({linear.kind for linear in side if isinstance(linear, KernelLinear)}) == 1 for side in sides)


def pointer(x: torch.Tensor | None) -> int | None:
    """The address of a tensor. None: null."""
    return None if x is None else x.data_ptr()


def _linears(layer: Layer) -> list[Linear | None]:
    latents, beside, of_input = layer.latents, layer.beside, layer.per_layer
    found = [layer.qkv, layer.o, *(() if latents is None else latents.linears())]
    found += [] if beside is None else [beside.qkv, beside.o]
    found += [] if of_input is None else [of_input.gate, of_input.projection]
    for part in _feed_forward_parts(layer):
        if isinstance(part, FeedForward):
            found += [part.gate_up, part.down]
        else:
            found += [part.router, *part.experts.gate_up, *part.experts.down]
    return found


def _feed_forward_parts(layer: Layer) -> list[FeedForward | RoutedExperts]:
    parts = [] if layer.feed_forward is None else [layer.feed_forward]
    return parts if layer.experts_beside is None else [*parts, layer.experts_beside.experts]


def _recurrence(layer: Layer, pool: KVCachePool, index: int) -> RecurrenceStruct | None:
    weights = layer.recurrent if layer.beside is None else layer.beside.recurrent
    if weights is None or pool.states is None:
        return None
    return recurrence_struct(weights, pool.states, index)


def _outputs(linear: Linear) -> int:
    return int(_linear_struct(linear).out_features)


def _describe(
    layer: Layer,
    spec: LayerSpec,
    rotary: RotaryTable | None,
    cache: tuple[torch.Tensor, ...],
    recurrence: RecurrenceStruct | None,
    group: int,
) -> _LayerStruct:
    qk_norms, heads = layer.qk_norms or (None, None), spec.heads
    return _LayerStruct(
        *(None if norm is None else norm.weight.data_ptr() for norm in (*qk_norms, layer.value_norm)),
        *(0 if norm is None else len(norm.weight) for norm in qk_norms),
        _RotaryStruct() if rotary is None else _rotary_struct(rotary),
        spec.window or 0,
        spec.chunk or 0,
        pointer(layer.sinks),
        cache[0].data_ptr(),
        cache[-1].data_ptr(),
        heads.num_q_heads,
        heads.num_kv_heads,
        heads.head_dim,
        int(spec.kv_owner is None),
        None if recurrence is None else ctypes.addressof(recurrence),
        spec.mixed_width,
        int(spec.has_output_gate),
        group,
    )


def latent_struct(shape: LatentShape) -> _LatentShapeStruct:
    """The struct of latents.cpp."""
    sizes = shape.num_heads, shape.rank, shape.rope_dim, shape.key_dim, shape.value_dim, shape.width
    return _LatentShapeStruct(*sizes, int(shape.is_interleaved))


def _linear_struct(linear: Linear) -> LinearStruct:
    if not isinstance(linear, KernelLinear):
        raise TypeError(f"forward.cpp computes layers of type KernelLinear, not {type(linear).__name__}")
    return linear.struct()


def _norm_struct(norm: Norm | None) -> _NormStruct:
    return _NormStruct() if norm is None else _NormStruct(norm.weight.data_ptr(), pointer(norm.bias))


def _rotary_struct(rotary: RotaryTable) -> _RotaryStruct:
    return _RotaryStruct(
        rotary.cos.data_ptr(),
        rotary.sin.data_ptr(),
        2 * rotary.cos.shape[1],
        pointer(rotary.q_scales),
        int(rotary.is_interleaved),
        int(rotary.is_first),
    )
