"""Attention compared once at the start with float64, on the device that will serve. Versions of flash-attn differ in
how they align a causal mask and read tables, compilers have got single tiles wrong on single architectures; and wrong
attention answers fluently."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from worker_svc.engine.backend import BackendUnavailableError, HeadShape
from worker_svc.engine.gpu.attention import Attention, LayerCache
from worker_svc.engine.gpu.kernels.attention import Queries, reference
from worker_svc.engine.gpu.step_buffer import Bucket, HostStep, StepColumns

TOLERANCE = 2e-2  # of the norm, in 16 bits; a mask or a table that is off by one costs far more
# (tokens in the pool, queries): a first token, a second block, two splits, lengths that are no multiple of anything.
DECODE_ROWS = [(0, 1), (5, 1), (300, 1), (600, 1)]
MIXED_ROWS = [(0, 7), (260, 3), (31, 1)]
SCALE = 0.5  # of what lies in 8 bits
MAX_ROWS, MAX_TOKENS = 4, 128  # of what is compared


def check_attention(
    attention: Attention,
    shape: HeadShape,
    *,
    block_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    advice: str,
    has_scaled_cache: bool = False,
) -> None:
    """Both ways in which it is called, over random rows. BackendUnavailableError if it fails or disagrees."""
    for rows in (DECODE_ROWS, MIXED_ROWS):
        chosen = [(min(context, max(max_model_len - count, 0)), count) for context, count in rows]
        try:
            error = error_of(attention, shape, chosen, block_size, dtype, device, has_scaled_cache=has_scaled_cache)
        except (RuntimeError, TypeError, ValueError, AssertionError) as problem:
            raise BackendUnavailableError(
                f"{name} failed when it was tried at the start ({problem}); {advice}"
            ) from problem
        if not error < TOLERANCE:  # NaN is no agreement
            raise BackendUnavailableError(
                f"{name} disagrees with the reference: its error over rows of (tokens before, queries) {chosen} is "
                f"{error:.3g}, allowed is {TOLERANCE}; {advice}"
            )


def error_of(
    attention: Attention,
    shape: HeadShape,
    rows: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_scaled_cache: bool = False,
) -> float:
    """Relative, of all rows together."""
    generator = torch.Generator().manual_seed(0)
    columns = _columns(rows, block_size, device)
    num_tokens, num_blocks = columns.bucket.tokens, columns.queries.tables.numel()
    pool, queries = (num_blocks, block_size, shape.num_kv_heads), (num_tokens, shape.num_q_heads)
    keys, values, q = (
        torch.randn(*size, shape.head_dim, generator=generator).to(dtype).to(device) for size in (pool, pool, queries)
    )
    cache = LayerCache(keys, values, None)
    if has_scaled_cache:
        cache, keys, values = _scaled(keys, values)
    out = torch.full_like(q, torch.nan)
    attention.begin(columns)
    attention.attend(q, cache, columns, out)
    expected = reference(q, (keys, values), columns.queries, len(rows), shape)
    return float((out.cpu().double() - expected).norm() / expected.norm())


def _scaled(keys: torch.Tensor, values: torch.Tensor) -> tuple[LayerCache, torch.Tensor, torch.Tensor]:
    """In 8 bits, and what that stands for."""
    scales = torch.full((2, keys.shape[2]), SCALE, device=keys.device)
    narrow_keys, narrow_values = ((pool / SCALE).to(torch.float8_e4m3fn) for pool in (keys, values))
    cache = LayerCache(narrow_keys, narrow_values, scales)
    return cache, narrow_keys.to(keys.dtype) * SCALE, narrow_values.to(keys.dtype) * SCALE


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
