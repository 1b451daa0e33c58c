"""Attention with the flash-attn package."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import AttentionShape, BackendUnavailableError
from worker_svc.engine.gpu.attention.paged import LayerCache, host_lengths, torch_attend
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.step.step_buffer import StepColumns


class FlashAttention:
    """flash-attn 2. The block size must be a multiple of 256 tokens, tables int32."""

    name = "flash"
    most_queries = 1

    def __init__(self, package: ModuleType) -> None:
        self._varlen = package.flash_attn_varlen_func
        self._with_kvcache = package.flash_attn_with_kvcache
        self._tables = self._key_lens = self._key_starts = torch.empty(0)

    def can_capture(self, *, is_decode: bool) -> bool:
        return is_decode  # with prompts flash-attn needs the longest length on the host

    def begin(self, columns: StepColumns) -> None:
        queries = columns.queries
        self._tables = queries.tables.index_select(0, queries.rows).contiguous()
        self._key_lens = queries.contexts + queries.starts.diff()
        if columns.bucket.is_decode:
            self._key_lens = self._key_lens.clamp_min(1)  # padding rows
            return
        self._key_starts = F.pad(self._key_lens.cumsum(0), (1, 0)).to(torch.int32)

    @kernel("attention", torch_attend, writes="out")
    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        if columns.bucket.is_decode:
            found = self._with_kvcache(
                q[:, None], *cache.pools, cache_seqlens=self._key_lens, block_table=self._tables,
                **mask_and_scale(shape),
            )  # fmt: skip
            out.copy_(found[:, 0])
            return
        host = host_lengths(columns)
        lens = host.starts[1:] - host.starts[:-1]
        found = self._varlen(
            q, *cache.pools, cu_seqlens_q=columns.queries.starts, cu_seqlens_k=self._key_starts,
            max_seqlen_q=int(lens.max(initial=1)), max_seqlen_k=int((host.contexts + lens).max(initial=1)),
            block_table=self._tables, **mask_and_scale(shape),
        )  # fmt: skip
        out.copy_(found)


def mask_and_scale(shape: AttentionShape) -> dict[str, Any]:
    """Arguments of flash-attn 2 and 3 for the attention of a layer."""
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)  # keys before and after a query
    return {"softmax_scale": shape.scale, "causal": True, "window_size": window, "softcap": shape.soft_cap or 0.0}


def flash_package() -> ModuleType:
    """The flash_attn package. Its functions are checked, because flash-attn 4 installs a folder of the same name."""
    try:
        package = importlib.import_module("flash_attn")
    except ImportError as error:
        raise BackendUnavailableError(f"flash-attn cannot be imported ({error}); use --attention triton") from error
    missing = [name for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache") if not hasattr(package, name)]
    if missing:
        raise BackendUnavailableError(f"flash_attn has no {missing[0]}; install flash-attn 2 or use --attention triton")
    return package
