"""The attention interface with two implementations: the Triton kernel and plain torch. flash.py has a third."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from worker_svc.engine.backend import AttentionShape, HeadShape, KVLayout
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.attention.tiles import (
    DECODE_TILES,
    EXACT_TILES,
    PREFILL_TILES,
    Processors,
    fixed_splits_for,
    for_heads,
    splits_for,
)
from worker_svc.engine.gpu.kernels.attention import AttentionTiles, Parts, WorkList, paged_attention, reference
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.work_list import MAX_QUERIES, make_work_list
from worker_svc.engine.gpu.step.step_buffer import HostStep, StepColumns


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, [num_blocks, block_size, kv_heads, dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    # If the cache is fp8: float32 [3, kv_heads], of keys, values, and the queries that share a KV head.
    scales: torch.Tensor | None

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class DevicePool:
    """Keys and values of all layers in blocks. `tensors` has one of each layout: [layers, 2, num_blocks, block_size,
    kv_heads, dim], or [layers, 1, num_blocks, block_size, 1, width] of latents. They begin as zeros: kernels may read
    slots past a sequence's end."""

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.tensors: list[torch.Tensor] = []
        owned: dict[int, torch.Tensor] = {}
        for layout in dict.fromkeys(one for one in layouts if one.owner is None and one.num_kv_heads):
            layers = [index for index, one in enumerate(layouts) if one == layout]
            pair, heads = 2 if layout.value_dim else 1, (layout.num_kv_heads, layout.key_dim)
            tensor = torch.zeros(len(layers), pair, num_blocks, block_size, *heads, dtype=dtype, device=device)
            self.tensors.append(tensor)
            owned |= zip(layers, tensor, strict=True)
        self._layers = [owned.get(index if one.owner is None else one.owner) for index, one in enumerate(layouts)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [num_blocks, block_size, kv_heads, dim]. Latents are both."""
        part = self._layers[index]
        if part is None:
            raise RuntimeError(f"layer {index} has no keys and values: a bug in the engine")
        return part[0], part[-1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks, in the given order."""
        for tensor in self.tensors:
            for source, target in zip(sources, targets, strict=True):
                tensor[:, :, target].copy_(tensor[:, :, source])


class Attention(Protocol):
    """Call `begin` once per step, then `attend` once per layer."""

    name: str
    most_queries: int  # of a row, in a step without prompts. 1: the device cannot choose the lengths of rows

    def can_capture(self, *, is_decode: bool) -> bool:
        """Whether a step of this kind can be a CUDA graph: its launches must not depend on lengths."""

    def begin(self, columns: StepColumns) -> None:
        """Launches that the layers of a step share."""

    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        """Causal attention of q [T, q_heads, dim] over each row's blocks. `shape` is that of a layer of the model."""


def torch_attend(
    self: Any, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
) -> None:
    """`attend` of every implementation, row by row over gathered blocks, in float32."""
    _attend(q, cache, columns, shape, out, MAX_QUERIES)


def _attend(
    q: torch.Tensor,
    cache: LayerCache,
    columns: StepColumns,
    shape: AttentionShape,
    out: torch.Tensor,
    most_queries: int,
) -> None:
    num_rows = int(columns.num_rows)
    found = reference(
        q, cache.pools, columns.queries, num_rows, shape, cache.scales, dtype=torch.float32, most_queries=most_queries
    )
    num_tokens = int(columns.queries.starts[num_rows])
    out[:num_tokens] = found[:num_tokens].to(out.dtype)


class TritonAttention:
    """The Triton kernel: one launch for any batch, two if it mixes prompts and rows with few queries."""

    name = "triton"

    def __init__(
        self,
        shape: HeadShape,
        determinism: Determinism,
        *,
        windows: Iterable[int | None],
        max_rows: int,
        max_tokens: int,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._is_exact = determinism == "exact"
        self._processors = Processors.of(device)
        self._programs: dict[tuple[AttentionTiles, bool, bool], int] = {}  # of each kernel that was launched
        number_bytes = dtype.itemsize if device.type == "cuda" else 2  # the interpreter has no limits on tiles
        sized = partial(for_heads, shape=shape, number_bytes=number_bytes, shared_bytes=self._processors.shared_bytes)
        self._many = many = sized(EXACT_TILES if self._is_exact else PREFILL_TILES)
        self._single = sized(DECODE_TILES)
        self._splits = (fixed_splits_for if self._is_exact else splits_for)(shape, self._processors)
        num_splits = self._splits.most + max_rows
        self._most_divided = self._single.queries(shape)
        self.most_queries = MAX_QUERIES if self._is_exact else self._most_divided
        num_parts = self._splits.most + min(max_rows * self._most_divided, max_tokens)
        num_tiles = -(-max_tokens // many.queries(shape)) + max_rows
        if self._is_exact:  # one list of both
            self._work = {window: WorkList.empty(num_tiles + num_splits, device, num_layers) for window in set(windows)}
        else:
            self._work = {window: WorkList.empty(num_splits, device, num_layers) for window in set(windows)}
            self._many_work = WorkList.empty(num_tiles, device, num_layers)
        self._parts = Parts.empty(num_parts, max_rows, shape, device)
        self._num_attended = 0  # layers of the step

    def can_capture(self, *, is_decode: bool) -> bool:
        return True

    def begin(self, columns: StepColumns) -> None:
        self._num_attended = 0
        for window, work in self._work.items():
            self._list(columns, work, self._many if self._is_exact else self._single, 1, window)
        if not self._is_exact and columns.bucket.has_prompts:
            self._list(columns, self._many_work, self._many, self._most_divided + 1)

    @kernel("attention", torch_attend, writes="out")
    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        work = self._work[shape.window]
        self._attend(q, cache, columns, shape, work, self._many if self._is_exact else self._single, out)
        if not self._is_exact and columns.bucket.has_prompts:
            self._attend(q, cache, columns, shape, self._many_work, self._many, out)
        self._num_attended += 1

    def _list(
        self, columns: StepColumns, work: WorkList, tiles: AttentionTiles, min_queries: int, window: int | None = None
    ) -> None:
        make_work_list(
            columns.queries, columns.num_rows, work, tiles, queries_per_tile=tiles.queries(self._shape),
            splits=self._splits, min_queries=min_queries, window=window,
        )  # fmt: skip

    def _attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        columns: StepColumns,
        shape: AttentionShape,
        work: WorkList,
        tiles: AttentionTiles,
        out: torch.Tensor,
    ) -> None:
        kernel = tiles, shape.window is None, shape.soft_cap is None
        compiled = paged_attention(
            q,
            cache.pools,
            columns.queries,
            work,
            self._parts,
            out,
            shape,
            tiles,
            self._programs.get(kernel, self._processors.count),
            cache.scales,
            launch=self._num_attended,
        )
        if kernel not in self._programs and compiled is not None:  # None: its launch was only collected
            self._programs[kernel] = self._processors.num_programs(compiled, tiles.num_warps)


class TorchAttention:
    """Slow: it replaces a kernel that fails. With `is_exact` it computes each query alone."""

    name = "torch"
    most_queries = MAX_QUERIES

    def __init__(self, *, is_exact: bool = False) -> None:
        self._most_queries = 1 if is_exact else MAX_QUERIES

    def can_capture(self, *, is_decode: bool) -> bool:
        return False

    def begin(self, columns: StepColumns) -> None:
        pass

    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        _attend(q, cache, columns, shape, out, self._most_queries)


def host_lengths(columns: StepColumns) -> HostStep:
    """Lengths on the host. Raises RuntimeError in a step that is a graph."""
    if columns.host is None:
        raise RuntimeError("this attention needs lengths on the host, so it cannot run in a CUDA graph")
    return columns.host
