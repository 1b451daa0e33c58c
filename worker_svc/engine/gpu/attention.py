"""The attention interface with two implementations: the Triton kernel and plain torch. flash.py has a third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import HeadShape
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.kernels.attention import Parts, Tiles, WorkList, paged_attention
from worker_svc.engine.gpu.kernels.work_list import make_work_list
from worker_svc.engine.gpu.step_buffer import HostStep, StepColumns
from worker_svc.engine.gpu.tiles import DECODE_TILES, EXACT_TILES, PREFILL_TILES, Processors, for_heads, splits_for


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, [num_blocks, block_size, kv_heads, dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None  # float32 [2, kv_heads] if the cache is fp8

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class Attention(Protocol):
    """Call `begin` once per step, then `attend` once per layer."""

    name: str

    def can_capture(self, *, is_decode: bool) -> bool:
        """Whether a step of this kind can be a CUDA graph: its launches must not depend on lengths."""
        ...

    def begin(self, columns: StepColumns) -> None: ...

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        """Causal attention of q [T, q_heads, dim] over each row's blocks."""
        ...


class TritonAttention:
    """The Triton kernel: one launch for any batch, two if it mixes prompts and single queries."""

    name = "triton"

    def __init__(
        self,
        shape: HeadShape,
        determinism: Determinism,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._is_exact = determinism == "exact"
        self._processors = Processors.of(device)
        self._programs: dict[Tiles, int] = {}  # of each kernel that was launched
        number_bytes = dtype.itemsize if device.type == "cuda" else 2  # the interpreter has no limits on tiles
        many = for_heads(EXACT_TILES if self._is_exact else PREFILL_TILES, shape, number_bytes)
        self._many, self._single = many, for_heads(DECODE_TILES, shape, number_bytes)
        self._splits = splits_for(shape, self._processors)
        num_splits = 0 if self._is_exact else self._splits.most + max_rows
        self._many_work = WorkList.empty(-(-max_tokens // many.queries(shape)) + max_rows, device)
        self._single_work = WorkList.empty(num_splits, device)
        self._parts = Parts.empty(num_splits, max_rows, shape, device)

    def can_capture(self, *, is_decode: bool) -> bool:
        return True

    def begin(self, columns: StepColumns) -> None:
        if self._is_exact:
            self._list(columns, self._many_work, self._many, 1)
            return
        self._list(columns, self._single_work, self._single, 1)
        if not columns.bucket.is_decode:
            self._list(columns, self._many_work, self._many, 2)

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        if not self._is_exact:
            self._attend(q, cache, columns, self._single_work, self._single, out)
        if self._is_exact or not columns.bucket.is_decode:
            self._attend(q, cache, columns, self._many_work, self._many, out)

    def _list(self, columns: StepColumns, work: WorkList, tiles: Tiles, min_queries: int) -> None:
        make_work_list(
            columns.queries, columns.num_rows, work, tiles,
            queries_per_tile=tiles.queries(self._shape), splits=self._splits, min_queries=min_queries,
        )  # fmt: skip

    def _attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, work: WorkList, tiles: Tiles, out: torch.Tensor
    ) -> None:
        compiled = paged_attention(
            q,
            cache.pools,
            columns.queries,
            work,
            self._parts,
            out,
            self._shape,
            tiles,
            self._programs.get(tiles, self._processors.count),
            cache.scales,
        )
        if tiles not in self._programs:
            self._programs[tiles] = self._processors.num_programs(compiled, tiles.num_warps)


class TorchAttention:
    """Computes row by row over gathered blocks. Slow and without dependencies, for comparison with the others."""

    name = "torch"

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape

    def can_capture(self, *, is_decode: bool) -> bool:
        return False

    def begin(self, columns: StepColumns) -> None:
        pass

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        host, queries = host_lengths(columns), columns.queries
        block_size = cache.keys.shape[1]
        for i, context in enumerate(host.contexts.tolist()):
            first, last = int(host.starts[i]), int(host.starts[i + 1])
            num_keys = context + last - first
            blocks = queries.tables[queries.rows[i], : -(-num_keys // block_size)].long()
            k, v = (_gather(pool, blocks).flatten(0, 1)[:num_keys] for pool in cache.pools)
            if cache.scales is not None:
                k, v = (
                    x.to(q.dtype) * scale[:, None].to(q.dtype) for x, scale in zip((k, v), cache.scales, strict=True)
                )
            k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            keys = torch.arange(num_keys, device=q.device)
            is_visible = keys[None] <= context + torch.arange(last - first, device=q.device)[:, None]
            found = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None], k, v, attn_mask=is_visible, enable_gqa=True
            )
            out[first:last] = found[0].transpose(0, 1)


def _gather(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Indexes fp8 as bytes, because torch cannot index float8 tensors."""
    return pool[blocks] if pool.itemsize > 1 else pool.view(torch.uint8)[blocks].view(pool.dtype)


def host_lengths(columns: StepColumns) -> HostStep:
    """Lengths on the host. Raises RuntimeError in a step that is a graph."""
    if columns.host is None:
        raise RuntimeError("this attention needs lengths on the host, so it cannot run in a CUDA graph")
    return columns.host
