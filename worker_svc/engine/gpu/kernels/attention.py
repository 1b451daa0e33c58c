"""Paged attention over a work list: decode, chunks of a prompt, and both in one batch.

A work item is (row of the batch, first query of a tile, split of its keys). A fixed number of programs takes items x KV
heads from a common counter, the longest first, so one launch, and one CUDA graph, serves every length, and all programs
end at about the same time. Query heads that share a KV head are packed into one tile: line m of a tile is query
m // GROUP, head m % GROUP of the group.

A head_dim that is not a power of two is padded with zeros to the next one. Keys and values in fp8 are converted to the
model's dtype as they are read; `scales` [2, kv_heads] float32 are the divisors with which they were stored.

Only rows whose queries fit one tile are divided among programs (flash-decoding): rows with one query, and those that
verify drafts. The program that ends last with a split of a row and KV head merges their results in order. There are two
kinds of splits:

- MIN_SPLIT: all splits of a step have the same number of keys, which the work list chooses.
- FIXED: split i of a row always has the keys [i * FIXED, (i + 1) * FIXED). A tile of several queries, or of a row that
  is not divided, goes through its splits in one program, with the same operations in the same order: every split has a
  softmax of its own, and its result is merged into those before. So the result of a row depends neither on the other
  rows nor on whether it was divided. A query that sees no key of a split merges it with weight 0, which changes no bit.

If both are 0, keys are not split.

With a sliding window, key tiles before the window of a tile's first query are skipped, and keys before it are read as
0: their blocks may belong to another row by now. A query of the tile may see no key of a tile that another one sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.engine.backend import AttentionShape, HeadShape
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent

LOG2_E = math.log2(math.e)
# Row, first query, split, first part of the row or WHOLE: 16 bytes.
ITEM_WORDS = 4
WHOLE = tl.constexpr(-1)  # the item has all keys of its queries
MERGE_STAGES = tl.constexpr(8)  # loads of this many splits overlap


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Fixed sizes of one use of the kernel. No autotuning: it cannot run in a graph capture, and differs by GPU."""

    block_m: int  # lines of a tile: queries x heads of a group
    block_n: int  # keys of a tile
    min_split: int  # least keys of a split; 0: their number is not chosen by the step
    num_warps: int
    num_stages: int
    # True: one loop masks every key tile. This halves the code, and all chunks of a prompt run the same instructions.
    one_loop: bool = False
    fixed_split: int = 0  # keys of a split, a multiple of block_n; 0: they are not fixed

    def __post_init__(self) -> None:
        if self.min_split % self.block_n or self.fixed_split % self.block_n:  # a tile would be in two blocks
            raise ValueError(f"splits of keys must be multiples of block_n, got {self}")

    def queries(self, shape: HeadShape) -> int:
        """Number of queries in a tile."""
        return self.block_m // group_lines(shape)


def group_lines(shape: HeadShape) -> int:
    """Number of lines that one query takes in a tile."""
    return int(triton.next_power_of_2(shape.num_q_heads // shape.num_kv_heads))


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of the launches of a step, all on the device. A new list sets `tickets` to zeros."""

    items: torch.Tensor  # int32 [n, ITEM_WORDS]
    sizes: torch.Tensor  # int32 [2]: items, keys of a split
    tickets: torch.Tensor  # int32 [launches, 4], of each the first: units taken after each program's first

    @classmethod
    def empty(cls, num_items: int, device: torch.device, num_launches: int = 1) -> WorkList:
        """A list with room for that many items, for one launch per layer."""
        items = torch.zeros(num_items, ITEM_WORDS, dtype=torch.int32, device=device)
        sizes = torch.zeros(2, dtype=torch.int32, device=device)
        # Rows of 16 bytes, because kernels are compiled for alignments.
        return cls(items, sizes, torch.zeros(num_launches, 4, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class Queries:
    """The rows of a batch.

    `rows` are their rows in `tables`, `starts` their first tokens in the batch, `contexts` their tokens in the pool
    before this step.
    """

    rows: torch.Tensor  # int32 [B]
    starts: torch.Tensor  # int32 [B + 1]
    contexts: torch.Tensor  # int32 [B]
    tables: torch.Tensor  # int32 [rows, blocks], any stride between rows


@dataclass(frozen=True, slots=True)
class Parts:
    """Results of splits until they are merged. A row with one split has none."""

    out: torch.Tensor  # float32 [n, q_heads, dim]; one part per split and query, those of a split side by side
    log_sum: torch.Tensor  # float32 [n, q_heads]
    arrived: torch.Tensor  # int32 [rows, kv_heads], zeros: splits whose result is there. The last one resets it.

    @classmethod
    def empty(cls, num_parts: int, max_rows: int, shape: HeadShape, device: torch.device) -> Parts:
        """Room for that many parts."""
        out = torch.zeros(num_parts, shape.num_q_heads, shape.head_dim, device=device)
        arrived = torch.zeros(max_rows, shape.num_kv_heads, dtype=torch.int32, device=device)
        return cls(out, torch.zeros(num_parts, shape.num_q_heads, device=device), arrived)


@triton.jit
def _key_offsets(table_ptr, start, key, is_in, kv_head, PAGE: tl.constexpr, HKV: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of the keys [BLOCK_N] of one head, in units of D. `key` are their positions; the first is `start`."""
    if PAGE % BLOCK_N == 0:  # a tile is within one page: one scalar load
        block = tl.load(table_ptr + start // PAGE).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // PAGE, mask=is_in, other=0).to(tl.int64)
    return (block * PAGE + key % PAGE) * HKV + kv_head


@triton.jit
def _attend_tile(
    q, best, total, acc, table_ptr, k_ptr, v_ptr, start, lowest, end, query_position, kv_head, scale_log2, window,
    soft_cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SEES_NONE: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running softmax. Keys before `lowest` and from `end` on are not read."""
    key = start + tl.arange(0, BLOCK_N)
    is_in = key < end
    if WINDOW:
        is_in = is_in & (key >= lowest)
    column = tl.arange(0, BLOCK_D)
    offsets = _key_offsets(table_ptr, start, key, is_in, kv_head, PAGE, HKV, BLOCK_N)[:, None] * D + column[None, :]
    if MASKED and D < BLOCK_D:
        k = tl.load(k_ptr + offsets, mask=is_in[:, None] & (column < D)[None, :], other=0.0)
        v = tl.load(v_ptr + offsets, mask=is_in[:, None] & (column < D)[None, :], other=0.0)
    elif MASKED:
        k = tl.load(k_ptr + offsets, mask=is_in[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=is_in[:, None], other=0.0)
    elif D < BLOCK_D:
        k = tl.load(k_ptr + offsets, mask=(column < D)[None, :], other=0.0)
        v = tl.load(v_ptr + offsets, mask=(column < D)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + offsets)
        v = tl.load(v_ptr + offsets)
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:  # cap * tanh(score / cap); tanh(x) = 1 - 2 / (exp(2x) + 1), because the interpreter lacks libdevice.tanh
        doubled = tl.exp2(scores * (2.0 * scale_log2 / soft_cap))
        scores = soft_cap * 1.4426950408889634 * (1.0 - 2.0 / (doubled + 1.0))
        scale_log2 = 1.0
    if MASKED:
        is_visible = is_in[None, :] & (key[None, :] <= query_position[:, None])
        if WINDOW:
            is_visible = is_visible & (key[None, :] > query_position[:, None] - window)
        scores = tl.where(is_visible, scores, -float("inf"))
    top = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    zero = top
    if SEES_NONE:  # a query may have seen no key yet
        zero = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp2(scores * scale_log2 - zero[:, None])
    shrink = tl.exp2(best - zero)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _add_split(best, total, acc, log_sum, found):
    """Merges the result of a split, with its maximum + log2(sum), into those of the splits before it. Products and sums
    are explicit, because otherwise the compiler may choose others in each place."""
    top = tl.maximum(best, log_sum)
    zero = tl.where(top == -float("inf"), 0.0, top)
    shrink, weight = tl.exp2(best - zero), tl.exp2(log_sum - zero)
    shrinks = tl.broadcast_to(shrink[:, None], acc.shape)
    return top, tl.fma(total, shrink, weight), tl.fma(acc, shrinks, weight[:, None] * found)


@triton.jit
def _with_sink(total, best, sink_ptrs, is_line):
    """The sum of weights with that of a key without value. The product is explicit, as in `_add_split`."""
    sink = tl.load(sink_ptrs, mask=is_line, other=0.0)
    return total + tl.exp2(tl.fma(sink, tl.full(sink.shape, 1.4426950408889634, tl.float32), -best))


@triton.jit
def _merge_splits(
    part_ptr, log_sum_ptr, out_ptr, sink_ptr, first_part, num_splits, stride, first_head, token, scale,
    HQ: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the output of a query and KV head whose splits are all stored, `stride` parts apart."""
    line = tl.arange(0, GROUP)
    column = tl.arange(0, BLOCK_D)
    head = first_head + line
    is_there = (line < G)[:, None] & (column < D)[None, :]
    best = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK_D], tl.float32)
    for split in tl.range(0, num_splits, num_stages=MERGE_STAGES):
        part = (first_part + split * stride).to(tl.int64) * HQ + head
        # From the L2 cache: other programs have stored them.
        log_sum = tl.load(log_sum_ptr + part, mask=line < G, other=0.0, cache_modifier=".cg")
        found = tl.load(part_ptr + part[:, None] * D + column[None, :], mask=is_there, other=0.0, cache_modifier=".cg")
        best, total, acc = _add_split(best, total, acc, log_sum, found)
    if SINKS:
        total = _with_sink(total, best, sink_ptr + head, line < G)
    result = acc / total[:, None] * scale
    target = out_ptr + (token.to(tl.int64) * HQ + head)[:, None] * D + column[None, :]
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=is_there)


# Otherwise a grid that is a multiple of 16 would need a kernel of its own.
@triton.jit(do_not_specialize=["num_programs"])
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, kv_scale_ptr, table_ptr, table_stride, row_ptr, start_ptr, context_ptr, item_ptr, size_ptr,
    ticket_ptr, out_ptr, part_ptr, log_sum_ptr, arrived_ptr, sink_ptr, softmax_scale_log2, num_programs,
    window, soft_cap,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MIN_SPLIT: tl.constexpr,
    FIXED: tl.constexpr, ONE_LOOP: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    G: tl.constexpr = HQ // HKV
    SEES_NONE: tl.constexpr = WINDOW or MIN_SPLIT > 0  # the last split may begin behind a query
    line = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    num_units = tl.load(size_ptr) * HKV
    unit = tl.program_id(0)
    while unit < num_units:
        item = item_ptr + (unit // HKV) * 4
        kv_head = unit % HKV
        batch_row, first_query = tl.load(item), tl.load(item + 1)
        first_token = tl.load(start_ptr + batch_row)
        num_queries = tl.load(start_ptr + batch_row + 1) - first_token
        context = tl.load(context_ptr + batch_row)
        table = table_ptr + tl.load(row_ptr + batch_row).to(tl.int64) * table_stride

        query = first_query + line // GROUP
        head = kv_head * G + line % GROUP
        is_line = (query < num_queries) & (line % GROUP < G)
        is_there = is_line[:, None] & (column < D)[None, :]
        q_offsets = ((first_token + query).to(tl.int64) * HQ + head)[:, None] * D + column[None, :]
        q = tl.load(q_ptr + q_offsets, mask=is_there, other=0.0)
        scale_log2 = softmax_scale_log2
        if SCALED:
            scale_log2 *= tl.load(kv_scale_ptr + kv_head)

        lowest = 0
        if WINDOW:
            lowest = tl.maximum(context + first_query + 1 - window, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        end = context + tl.minimum(first_query + BLOCK_M // GROUP, num_queries)
        split_keys = 0
        if FIXED > 0:
            split_keys = FIXED
        if MIN_SPLIT > 0:
            split_keys = tl.load(size_ptr + 1)
        first_key = 0  # of the first split, as in the work list
        first_part = tl.load(item + 3)
        if MIN_SPLIT + FIXED > 0:
            first_key = lowest // (MIN_SPLIT + FIXED) * (MIN_SPLIT + FIXED)
            if first_part != WHOLE:
                split_begin = first_key + tl.load(item + 2) * split_keys
                begin = tl.maximum(begin, split_begin)
                end = tl.minimum(end, split_begin + split_keys)

        best = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if FIXED > 0:
            for split_begin in range(begin // FIXED * FIXED, end, FIXED):
                split_best = tl.full([BLOCK_M], -float("inf"), tl.float32)
                split_total = tl.zeros([BLOCK_M], tl.float32)
                split_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for start in range(tl.maximum(begin, split_begin), tl.minimum(end, split_begin + FIXED), BLOCK_N):
                    split_best, split_total, split_acc = _attend_tile(
                        q, split_best, split_total, split_acc, table, k_ptr, v_ptr, start, lowest, end,
                        context + query, kv_head, scale_log2, window, soft_cap, True, WINDOW, CAPPED, True, HKV, D,
                        PAGE, BLOCK_N, BLOCK_D,
                    )  # fmt: skip
                sees_any = split_total > 0
                divisor = tl.where(sees_any, split_total, 1.0)
                log_sum = tl.where(sees_any, split_best + tl.log2(divisor), -float("inf"))
                found = split_acc / divisor[:, None]
                best, total, acc = _add_split(best, total, acc, log_sum, found)
        else:
            seen_by_all = tl.minimum(end, context + first_query + 1)
            unmasked = begin
            if not ONE_LOOP and not WINDOW:
                unmasked = begin + (tl.maximum(seen_by_all - begin, 0) // BLOCK_N) * BLOCK_N
            for start in range(begin, unmasked, BLOCK_N):
                best, total, acc = _attend_tile(
                    q, best, total, acc, table, k_ptr, v_ptr, start, lowest, end, context + query, kv_head, scale_log2,
                    window, soft_cap, False, WINDOW, CAPPED, SEES_NONE, HKV, D, PAGE, BLOCK_N, BLOCK_D,
                )  # fmt: skip
            for start in range(unmasked, end, BLOCK_N):
                best, total, acc = _attend_tile(
                    q, best, total, acc, table, k_ptr, v_ptr, start, lowest, end, context + query, kv_head, scale_log2,
                    window, soft_cap, True, WINDOW, CAPPED, SEES_NONE, HKV, D, PAGE, BLOCK_N, BLOCK_D,
                )  # fmt: skip

        value_scale = 1.0
        if SCALED:
            value_scale = tl.load(kv_scale_ptr + HKV + kv_head)
        num_splits = 1
        if MIN_SPLIT + FIXED > 0:  # noqa: SIM102 (known to the compiler, so the rest has no splits)
            if first_part != WHOLE:
                num_splits = (context + num_queries - 1 - first_key + split_keys) // split_keys
        if num_splits > 1:
            part = (first_part + tl.load(item + 2) * num_queries + query).to(tl.int64) * HQ + head
            found, log_sum = acc, best  # one split was merged into none: its result, bit for bit
            if FIXED == 0:
                sees_any = total > 0
                divisor = tl.where(sees_any, total, 1.0)
                found = acc / divisor[:, None]
                log_sum = tl.where(sees_any, best + tl.log2(divisor), -float("inf"))
            tl.store(part_ptr + part[:, None] * D + column[None, :], found, mask=is_there)
            tl.store(log_sum_ptr + part, log_sum, mask=is_line)
            tl.debug_barrier()  # all threads have stored before one of them announces it
            counter = arrived_ptr + batch_row * HKV + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                tl.store(counter, 0)
                for nth in range(num_queries):
                    _merge_splits(
                        part_ptr, log_sum_ptr, out_ptr, sink_ptr, first_part + nth, num_splits, num_queries,
                        kv_head * G, first_token + nth, value_scale, HQ, G, GROUP, D, SINKS, BLOCK_D,
                    )  # fmt: skip
        else:
            if SINKS:
                total = _with_sink(total, best, sink_ptr + head, is_line)
            result = acc / total[:, None] * value_scale
            tl.store(out_ptr + q_offsets, result.to(out_ptr.dtype.element_ty), mask=is_there)
        if num_units > num_programs:
            # Relaxed, because nothing is passed through it.
            unit = num_programs + tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        else:
            unit = num_units


def paged_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    queries: Queries,
    work: WorkList,
    parts: Parts,
    out: torch.Tensor,
    shape: AttentionShape,
    tiles: AttentionTiles,
    num_programs: int,
    scales: torch.Tensor | None = None,
    *,
    launch: int = 0,
) -> Any:
    """Causal attention of the queries q [T, q_heads, dim] of the work list, made for the window of `shape` if keys are
    split. `launch`: the number of the launch since the list was made. Returns the compiled kernel."""
    heads = shape.heads
    return paged_attention_kernel[(num_programs,)](
        q, *cache, q if scales is None else scales, queries.tables, queries.tables.stride(0),
        queries.rows, queries.starts, queries.contexts,
        work.items, work.sizes, work.tickets[launch], out, parts.out, parts.log_sum, parts.arrived,
        q if shape.sinks is None else shape.sinks, shape.scale * LOG2_E, num_programs, shape.window or 0,
        shape.soft_cap or 1.0,
        HQ=heads.num_q_heads, HKV=heads.num_kv_heads, D=heads.head_dim, PAGE=cache[0].shape[1],
        GROUP=group_lines(heads), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(heads.head_dim), MIN_SPLIT=tiles.min_split, FIXED=tiles.fixed_split,
        ONE_LOOP=tiles.one_loop, SCALED=scales is not None, WINDOW=shape.window is not None,
        CAPPED=shape.soft_cap is not None, SINKS=shape.sinks is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **dependent(),
    )  # fmt: skip


def reference(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    queries: Queries,
    num_rows: int,
    shape: AttentionShape,
    scales: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    most_queries: int = 2**31,
) -> torch.Tensor:
    """Attention in `dtype`, row by row over gathered pages. It reads no key that none of `most_queries` successive
    queries sees."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    block_size, heads = cache[0].shape[1], shape.heads
    for i in range(num_rows):
        begin, end = int(queries.starts[i]), int(queries.starts[i + 1])
        table, context = queries.tables[int(queries.rows[i])].long(), int(queries.contexts[i]) - begin
        for first in range(begin, end, most_queries):
            last = min(first + most_queries, end)
            lowest = 0 if shape.window is None else max(context + first + 1 - shape.window, 0)
            if shape.chunk is not None:
                lowest = max(lowest, (context + first) // shape.chunk * shape.chunk)
            keys = torch.arange(lowest, context + last, device=q.device)
            k, v = (_gathered(pool, table[keys // block_size], keys % block_size).to(dtype) for pool in cache)
            if scales is not None:
                k, v = k * scales[0, :, None].to(dtype), v * scales[1, :, None].to(dtype)
            grouped = q[first:last].to(dtype).unflatten(1, (heads.num_kv_heads, -1))
            scores = torch.einsum("qhgd,khd->hgqk", grouped, k).flatten(0, 1) * shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            positions = context + torch.arange(first, last, device=q.device)
            scores = scores.masked_fill(~visible(shape, keys, positions), -torch.inf)
            if shape.sinks is not None:
                sinks = shape.sinks.to(dtype)[:, None, None].expand(-1, last - first, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(keys)].unflatten(0, (heads.num_kv_heads, -1))
            out[first:last] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
    return out


def _gathered(pool: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Indexes fp8 as bytes, because torch cannot index float8 tensors."""
    if pool.itemsize > 1:
        return pool[blocks, offsets]
    return pool.view(torch.uint8)[blocks, offsets].view(pool.dtype)


def visible(shape: AttentionShape, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Which key positions [k] the queries at these positions [q] see, [q, k]."""
    is_visible = keys[None] <= positions[:, None]
    if shape.window is not None:
        is_visible &= keys[None] > positions[:, None] - shape.window
    if shape.chunk is not None:
        is_visible &= keys[None] >= (positions // shape.chunk * shape.chunk)[:, None]
    return is_visible
