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
from worker_svc.engine.backend import (
    ForwardBatch,
    LatentAttention,
    LatentShape,
    Linear,
    Norm,
    RecurrentWeights,
    RotaryTable,
)
from worker_svc.engine.cpu.recurrent import recurrence_struct
from worker_svc.engine.decoder.config import LayerSpec
from worker_svc.engine.decoder.forward import BESIDE_OUT, compute_layers
from worker_svc.engine.decoder.layer import FeedForward, Layer, RoutedExperts
from worker_svc.engine.kernels.binding import Struct, array, struct
from worker_svc.engine.kernels.linear import LINEAR_STRUCT, PANEL, KernelLinear, linear_struct, linear_structs

if TYPE_CHECKING:
    from worker_svc.engine.decoder.operations import DecoderParts
    from worker_svc.engine.decoder.pool.kv_cache import KVCachePool

EXPERTS_STRUCT, LATENTS_STRUCT, LATENT_SHAPE = struct("Experts"), struct("Latents"), struct("LatentShape")
LAYER_STRUCT, OP_STRUCT, MODEL_STRUCT, BATCH_STRUCT = struct("Layer"), struct("Op"), struct("Model"), struct("Batch")
NORM_STRUCT, ROTARY_STRUCT = struct("NormWeights"), struct("Rotary")
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "clamped_swiglu": 4}
SHARED_KINDS = {"none": 0, "whole": 1, "gated": 2}
NORM_KINDS = {"rms": 0, "rms_offset": 1, "layer": 2}

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
        self.ops: list[Struct] = []

    def _record(
        self, kind: int, layer: int = 0, site: int = 0, norm: Norm | None = None, **fields: Any
    ) -> torch.Tensor:
        self.ops.append(OP_STRUCT(kind=kind, layer=layer, site=site, norm=NORM_STRUCT.of(norm), **fields))
        return PLACE

    def embed(self) -> torch.Tensor:
        self._record(EMBED)
        if (part := self._parts.per_layer) is not None:
            scale = self._parts.config.hidden_size**-0.5
            self._record(LAYER_INPUTS, site=INPUT, norm=part.norm, linear=linear_struct(part.projection), scale=scale)
        return PLACE

    def linear(
        self, linear: Linear, x: torch.Tensor, index: int, site: int, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._record(LINEAR, index, site, linear=linear_struct(linear), adds_output=onto is not None)

    def linear_of_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, index: int, site: int
    ) -> torch.Tensor:
        struct, adds = linear_struct(linear), residual is not None
        return self._record(LINEAR_OF_NORM, index, site, norm, linear=struct, adds_residual=adds)

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        return self._record(ATTEND, index)

    def recur(self, layer: RecurrentWeights, projected: torch.Tensor, index: int) -> torch.Tensor:
        return self._record(RECUR, index)

    def attend_latents(self, part: LatentAttention, joined: torch.Tensor, index: int) -> torch.Tensor:
        return self._record(ATTEND_LATENTS, index, latents=self._latents_struct(part))

    def expand_latents(self, part: LatentAttention, attended: torch.Tensor) -> torch.Tensor:
        return self._record(EXPAND_LATENTS, latents=self._latents_struct(part))

    def _latents_struct(self, part: LatentAttention) -> Struct:
        return LATENTS_STRUCT(
            query=LINEAR_STRUCT() if part.query is None else linear_struct(part.query),
            q_norm=None if part.query_norm is None else part.query_norm.weight,
            norm=part.norm.weight,
            absorb=linear_structs(part.absorb),
            expand=linear_structs(part.expand),
            shape=latent_struct(part.shape),
            eps=part.norm.eps,
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
        struct = EXPERTS_STRUCT.of(
            routing,
            experts,
            router=linear_struct(part.router),
            gate_up=linear_structs(experts.gate_up),
            down=linear_structs(experts.down),
            shared=SHARED_KINDS[routing.shared],
        )
        is_beside, router_norm = part.router_norm is not None, NORM_STRUCT.of(part.router_norm)
        adds = residual is not None
        self._record(
            EXPERTS, norm=norm, adds_residual=adds, experts=struct, router_norm=router_norm, is_beside=is_beside
        )
        return BESIDE if is_beside else PLACE

    def output(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None or self._parts.config.residual_scale != 1.0:
            self._record(OUTPUT, norm=norm, is_beside=x is BESIDE)
        return x

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._record(ADD)

    def end_attention(self, x: torch.Tensor, output: torch.Tensor, index: int) -> None:
        """`fuse` refuses models with a part here."""

    def end_layer(self, x: torch.Tensor, residual: torch.Tensor, index: int) -> None:
        layer = self._parts.layers[index]
        if (part := layer.per_layer) is not None:
            self._record(SUM, scale=1.0)
            self._record(GATE_INPUT, index, INPUT, linear=linear_struct(part.gate))
            self._record(LINEAR, index, INPUT, linear=linear_struct(part.projection))
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
        self._kept = parts, pool, recurrences  # the model points to their memory
        widest = {name: max(widths) for name, widths in _widths(parts).items()}
        self._model = MODEL_STRUCT.of(
            parts,
            config,
            layers=array([
                _layer_struct(layer, config.layers[index], parts.rotary(index), pool, index, recurrences[index])
                for index, layer in enumerate(parts.layers)
            ]),
            ops=array(recorder.ops),
            layer_embedding=None if parts.per_layer is None else parts.per_layer.embedding,
            layer_vocab=config.layer_input_vocab,
            layer_width=config.layer_input_width,
            final_norm=NORM_STRUCT.of(parts.final_norm),
            head=LINEAR_STRUCT() if parts.head is None else linear_struct(parts.head),
            num_layers=len(parts.layers),
            num_ops=len(recorder.ops),
            hidden=config.hidden_size,
            block_size=pool.block_size,
            norm_kind=NORM_KINDS[config.norm],
            activation=ACTIVATIONS[config.activation],
            is_bf16=parts.embedding.dtype is torch.bfloat16,
            threads=threads,
            eps=config.norm_eps,
            scale=config.attention_scale,
            embedding_scale=float(torch.tensor(config.embedding_scale, dtype=parts.embedding.dtype)),
            attention_cap=config.attention_soft_cap or 0.0,
            logit_cap=config.logit_soft_cap or 0.0,
            **widest,
        )  # fmt: skip
        self._model_pointer = ctypes.byref(self._model)
        self._captures = np.array(parts.captures, np.int64)
        self.captured = parts.embedding.new_empty(0)  # outputs [captures, T, hidden] of layers in the last step
        self._workspace_bytes = kernels.quire_forward_workspace(self._model_pointer)
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
        self._compute(batch, self._logits)
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
        function(self._model_pointer, num_tokens, first, count, out, self._workspace)

    def _make_room(self, num_logits: int) -> None:
        if len(self._logits) < num_logits:
            self._logits = self._logits.new_empty(num_logits, self._logits.shape[1])

    def _compute(self, batch: ForwardBatch, logits: torch.Tensor | None) -> None:
        num_tokens, num_heads, given = len(batch.token_ids), len(batch.head_tokens), batch.embedded
        if len(self._workspace) < num_tokens * self._workspace_bytes:
            self._workspace = torch.empty(num_tokens * self._workspace_bytes, dtype=torch.uint8)
        fields: dict[str, Any] = {
            "token_ids": batch.token_ids, "positions": batch.positions, "slots": batch.slots, "tables": batch.tables,
            "rows": batch.rows, "query_starts": batch.query_starts, "context_lens": batch.context_lens,
            "heads": batch.head_tokens, "num_tokens": num_tokens, "num_rows": len(batch.rows), "num_heads": num_heads,
            "table_stride": batch.tables.shape[1], "group_stride": batch.tables.size,
        }  # fmt: skip
        if given is not None:
            fields |= {"embedded_tokens": given.tokens, "embedded": given.rows, "num_embedded": len(given.tokens)}
        if batch.adapters:
            fields |= {"adapters": adapter_structs(batch.adapters), "num_adapters": len(batch.adapters)}
        if (rotary := batch.rotary) is not None:
            fields |= {"cos": rotary.cos, "sin": rotary.sin}
        if (deep := batch.deep) is not None:
            sizes = {"num_deep_tokens": len(deep.tokens), "num_deep_layers": len(deep.rows)}
            fields |= {"deep_tokens": deep.tokens, "deep": deep.rows, **sizes}
        if (taken := batch.snapshots) is not None:
            slots = {"snapshot_slots": taken.slots}
            fields |= {"snapshot_starts": taken.starts, "snapshot_ends": taken.ends, **slots}
        if (groups := batch.groups) is not None:
            fields |= {"group_slots": groups.slots, "group_tables": groups.tables}
        if count := len(self._captures):
            self.captured = self._logits.new_empty(count, num_tokens, self.hidden.shape[1])
            fields |= {"captures": self._captures, "captured": self.captured, "num_captures": count}
        self._run(self._model_pointer, ctypes.byref(BATCH_STRUCT(**fields)), logits, self._workspace)


def _runs(lines: I64) -> Iterator[tuple[int, int]]:
    """The runs of successive numbers: the first one and the end of each."""
    ends = (np.flatnonzero(np.diff(lines) != 1) + 1).tolist()
    for start, end in pairwise((0, *ends, len(lines))):
        if start < end:
            yield int(lines[start]), int(lines[end - 1]) + 1


def _widths(parts: DecoderParts) -> dict[str, list[int]]:
    """The numbers of a token in each part of the workspace; see `Model` of forward.cpp."""
    config, specs = parts.config, parts.config.layers
    latents = [spec.latents.shape for spec in specs if spec.latents is not None]
    # `expand_latents` exchanges mixed and queries
    queries = [shape.num_heads * max(shape.rank, shape.query_dim, shape.value_dim) for shape in latents]
    attended = [spec.heads.num_q_heads * spec.heads.head_dim for spec in specs]
    inputs = [layer.qkv for layer in parts.layers]
    inputs += [layer.beside.qkv for layer in parts.layers if layer.beside is not None]
    has_experts = any(isinstance(part, RoutedExperts) for layer in parts.layers for part in _feed_forward_parts(layer))
    return {
        "inner": [config.widest_inner, config.layer_input_width, config.hidden_size if has_experts else 0],
        "qkv": [_outputs(linear) for linear in inputs if linear is not None],
        "q": [*attended, *(shape.num_heads * shape.width for shape in latents)],
        "mixed": [*(spec.mixed_width for spec in specs), *attended, *queries],
        "beside": [config.hidden_size if spec.dense_inner else 0 for spec in specs],
        "queries": [0, *queries],
    }


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


def _recurrence(layer: Layer, pool: KVCachePool, index: int) -> Struct | None:
    weights = layer.recurrent if layer.beside is None else layer.beside.recurrent
    if weights is None or pool.states is None:
        return None
    return recurrence_struct(weights, pool.states, index)


def _outputs(linear: Linear) -> int:
    return int(linear_struct(linear).out)


def _layer_struct(
    layer: Layer, spec: LayerSpec, rotary: RotaryTable | None, pool: KVCachePool, index: int, recurrence: Struct | None
) -> Struct:
    (q_norm, k_norm), heads, cache = layer.qk_norms or (None, None), spec.heads, pool.parts(index)
    return LAYER_STRUCT.of(
        spec,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        v_norm=None if layer.value_norm is None else layer.value_norm.weight,
        q_width=0 if q_norm is None else len(q_norm.weight),
        k_width=0 if k_norm is None else len(k_norm.weight),
        rotary=rotary_struct(rotary),
        window=spec.window or 0,
        chunk=spec.chunk or 0,
        sinks=layer.sinks,
        k_cache=cache[0],
        v_cache=cache[-1],
        q_heads=heads.num_q_heads,
        kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        stores_kv=spec.kv_owner is None,
        recurrence=None if recurrence is None else ctypes.addressof(recurrence),
        has_gate=spec.has_output_gate,
        group=pool.group_of[index],
    )


def latent_struct(shape: LatentShape) -> Struct:
    """The struct of latents.cpp."""
    return LATENT_SHAPE.of(shape, heads=shape.num_heads)


def rotary_struct(rotary: RotaryTable | None) -> Struct:
    """The rotation as kernels take it."""
    return ROTARY_STRUCT() if rotary is None else ROTARY_STRUCT.of(rotary, dims=2 * rotary.cos.shape[1])
