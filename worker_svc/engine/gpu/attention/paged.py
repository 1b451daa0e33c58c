"""The attention interface with two implementations: the Triton kernel and plain torch. flash.py has a third."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import AttentionShape, HeadShape
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.attention.tiles import (
    DECODE_TILES,
    EXACT_TILES,
    PREFILL_TILES,
    Processors,
    for_heads,
    splits_for,
)
from worker_svc.engine.gpu.kernels.attention import AttentionTiles, Parts, WorkList, paged_attention, visible
from worker_svc.engine.gpu.kernels.work_list import make_work_list
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, StepColumns


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


class Attention(Protocol):
    """Call `plan` and `begin` once per step, then `attend` once per layer."""

    name: str

    def can_capture(self, *, is_decode: bool) -> bool:
        """Whether a step of this kind can be a CUDA graph: its launches must not depend on lengths."""
        ...

    def plan(self, bucket: Bucket, host: HostStep) -> None:
        """Host work of a step, before its launch. A graph does not contain it: every replay follows another plan."""
        ...

    def begin(self, columns: StepColumns) -> None:
        """Launches that the layers of a step share."""
        ...

    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        """Causal attention of q [T, q_heads, dim] over each row's blocks. `shape` is that of a layer of the model."""
        ...


class TritonAttention:
    """The Triton kernel: one launch for any batch, two if it mixes prompts and single queries."""

    name = "triton"

    def __init__(
        self,
        shape: HeadShape,
        determinism: Determinism,
        *,
        windows: Iterable[int | None],
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._is_exact = determinism == "exact"
        self._processors = Processors.of(device)
        self._programs: dict[tuple[AttentionTiles, bool, bool], int] = {}  # of each kernel that was launched
        number_bytes = dtype.itemsize if device.type == "cuda" else 2  # the interpreter has no limits on tiles
        sized = partial(for_heads, shape=shape, number_bytes=number_bytes, shared_bytes=self._processors.shared_bytes)
        many = sized(EXACT_TILES if self._is_exact else PREFILL_TILES)
        self._many, self._single = many, sized(DECODE_TILES)
        self._splits = splits_for(shape, self._processors)
        num_splits = 0 if self._is_exact else self._splits.most + max_rows
        self._many_work = WorkList.empty(-(-max_tokens // many.queries(shape)) + max_rows, device)
        self._single_work = {window: WorkList.empty(num_splits, device) for window in set(windows)}
        self._parts = Parts.empty(num_splits, max_rows, shape, device)

    def can_capture(self, *, is_decode: bool) -> bool:
        return True

    def plan(self, bucket: Bucket, host: HostStep) -> None:
        pass

    def begin(self, columns: StepColumns) -> None:
        if self._is_exact:
            self._list(columns, self._many_work, self._many, 1)
            return
        for window, work in self._single_work.items():
            self._list(columns, work, self._single, 1, window)
        if not columns.bucket.is_decode:
            self._list(columns, self._many_work, self._many, 2)

    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        if not self._is_exact:
            self._attend(q, cache, columns, shape, self._single_work[shape.window], self._single, out)
        if self._is_exact or not columns.bucket.is_decode:
            self._attend(q, cache, columns, shape, self._many_work, self._many, out)

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
        )
        if kernel not in self._programs and compiled is not None:  # None: its launch was only collected
            self._programs[kernel] = self._processors.num_programs(compiled, tiles.num_warps)


class TorchAttention:
    """Computes row by row over gathered blocks. Slow and without dependencies, for comparison with the others."""

    name = "torch"

    def can_capture(self, *, is_decode: bool) -> bool:
        return False

    def plan(self, bucket: Bucket, host: HostStep) -> None:
        pass

    def begin(self, columns: StepColumns) -> None:
        pass

    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        host, queries = host_lengths(columns), columns.queries
        block_size = cache.keys.shape[1]
        for i, context in enumerate(host.contexts.tolist()):
            first, last = int(host.starts[i]), int(host.starts[i + 1])
            lowest = 0 if shape.window is None else max(context + 1 - shape.window, 0)
            first_block = lowest // block_size
            num_keys = context + last - first - first_block * block_size
            blocks = queries.tables[queries.rows[i], first_block : first_block + -(-num_keys // block_size)].long()
            k, v = (_gather(pool, blocks).flatten(0, 1)[:num_keys].to(q.dtype) for pool in cache.pools)
            if cache.scales is not None:
                k, v = (x * scale[:, None].to(q.dtype) for x, scale in zip((k, v), cache.scales[:2], strict=True))
            keys = first_block * block_size + torch.arange(num_keys, device=q.device)
            k, v = (x.masked_fill((keys < lowest)[:, None, None], 0.0) for x in (k, v))
            is_visible = visible(shape, keys, context + torch.arange(last - first, device=q.device))
            out[first:last] = _attend(q[first:last], k, v, is_visible, shape)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_visible: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """Attention of q [n, q_heads, dim] over k and v [m, kv_heads, dim], where is_visible [n, m]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if shape.soft_cap is None:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, scale=shape.scale, enable_gqa=True)
        return found[0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = shape.soft_cap * torch.tanh((q @ k.transpose(2, 3)).float() * (shape.scale / shape.soft_cap))
    weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    return (weights.to(v.dtype) @ v)[0].transpose(0, 1)


def _gather(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Indexes fp8 as bytes, because torch cannot index float8 tensors."""
    return pool[blocks] if pool.itemsize > 1 else pool.view(torch.uint8)[blocks].view(pool.dtype)


def host_lengths(columns: StepColumns) -> HostStep:
    """Lengths on the host. Raises RuntimeError in a step that is a graph."""
    if columns.host is None:
        raise RuntimeError("this attention needs lengths on the host, so it cannot run in a CUDA graph")
    return columns.host
