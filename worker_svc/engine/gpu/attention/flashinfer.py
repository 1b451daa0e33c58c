"""Attention with FlashInfer.

Its wrappers plan a step on the host, from the lengths of its rows, and their launches then follow the plan. `plan`
runs once per step and kind of layer, before the step or its graph is launched. Decode steps can be CUDA graphs: their
wrappers have a fixed number of rows and keep the plan in device memory. Mixed steps are launched kernel by kernel.

The library reads blocks of all rows from one list, which a kernel of the step copies from the block tables. Padding
tokens form rows that see block 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from step_protocol.columns import I32
from worker_svc.engine.backend import AttentionShape, BackendUnavailableError, HeadShape
from worker_svc.engine.gpu.attention.paged import LayerCache, torch_attend
from worker_svc.engine.gpu.attention.tiles import Processors
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.pack_tables import pack_tables
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, StepColumns

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
MIN_WORKSPACE = 128 << 20  # bytes; the library's recommendation
PLAN_BYTES = 1 << 20  # of a wrapper, on the device and pinned
TILE_ROWS = 16  # query heads of a row in a tile of a decode step; more heads per KV head take the next tile
WIDE_TILE_ROWS = 64
MIXED_TILE_ROWS = 128  # the largest tile of a step with prompts
PROGRAMS_PER_PROCESSOR = 2  # of a step with prompts that splits keys
ALIGNMENT_SLACK = 1 << 16


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Queries and keys of the rows of a step, and of a row for its padding, as the library wants them."""

    query_starts: I32  # [B + 1]
    page_starts: I32  # [B + 1]
    last_page_lens: I32  # [B]

    @classmethod
    def of(cls, bucket: Bucket, host: HostStep, block_size: int) -> RowLengths:
        """In a decode step, each padding row has a query and a key. Otherwise one row has all padding tokens."""
        queries = host.starts[1:] - host.starts[:-1]
        keys = host.contexts + queries
        num_padding = bucket.tokens - int(host.starts[-1])
        padding = np.ones(num_padding, np.int64) if bucket.is_decode else np.array([num_padding])
        queries, keys = np.concatenate((queries, padding)), np.concatenate((keys, np.maximum(padding, 1)))
        pages = -(-keys // block_size)
        return cls(_starts(queries), _starts(pages), (keys - (pages - 1) * block_size).astype(np.int32))


class FlashInferAttention:
    """FlashInfer, in the layout NHD. `shapes` are the different attentions of the layers."""

    name = "flashinfer"
    most_queries = 1

    def __init__(
        self,
        package: ModuleType,
        shapes: Sequence[AttentionShape],
        *,
        block_size: int,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._package = package
        self._shapes = shapes
        self._block_size = block_size
        self._dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype}
        self._device = device
        num_bytes = workspace_bytes(shapes[0].heads, max_rows, Processors.of(device).count)
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # Of a step: the blocks of all rows, then zeros for its padding.
        self._blocks = torch.zeros(
            max_rows * -(-max_model_len // block_size) + max_tokens + 1, dtype=torch.int32, device=device
        )
        self._wrappers: dict[tuple[int, AttentionShape], Any] = {}  # by number of rows; 0: mixed steps
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def can_capture(self, *, is_decode: bool) -> bool:
        return is_decode  # the number of launched programs of a mixed step follows from its lengths

    def plan(self, bucket: Bucket, host: HostStep) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the previous plan is copied from pinned memory that this one overwrites
        lengths = RowLengths.of(bucket, host, self._block_size)
        for shape in self._shapes:
            wrapper = self._wrapper(bucket, shape)
            if bucket.is_decode:
                self._plan_decode(wrapper, lengths, shape)
            else:
                self._plan_mixed(wrapper, lengths, shape)
        if self._copied is not None:
            self._copied.record()

    def _plan_decode(self, wrapper: Any, lengths: RowLengths, shape: AttentionShape) -> None:
        heads = shape.heads
        wrapper.plan(
            torch.from_numpy(lengths.page_starts), self._blocks[:0], torch.from_numpy(lengths.last_page_lens),
            heads.num_q_heads, heads.num_kv_heads, heads.head_dim, self._block_size, **_mask_and_scale(shape),
            **self._dtypes,
        )  # fmt: skip

    def _plan_mixed(self, wrapper: Any, lengths: RowLengths, shape: AttentionShape) -> None:
        heads = shape.heads
        wrapper.plan(
            torch.from_numpy(lengths.query_starts), torch.from_numpy(lengths.page_starts), self._blocks,
            torch.from_numpy(lengths.last_page_lens), heads.num_q_heads, heads.num_kv_heads, heads.head_dim,
            self._block_size, causal=True, **_mask_and_scale(shape), **self._dtypes,
        )  # fmt: skip

    def begin(self, columns: StepColumns) -> None:
        pack_tables(columns.queries, columns.num_rows, self._blocks, columns.bucket.tokens, self._block_size)

    @kernel("attention", torch_attend, writes="out")
    def attend(
        self, q: torch.Tensor, cache: LayerCache, columns: StepColumns, shape: AttentionShape, out: torch.Tensor
    ) -> None:
        wrapper = self._wrapper(columns.bucket, shape)
        if cache.scales is None:
            wrapper.run(q, cache.pools, out=out)
            return
        # The library has one scale for all heads. These are powers of two, so multiplying by them is exact.
        group = shape.heads.num_q_heads // shape.heads.num_kv_heads
        keys, values = (scale.repeat_interleave(group)[:, None].to(q.dtype) for scale in cache.scales[:2])
        wrapper.run(q * keys, cache.pools, out=out)
        out.mul_(values)

    def _wrapper(self, bucket: Bucket, shape: AttentionShape) -> Any:
        key = bucket.rows if bucket.is_decode else 0, shape
        if key not in self._wrappers:
            self._wrappers[key] = self._make_wrapper(key[0])
        return self._wrappers[key]

    def _make_wrapper(self, num_rows: int) -> Any:
        if not num_rows:
            return getattr(self._package, PREFILL)(self._workspace, "NHD")
        make = partial(torch.zeros, dtype=torch.int32, device=self._device)
        made = getattr(self._package, DECODE)(
            self._workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=make(num_rows + 1), paged_kv_indices_buffer=self._blocks,
            paged_kv_last_page_len_buffer=make(num_rows), backend="fa2",
        )  # fmt: skip
        # In place of the 8 MiB that each wrapper allocates, which are for steps with prompts.
        made.reset_workspace_buffer(self._workspace, torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=self._device))
        return made


def _starts(counts: np.ndarray[Any, Any]) -> I32:
    """[n + 1] where each of n parts begins."""
    starts = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=starts[1:])
    return starts


def workspace_bytes(heads: HeadShape, max_rows: int, num_processors: int) -> int:
    """For the results of splits, float32 tiles with their sums: as many as the library may plan (its scheduler.cuh)."""
    group = heads.num_q_heads // heads.num_kv_heads
    tile = TILE_ROWS if group <= TILE_ROWS else WIDE_TILE_ROWS
    decode_lines = tile * (-(-max_rows * group // tile) + max_rows - 1)  # a graph reserves all tiles
    mixed_lines = MIXED_TILE_ROWS * (PROGRAMS_PER_PROCESSOR * num_processors // heads.num_kv_heads)
    num_bytes = max(decode_lines, mixed_lines) * heads.num_q_heads * (heads.head_dim + 1) * 4
    return max(MIN_WORKSPACE, num_bytes + ALIGNMENT_SLACK)


def _mask_and_scale(shape: AttentionShape) -> dict[str, Any]:
    return {
        "sm_scale": shape.scale,
        "window_left": -1 if shape.window is None else shape.window - 1,
        "logits_soft_cap": shape.soft_cap,
    }


def flashinfer_package() -> ModuleType:
    """The flashinfer package."""
    try:
        package = importlib.import_module("flashinfer")
    except ImportError as error:
        raise BackendUnavailableError(f"flashinfer cannot be imported ({error}); use --attention triton") from error
    missing = [name for name in (DECODE, PREFILL) if not hasattr(package, name)]
    if missing:
        raise BackendUnavailableError(
            f"flashinfer has no {missing[0]}; install another version, or use --attention triton"
        )
    return package
