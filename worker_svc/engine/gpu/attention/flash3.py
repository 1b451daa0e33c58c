"""Attention with flash-attn 3 (module flash_attn_interface), for Hopper.

One call computes any step: rows with one query and with many, blocks of any size, keys and values in fp8. Its launches
depend on the shapes of the arguments, not on lengths, so steps of both kinds can be CUDA graphs: the longest row of a
graph is given as its number of tokens.

With an fp8 cache the library multiplies in fp8: queries are rounded to e4m3 as well, and so are its softmax weights.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from worker_svc.engine.backend import AttentionShape, BackendUnavailableError
from worker_svc.engine.gpu.attention.flash import mask_and_scale
from worker_svc.engine.gpu.attention.paged import LayerCache, torch_attend
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.fp8 import LARGEST
from worker_svc.engine.gpu.step.step_buffer import StepColumns

MODULE = "flash_attn_interface"


class Flash3Attention:
    """flash-attn 3. `shapes` are the different attentions of the layers."""

    name = "flash3"
    most_queries = 1

    def __init__(self, package: ModuleType, shapes: list[AttentionShape], block_size: int, dtype: torch.dtype) -> None:
        self._with_kvcache = package.flash_attn_with_kvcache
        self._make_metadata = getattr(package, "get_scheduler_metadata", None)  # older versions lack it
        self._shapes = shapes
        self._block_size = block_size
        self._dtype = dtype  # of keys and values
        self._tables = self._key_lens = torch.empty(0)
        self._max_queries = 0
        self._metadata: dict[AttentionShape, torch.Tensor] = {}

    def can_capture(self, *, is_decode: bool) -> bool:
        return True

    def begin(self, columns: StepColumns) -> None:
        queries = columns.queries
        self._tables = queries.tables.index_select(0, queries.rows).contiguous()
        self._key_lens = queries.contexts + queries.starts.diff()
        self._max_queries = _max_queries(columns)
        if self._make_metadata is not None:
            self._metadata = {
                shape: self._make_metadata(**self._metadata_arguments(columns, shape)) for shape in self._shapes
            }

    def _metadata_arguments(self, columns: StepColumns, shape: AttentionShape) -> dict[str, Any]:
        """The metadata serves the calls of all layers of this shape, whose arguments must agree with these."""
        mask, heads = mask_and_scale(shape), shape.heads
        return {
            "batch_size": len(self._tables),
            "max_seqlen_q": self._max_queries,
            "max_seqlen_k": self._tables.shape[1] * self._block_size,
            "num_heads_q": heads.num_q_heads,
            "num_heads_kv": heads.num_kv_heads,
            "headdim": heads.head_dim,
            "cache_seqlens": self._key_lens,
            "qkv_dtype": self._dtype,
            "cu_seqlens_q": columns.queries.starts,
            "page_size": self._block_size,
            "causal": mask["causal"],
            "window_size": mask["window_size"],
            "has_softcap": shape.soft_cap is not None,
        }

    @kernel("attention", torch_attend, writes="out")
    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        scales: dict[str, torch.Tensor] = {}
        if cache.scales is not None:
            q = _rounded(q, cache.scales[2])
            size = (len(self._tables), -1)  # one of each row and KV head
            names = ("k_descale", "v_descale", "q_descale")
            scales = {name: scale.expand(size) for name, scale in zip(names, cache.scales, strict=True)}
        found = self._with_kvcache(
            q, *cache.pools, cache_seqlens=self._key_lens, page_table=self._tables,
            cu_seqlens_q=columns.queries.starts, max_seqlen_q=self._max_queries,
            scheduler_metadata=self._metadata.get(shape), **mask_and_scale(shape), **scales,
        )  # fmt: skip
        out.copy_(found)


def _max_queries(columns: StepColumns) -> int:
    """The most queries that a row may have. Graphs have no lengths on the host."""
    if columns.bucket.is_decode:
        return 1
    if columns.host is None:
        return columns.bucket.tokens
    starts = columns.host.starts
    return int((starts[1:] - starts[:-1]).max(initial=1))


def _rounded(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """q [T, q_heads, dim] in e4m3, divided by the scales [kv_heads] of the query heads."""
    group = q.shape[1] // len(scales)
    divided = q / scales.repeat_interleave(group)[:, None].to(q.dtype)
    return divided.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def flash3_package() -> ModuleType:
    """The module of flash-attn 3."""
    try:
        package = importlib.import_module(MODULE)
    except ImportError as error:
        raise BackendUnavailableError(
            f"flash-attn 3 cannot be imported ({error}); see docs/gpu.md, or use --attention triton"
        ) from error
    if not hasattr(package, "flash_attn_with_kvcache"):
        raise BackendUnavailableError(
            f"{MODULE} has no flash_attn_with_kvcache; install flash-attn 3 or use --attention triton"
        )
    return package
