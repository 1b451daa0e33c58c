"""Attention over the pool, in three ways behind one face: our kernel, flash-attn, and plain torch."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import BackendUnavailableError, HeadShape
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.kernels.attention import ITEM_WORDS, Parts, Tiles, WorkList, combine, paged_attention
from worker_svc.engine.gpu.kernels.work_list import MAX_QUERIES, make_work_list
from worker_svc.engine.gpu.step_buffer import HostStep, StepColumns
from worker_svc.engine.gpu.tiles import DECODE_TILES, EXACT_TILES, PREFILL_TILES, PROGRAMS_PER_SM, for_heads

logger = logging.getLogger(__name__)

FLASH_BLOCK = 256
INTERPRETER_PROGRAMS = 4


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, [num_blocks, block_size, kv_heads, dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None  # float32 [2, kv_heads] of those in 8 bits

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class Attention(Protocol):
    """`begin` once per step, then `attend` once per layer."""

    name: str

    def can_capture(self, *, is_decode: bool) -> bool:
        """Whether such a step may become a CUDA graph: nothing of it depends on what the host knows."""
        ...

    def begin(self, columns: StepColumns) -> None: ...

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        """Causal attention of q [T, q_heads, dim] over each row's blocks."""
        ...


class TritonAttention:
    """Our kernel. Every length, every batch, one launch (two where prompts and single queries meet)."""

    name = "triton"

    def __init__(
        self,
        shape: HeadShape,
        determinism: Determinism,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._is_exact = determinism == "exact"
        self._num_programs = _num_programs(device)
        many = for_heads(EXACT_TILES if self._is_exact else PREFILL_TILES, shape)
        max_splits = 1 if self._is_exact else -(-max_model_len // DECODE_TILES.split)
        self._many, self._single = many, for_heads(DECODE_TILES, shape)
        self._many_work = _empty_work(-(-max_tokens // many.queries(shape)) + max_rows, device)
        self._single_work = _empty_work(max_rows * max_splits, device)
        lines = 1 if self._is_exact else max_rows * max_splits
        self._parts = Parts(
            torch.zeros(lines, shape.num_q_heads, shape.head_dim, device=device),
            torch.zeros(lines, shape.num_q_heads, device=device),
            max_splits,
        )

    def can_capture(self, *, is_decode: bool) -> bool:
        return True

    def begin(self, columns: StepColumns) -> None:
        if self._is_exact:
            self._list(columns, self._many_work, self._many, 1, MAX_QUERIES)
            return
        self._list(columns, self._single_work, self._single, 1, 1)
        if not columns.bucket.is_decode:
            self._list(columns, self._many_work, self._many, 2, MAX_QUERIES)

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        if self._is_exact:
            self._attend(q, cache, columns, self._many_work, self._many, out)
            return
        self._attend(q, cache, columns, self._single_work, self._single, out)
        combine(columns.queries, columns.num_rows, self._parts, out, self._shape, self._single)
        if not columns.bucket.is_decode:
            self._attend(q, cache, columns, self._many_work, self._many, out)

    def _list(self, columns: StepColumns, work: WorkList, tiles: Tiles, least: int, most: int) -> None:
        make_work_list(
            columns.queries, columns.num_rows, work,
            queries_per_tile=tiles.queries(self._shape), split=tiles.split, min_queries=least, max_queries=most,
        )  # fmt: skip

    def _attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, work: WorkList, tiles: Tiles, out: torch.Tensor
    ) -> None:
        paged_attention(
            q,
            cache.pools,
            columns.queries,
            work,
            self._parts,
            out,
            self._shape,
            tiles,
            self._num_programs,
            cache.scales,
        )


class FlashAttention:
    """The flash-attn package (2.x): a block must be a multiple of 256 tokens, tables int32."""

    name = "flash"

    def __init__(self, shape: HeadShape, package: ModuleType) -> None:
        self._scale = shape.head_dim**-0.5
        self._varlen = package.flash_attn_varlen_func
        self._with_kvcache = package.flash_attn_with_kvcache
        self._tables = self._key_lens = self._key_starts = torch.empty(0)

    def can_capture(self, *, is_decode: bool) -> bool:
        return is_decode  # of prompts it asks the host for the longest

    def begin(self, columns: StepColumns) -> None:
        queries = columns.queries
        self._tables = queries.tables.index_select(0, queries.rows).contiguous()
        self._key_lens = queries.contexts + queries.starts.diff()
        if columns.bucket.is_decode:
            self._key_lens = self._key_lens.clamp_min(1)  # rows that only fill the bucket
            return
        self._key_starts = F.pad(self._key_lens.cumsum(0), (1, 0)).to(torch.int32)

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        if columns.bucket.is_decode:
            found = self._with_kvcache(
                q[:, None], *cache.pools, cache_seqlens=self._key_lens, block_table=self._tables,
                softmax_scale=self._scale, causal=True,
            )  # fmt: skip
            out.copy_(found[:, 0])
            return
        host = _known_to_host(columns)
        lens = host.starts[1:] - host.starts[:-1]
        found = self._varlen(
            q, *cache.pools, cu_seqlens_q=columns.queries.starts, cu_seqlens_k=self._key_starts,
            max_seqlen_q=int(lens.max()), max_seqlen_k=int((host.contexts + lens).max()),
            softmax_scale=self._scale, causal=True, block_table=self._tables,
        )  # fmt: skip
        out.copy_(found)


class TorchAttention:
    """Row by row over gathered blocks: always there, and what the others are compared with."""

    name = "torch"

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape

    def can_capture(self, *, is_decode: bool) -> bool:
        return False

    def begin(self, columns: StepColumns) -> None:
        pass

    def attend(self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, out: torch.Tensor) -> None:
        host, queries = _known_to_host(columns), columns.queries
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


def choose_attention(
    name: str,
    shape: HeadShape,
    determinism: Determinism,
    *,
    block_size: int,
    max_rows: int,
    max_tokens: int,
    max_model_len: int,
    device: torch.device,
) -> Attention:
    """The attention asked for. `auto` is ours, unless flash-attn can serve and the device is older than Hopper.

    Raises BackendUnavailableError for one that cannot serve these settings.
    """
    if name == "torch":
        _refuse_exact(name, determinism)
        return TorchAttention(shape)
    if name == "flash":
        _refuse_exact(name, determinism)
        if block_size % FLASH_BLOCK:
            raise BackendUnavailableError(
                f"attention flash needs a block_size that {FLASH_BLOCK} divides, got {block_size}; "
                f"use --block-size {FLASH_BLOCK} or --attention triton"
            )
        return FlashAttention(shape, _flash_package())
    is_older = device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)
    if name == "auto" and is_older and determinism != "exact" and block_size % FLASH_BLOCK == 0:
        try:
            return FlashAttention(shape, _flash_package())
        except BackendUnavailableError as error:
            logger.info("attention is triton: %s", error)
    return TritonAttention(
        shape, determinism, max_rows=max_rows, max_tokens=max_tokens, max_model_len=max_model_len, device=device
    )


def _gather(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Torch moves numbers of 8 bits only as bytes."""
    return pool[blocks] if pool.itemsize > 1 else pool.view(torch.uint8)[blocks].view(pool.dtype)


def _refuse_exact(name: str, determinism: Determinism) -> None:
    if determinism == "exact":
        raise BackendUnavailableError(
            f"attention {name} cannot be exact: its results depend on the batch; "
            "use --attention triton or --determinism best_effort"
        )


def _flash_package() -> ModuleType:
    """flash-attn 2; its successor installs a folder of the same name, so the functions are asked for."""
    try:
        package = importlib.import_module("flash_attn")
    except ImportError as error:
        raise BackendUnavailableError(f"flash-attn cannot be imported ({error}); use --attention triton") from error
    missing = [name for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache") if not hasattr(package, name)]
    if missing:
        raise BackendUnavailableError(f"flash_attn has no {missing[0]}; install flash-attn 2 or use --attention triton")
    return package


def _known_to_host(columns: StepColumns) -> HostStep:
    if columns.host is None:
        raise RuntimeError("this attention needs lengths on the host; it cannot run in a graph")
    return columns.host


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _empty_work(size: int, device: torch.device) -> WorkList:
    return WorkList(
        torch.zeros(size, ITEM_WORDS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
