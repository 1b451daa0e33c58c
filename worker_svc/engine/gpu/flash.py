"""Attention by the flash-attn package, compared once at the start: versions differ in how they align a causal mask and
read tables, and a wrong one answers fluently."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import BackendUnavailableError, HeadShape
from worker_svc.engine.gpu.attention import Attention, LayerCache, known_to_host
from worker_svc.engine.gpu.kernels.attention import Queries, reference
from worker_svc.engine.gpu.step_buffer import Bucket, HostStep, StepColumns

TOLERANCE = 2e-2  # of the norm, in 16 bits; a mask or a table that is off by one costs far more
# (tokens in the pool, queries): a first token, a second block, lengths that are no multiple of anything.
DECODE_ROWS = [(0, 1), (5, 1), (300, 1)]
MIXED_ROWS = [(0, 7), (260, 3), (31, 1)]


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
        host = known_to_host(columns)
        lens = host.starts[1:] - host.starts[:-1]
        found = self._varlen(
            q, *cache.pools, cu_seqlens_q=columns.queries.starts, cu_seqlens_k=self._key_starts,
            max_seqlen_q=int(lens.max(initial=1)), max_seqlen_k=int((host.contexts + lens).max(initial=1)),
            softmax_scale=self._scale, causal=True, block_table=self._tables,
        )  # fmt: skip
        out.copy_(found)


def flash_package() -> ModuleType:
    """flash-attn 2; its successor installs a folder of the same name, so the functions are asked for."""
    try:
        package = importlib.import_module("flash_attn")
    except ImportError as error:
        raise BackendUnavailableError(f"flash-attn cannot be imported ({error}); use --attention triton") from error
    missing = [name for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache") if not hasattr(package, name)]
    if missing:
        raise BackendUnavailableError(f"flash_attn has no {missing[0]}; install flash-attn 2 or use --attention triton")
    return package


def check_flash(
    attention: Attention, shape: HeadShape, *, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Both ways in which the package is called, over random rows against float64. Raises BackendUnavailableError."""
    for rows in (DECODE_ROWS, MIXED_ROWS):
        try:
            error = _error(attention, shape, rows, block_size, dtype, device)
        except (RuntimeError, TypeError, ValueError, AssertionError) as problem:
            raise BackendUnavailableError(
                f"flash-attn failed when it was tried at the start ({problem}); use --attention triton"
            ) from problem
        if not error < TOLERANCE:  # NaN is no agreement
            raise BackendUnavailableError(
                f"flash-attn disagrees with the reference: its error over rows of (tokens before, queries) {rows} is "
                f"{error:.3g}, allowed is {TOLERANCE}; install another version or use --attention triton"
            )


def _error(
    attention: Attention,
    shape: HeadShape,
    rows: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Relative, of all rows together."""
    generator = torch.Generator().manual_seed(0)
    columns = _columns(rows, block_size, device)
    num_tokens, num_blocks = columns.bucket.tokens, columns.queries.tables.numel()
    pool, queries = (num_blocks, block_size, shape.num_kv_heads), (num_tokens, shape.num_q_heads)
    keys, values, q = (
        torch.randn(*size, shape.head_dim, generator=generator).to(dtype).to(device) for size in (pool, pool, queries)
    )
    out = torch.full_like(q, torch.nan)
    attention.begin(columns)
    attention.attend(q, LayerCache(keys, values, None), columns, out)
    expected = reference(q, (keys, values), columns.queries, len(rows), shape)
    return float((out.cpu().double() - expected).norm() / expected.norm())


def _columns(rows: list[tuple[int, int]], block_size: int, device: torch.device) -> StepColumns:
    """A step of these rows, whose blocks lie in reverse order."""
    contexts, counts = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = F.pad(counts.cumsum(0), (1, 0))
    blocks = -(-int((contexts + counts).max()) // block_size)
    tables = torch.arange(len(rows) * blocks).flip(0).view(len(rows), blocks)
    is_decode = int(counts.max()) == 1
    none = torch.empty(0, dtype=torch.int32, device=device)
    queries = Queries(*(x.int().to(device) for x in (torch.arange(len(rows)), starts, contexts, tables)))
    return StepColumns(
        bucket=Bucket(int(starts[-1]), len(rows), 0, is_decode=is_decode, is_filtered=False),
        num_rows=torch.tensor([len(rows)], dtype=torch.int32, device=device),
        queries=queries, sample_rows=none, sample_tokens=none, output_positions=none, known=none, token_ids=none,
        positions=none, slots=none, host=HostStep(starts.numpy(), contexts.numpy()),
    )  # fmt: skip
