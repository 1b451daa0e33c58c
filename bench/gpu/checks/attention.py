"""Cases of attention: decode rows, and prompts with single queries, over blocks in reverse order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.checks.case import TOLERANCES, Case, Outputs, Setup
from worker_svc.engine.backend import AttentionShape
from worker_svc.engine.gpu.attention.paged import Attention, LayerCache
from worker_svc.engine.gpu.kernels.attention import Queries, reference
from worker_svc.engine.gpu.step.device_rows import HEAD_WORDS
from worker_svc.engine.gpu.step.step_buffer import Bucket, HostStep, StepColumns

# (tokens in the pool, queries): a first token, a second block, two splits. No length is a multiple of a block.
DECODE_ROWS = [(0, 1), (5, 1), (300, 1), (600, 1)]
MIXED_ROWS = [(0, 7), (260, 3), (31, 1)]
BEYOND = 100  # tokens by which a row has left the window of a layer: more than a tile
MAX_ROWS, MAX_TOKENS = 4, 128  # the capacity that `Attention` needs for these cases
SCALE = 0.5  # divisor of keys, values and queries in fp8


def attention_cases(attention: Attention, name: str, setup: Setup, tolerance: float | None = None) -> Iterator[Case]:
    """Both kinds of batches, decode rows only and a mix with prompts, for each different attention of the layers.

    `tolerance`: None for that of the model's dtype.
    """
    shapes = setup.attention_shapes
    if setup.model.architecture.names.sinks:
        shapes = [replace(shape, sinks=setup.random(shape.heads.num_q_heads, seed=3).float()) for shape in shapes]
    for shape, rows in itertools.product(shapes, (DECODE_ROWS, MIXED_ROWS)):
        shortened = [_shortened(row, setup.max_model_len) for row in _leaving_window(rows, shape)]
        yield _case(attention, name, setup, shape, shortened, tolerance or TOLERANCES[setup.dtype])


def _leaving_window(rows: list[tuple[int, int]], shape: AttentionShape) -> list[tuple[int, int]]:
    """These rows, of which the first one leaves the window of the layer, if it has one."""
    return rows if shape.window is None else [(shape.window + BEYOND, rows[0][1]), *rows[1:]]


def _shortened(row: tuple[int, int], max_model_len: int) -> tuple[int, int]:
    context, count = row
    return min(context, max(max_model_len - count, 0)), count


def _case(
    attention: Attention,
    name: str,
    setup: Setup,
    shape: AttentionShape,
    rows: list[tuple[int, int]],
    tolerance: float,
) -> Case:
    heads, block_size = shape.heads, setup.block_size
    starts = [sum(count for _, count in rows[:i]) for i in range(len(rows) + 1)]
    counts = [-(-(context + count) // block_size) for context, count in rows]
    records = setup.records(len(rows), max(counts))
    for record, blocks in zip(records, torch.split(torch.arange(sum(counts)).flip(0), counts), strict=True):
        record[HEAD_WORDS : HEAD_WORDS + len(blocks)] = blocks
    pool = (sum(counts), block_size, heads.num_kv_heads, heads.head_dim)
    q = setup.random(starts[-1], heads.num_q_heads, heads.head_dim)
    keys, values = setup.random(*pool, seed=1), setup.random(*pool, seed=2)
    cache = LayerCache(keys, values, None)
    if setup.has_scaled_cache:
        cache, keys, values = _scaled(keys, values)
    queries = _queries(rows, records)
    return Case(
        name,
        f"rows of (tokens before, queries) {rows}, {heads.num_q_heads} query heads, {heads.num_kv_heads} KV heads, "
        f"head_dim {heads.head_dim}, window {shape.window}, soft cap {shape.soft_cap}, block_size {block_size}",
        starts,
        partial(_attend, attention, shape, rows, records, q, starts, cache),
        {"output": reference(q, (keys, values), queries, len(rows), shape)},
        {"output": tolerance},
    )


def _attend(
    attention: Attention,
    shape: AttentionShape,
    rows: list[tuple[int, int]],
    records: torch.Tensor,
    q: torch.Tensor,
    starts: list[int],
    cache: LayerCache,
    first: int,
    last: int,
) -> Outputs:
    chosen = q[starts[first] : starts[last]].clone()
    columns, out = _columns(rows[first:last], records[first:last].clone()), torch.full_like(chosen, torch.nan)
    attention.begin(columns)
    attention.attend(chosen, cache, columns, shape, out)
    return {"output": out}


def _scaled(keys: torch.Tensor, values: torch.Tensor) -> tuple[LayerCache, torch.Tensor, torch.Tensor]:
    """The cache in fp8, and the keys and values that it represents."""
    scales = torch.full((3, keys.shape[2]), SCALE, device=keys.device)
    narrow_keys, narrow_values = ((pool / SCALE).to(torch.float8_e4m3fn) for pool in (keys, values))
    cache = LayerCache(narrow_keys, narrow_values, scales)
    return cache, narrow_keys.to(keys.dtype) * SCALE, narrow_values.to(keys.dtype) * SCALE


def _queries(rows: list[tuple[int, int]], records: torch.Tensor) -> Queries:
    contexts, counts = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    lines, starts, contexts = (
        column.int().to(records.device) for column in (torch.arange(len(rows)), starts, contexts)
    )
    return Queries(lines, starts, contexts, records[:, HEAD_WORDS:])


def _columns(rows: list[tuple[int, int]], records: torch.Tensor) -> StepColumns:
    """A step of these rows that does not sample."""
    queries = _queries(rows, records)
    none = torch.empty(0, dtype=torch.int32, device=records.device)
    is_decode = all(count == 1 for _, count in rows)
    return StepColumns(
        bucket=Bucket(int(queries.starts[-1]), len(rows), 0, is_decode=is_decode, is_filtered=False),
        num_rows=torch.tensor([len(rows)], dtype=torch.int32, device=records.device),
        queries=queries, sample_rows=none, sample_tokens=none, nth=none, output_positions=none, known=none,
        token_ids=none, positions=none, slots=none,
        host=HostStep(queries.starts.cpu().long().numpy(), queries.contexts.cpu().long().numpy()),
    )  # fmt: skip
