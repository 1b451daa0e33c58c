"""Paged attention: random batches over pools with NaN against float64, and planted faults that must be found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from bench.gpu.checks.references import work_items as expected_items
from tests.gpu.builders import DEVICE, DTYPES, TOLERANCE, AttentionCase, relative_error
from worker_svc.engine.backend import AttentionShape, HeadShape
from worker_svc.engine.gpu.kernels import attention
from worker_svc.engine.gpu.kernels.attention import AttentionTiles
from worker_svc.engine.gpu.kernels.work_list import Splits, make_work_list

DECODE = AttentionTiles(block_m=16, block_n=16, min_split=32, num_warps=4, num_stages=3)
PREFILL = AttentionTiles(block_m=32, block_n=16, min_split=0, num_warps=4, num_stages=3)
EXACT = AttentionTiles(block_m=16, block_n=16, min_split=0, num_warps=4, num_stages=3, one_loop=True, fixed_split=32)

SHORT = Splits(0.0, 1000)  # least length; with fixed splits, every row is divided
WHOLE_ROWS = Splits(0.0, 0)  # with fixed splits, no row is divided

PAIRS = HeadShape(4, 2, 16)
MIXED = [(40, 1), (0, 21), (31, 1), (17, 13), (32, 1), (0, 1), (5, 2)]


def run(case, *passes, num_programs=3, splits=SHORT):
    """Attention in one launch per (tiles, min_queries)."""
    out = torch.full_like(case.q, float("nan"))
    parts = case.empty_parts()
    for tiles, min_queries in passes:
        work = case.empty_work()
        make_work_list(
            case.queries, case.num_rows, work, tiles,
            queries_per_tile=tiles.queries(case.shape), splits=splits, min_queries=min_queries,
            window=case.attention.window,
        )  # fmt: skip
        attention.paged_attention(
            case.q, case.cache, case.queries, work, parts, out, case.attention, tiles, num_programs, case.scales
        )
    return out


def fast(case, **options):
    return run(case, (DECODE, 1), (PREFILL, DECODE.queries(case.shape) + 1), **options)


def error_of(case, out):
    num_rows = int(case.num_rows)
    end = int(case.queries.starts[num_rows])
    expected = attention.reference(case.q, case.cache, case.queries, num_rows, case.attention, case.scales)
    assert torch.isnan(out[end:]).all()  # padding is not written
    return relative_error(out[:end], expected[:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [(PAIRS, 16), (HeadShape(7, 1, 32), 8), (HeadShape(2, 2, 64), 32), (HeadShape(6, 2, 16), 1)],
)
def test_mixed_batch(shape, block_size, dtype):
    case = AttentionCase.make(shape, MIXED, dtype=dtype, block_size=block_size, padding=3)
    assert error_of(case, fast(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [80, 96, 112])
def test_head_sizes_that_are_not_powers_of_two(dim):
    """The neighbouring blocks hold NaN, so reading one column too many would show."""
    rows = [(40, 1), (17, 5), (31, 1)]
    case = AttentionCase.make(HeadShape(4, 2, dim), rows, dtype=torch.float32, block_size=16, padding=1)
    assert error_of(case, fast(case)) < TOLERANCE[torch.float32]
    assert error_of(case, run(case, (EXACT, 1))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
def test_fp8_keys_and_values(dtype, dim):
    """Against float64 attention over the values that the pool holds."""
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.125]], device=DEVICE)
    rows = [(40, 1), (17, 5), (0, 3)]
    case = AttentionCase.make(HeadShape(4, 2, dim), rows, dtype=dtype, block_size=16, padding=2, scales=scales)
    assert error_of(case, fast(case)) < TOLERANCE[dtype]
    assert error_of(case, run(case, (EXACT, 1))) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda *choices: choices[int(torch.randint(len(choices), (1,), generator=generator))]  # noqa: E731
    kv_heads, group = pick(1, 2, 3), pick(1, 2, 3, 5)
    rows = [(pick(0, 1, 15, 16, 31, 33, 64), pick(1, 1, 2, 16, 17)) for _ in range(5)]
    case = AttentionCase.make(
        HeadShape(kv_heads * group, kv_heads, pick(16, 32)), rows,
        dtype=torch.float32, block_size=pick(2, 16, 64), padding=pick(0, 4), seed=seed,
    )  # fmt: skip
    assert error_of(case, fast(case, num_programs=pick(1, 5, 1000))) < TOLERANCE[torch.float32]


def test_one_list_for_all_rows():
    case = AttentionCase.make(PAIRS, MIXED, dtype=torch.float32, block_size=16)
    assert error_of(case, run(case, (EXACT, 1))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [[(0, 1)], [(63, 1), (64, 1), (65, 1)], [(0, 16), (16, 16)]])
def test_lengths_at_boundaries_of_blocks_tiles_and_splits(rows):
    case = AttentionCase.make(PAIRS, rows, dtype=torch.float32, block_size=16)
    assert error_of(case, fast(case)) < TOLERANCE[torch.float32]


def test_an_empty_batch_writes_nothing():
    case = AttentionCase.make(PAIRS, [(5, 1)], dtype=torch.float32, block_size=16)
    case.num_rows.zero_()
    assert torch.isnan(fast(case)).all()


@pytest.mark.parametrize(
    ("min_split", "fixed_split", "splits", "min_queries"),
    [
        (0, 0, SHORT, 1),
        (0, 0, SHORT, 2),
        (16, 0, SHORT, 1),
        (16, 0, Splits(0.0, 1), 1),
        (16, 0, Splits(3.0, 100), 1),
        (0, 16, SHORT, 1),
        (0, 16, WHOLE_ROWS, 1),
        (0, 16, Splits(0.0, 8), 1),
        (0, 32, Splits(0.002, 100), 1),
    ],
)
@pytest.mark.parametrize("window", [None, 35])
def test_work_list(min_split, fixed_split, splits, min_queries, window):
    case = AttentionCase.make(PAIRS, [*MIXED, (3, 300), (90, 1)], dtype=torch.float32, block_size=16, padding=5)
    work = case.empty_work()
    work.tickets.fill_(7)
    options = {"queries_per_tile": 4, "splits": splits, "min_queries": min_queries, "window": window}
    tiles = replace(DECODE, min_split=min_split, fixed_split=fixed_split)
    make_work_list(case.queries, case.num_rows, work, tiles, **options)
    assert not work.tickets[:, 0].any()
    options["fixed_split"] = fixed_split
    num_rows = int(case.num_rows)
    starts, contexts = case.queries.starts.tolist(), case.queries.contexts.tolist()
    expected, split = expected_items(starts[: num_rows + 1], contexts[:num_rows], min_split=min_split, **options)
    assert work.sizes.tolist() == [len(expected), split]
    assert [tuple(item) for item in work.items[: len(expected)].tolist()] == expected
    assert (work.items[len(expected) :] == -1).all()


@pytest.mark.parametrize("splits", [Splits(0.0, 1), Splits(0.0, 4), Splits(1.5, 100), SHORT])
def test_any_number_of_splits(splits):
    rows = [(90, 1), (200, 4), (9, 1), (31, 2), (32, 1), (0, 1), (12, 3), (60, 8)]
    case = AttentionCase.make(PAIRS, rows, dtype=torch.float32, block_size=16)
    assert error_of(case, fast(case, splits=splits)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tiles", [DECODE, EXACT], ids=["decode", "exact"])
def test_replays_of_a_step_with_several_layers_start_from_zeros(tiles):
    """A new list sets the tickets of all launches to zeros, so every replay of a graph does."""
    case = AttentionCase.make(PAIRS, [(90, 1), (9, 1), (40, 1)], dtype=torch.float32, block_size=16)
    work, parts, outs = case.empty_work(num_launches=2), case.empty_parts(), []
    for num_programs in (1, 3, 50):
        make_work_list(case.queries, case.num_rows, work, tiles, queries_per_tile=tiles.queries(PAIRS), splits=SHORT)
        for launch in range(2):
            outs.append(torch.full_like(case.q, torch.nan))
            attention.paged_attention(
                case.q, case.cache, case.queries, work, parts, outs[-1], case.attention, tiles, num_programs, None,
                launch=launch,
            )  # fmt: skip
        num_units = int(work.sizes[0]) * PAIRS.num_kv_heads
        assert work.tickets[:, 0].tolist() == [num_units if num_units > num_programs else 0] * 2
        assert not parts.arrived.any()
    assert all(torch.equal(outs[0], out) for out in outs)
    assert error_of(case, outs[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 33, 700])
def test_merge_of_any_number_of_splits(count):
    """The splits of a row, with results of very different weights, against their softmax in float64."""
    generator = torch.Generator().manual_seed(count)
    heads, group, dim = 3, 4, 16
    found = torch.randn(count, heads, dim, generator=generator)
    log_sum = torch.randn(count, heads, generator=generator) * 8
    log_sum[0, 1] = -torch.inf  # a split that a query does not see
    if count == 1:
        log_sum[0, 1] = 3.0
    out = torch.full((2, heads, dim), torch.nan, device=DEVICE)
    merge_kernel[(1,)](found.to(DEVICE), log_sum.to(DEVICE), out, count, HQ=heads, GROUP=group, D=dim)
    weights = torch.softmax(log_sum.double() * math.log(2), 0)
    expected = (weights[:, :, None] * found.double()).sum(0) * 0.5
    assert relative_error(out[1], expected) < TOLERANCE[torch.float32] * max(1, count**0.5 / 4)
    assert torch.isnan(out[0]).all()


@triton.jit
def merge_kernel(part_ptr, log_sum_ptr, out_ptr, count, HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    attention._merge_splits(
        part_ptr, log_sum_ptr, out_ptr, out_ptr, count * 0, count, 1, 0, count * 0 + 1, 0.5, HQ, HQ, GROUP, D, False, D
    )


def swap_blocks(case):
    tables = case.queries.tables
    line = int(case.queries.rows[1])
    tables[line, [0, 1]] = tables[line, [1, 0]]


def shift_contexts(case):
    case.queries.contexts[3] -= 1


def wrong_line(case):
    case.queries.rows[[0, 4]] = case.queries.rows[[4, 0]]


@pytest.mark.parametrize("plant", [swap_blocks, shift_contexts, wrong_line])
def test_planted_faults_are_found(plant):
    """A wrong table, length or row causes an error far beyond the tolerance."""
    case = AttentionCase.make(PAIRS, MIXED, dtype=torch.float32, block_size=16)
    expected = attention.reference(case.q, case.cache, case.queries, len(MIXED), case.attention)
    plant(case)
    assert relative_error(fast(case), expected) > 1000 * TOLERANCE[torch.float32]


MUTATIONS = [
    ("key[None, :] <= query_position[:, None]", "key[None, :] < query_position[:, None] + 2"),
    ("is_in = key < end", "is_in = key < end - 1"),
    (
        "seen_by_all = tl.minimum(end, context + first_query + 1)",
        "seen_by_all = tl.minimum(end, context + first_query + 16)",
    ),
    ("head = kv_head * G + line % GROUP", "head = kv_head + line % GROUP"),
    ("first_key + tl.load(item + 2) * split_keys", "first_key + tl.load(item + 2) * (split_keys - 1)"),
    ("shrink = tl.exp2(best - zero)\n    total", "shrink = tl.exp2(zero - zero)\n    total"),
    ("block * PAGE + key % PAGE", "block * PAGE + (key + 1) % PAGE"),
    ("for split in tl.range(0, num_splits,", "for split in tl.range(0, num_splits - 1,"),
    ('sem="acq_rel") == num_splits - 1', 'sem="acq_rel") == num_splits - 2'),
    ("first_part + tl.load(item + 2)", "tl.load(item + 2)"),
    ("tl.fma(total, shrink, weight)", "tl.fma(total, shrink, shrink)"),
]
EXACT_MUTATIONS = [
    ("log_sum = tl.where(sees_any, split_best + tl.log2(divisor),", "log_sum = tl.where(sees_any, split_best,"),
    ("range(begin // FIXED * FIXED, end, FIXED)", "range(begin // FIXED * FIXED, end - FIXED, FIXED)"),
    ("tl.minimum(end, split_begin + FIXED), BLOCK_N", "tl.minimum(end, split_begin + FIXED - BLOCK_N), BLOCK_N"),
    ("found = split_acc / divisor[:, None]", "found = split_acc"),
    ("found, log_sum = acc, best", "found, log_sum = acc, best * 0"),
]


@pytest.mark.parametrize(("old", "new"), MUTATIONS, ids=[old for old, _ in MUTATIONS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutants_are_caught(plant_mutant, old, new):
    rows = [*MIXED, (70, 1)]  # the last row has three splits
    case = AttentionCase.make(PAIRS, rows, dtype=torch.float32, block_size=16)
    plant_mutant(attention, old, new)
    error = relative_error(fast(case), attention.reference(case.q, case.cache, case.queries, len(rows), case.attention))
    assert not error < 1e-4


@pytest.mark.parametrize(("old", "new"), EXACT_MUTATIONS, ids=[old for old, _ in EXACT_MUTATIONS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutants_of_fixed_splits_are_caught(plant_mutant, old, new):
    """By their values, or because bits depend on whether a row is divided."""
    rows = [(0, 37), (70, 1)]
    case = AttentionCase.make(PAIRS, rows, dtype=torch.float32, block_size=16)
    plant_mutant(attention, old, new)
    divided, whole = (run(case, (EXACT, 1), splits=splits) for splits in (SHORT, WHOLE_ROWS))
    expected = attention.reference(case.q, case.cache, case.queries, len(rows), case.attention)
    assert not relative_error(whole, expected) < 1e-4 or not torch.equal(divided, whole)


def part_of(whole, context, count):
    """The queries [context, context + count) of the first row alone."""
    queries = replace(
        whole.queries,
        rows=whole.queries.rows[:1],
        starts=torch.tensor([0, count], dtype=torch.int32, device=whole.q.device),
        contexts=torch.tensor([context], dtype=torch.int32, device=whole.q.device),
    )
    q, one = whole.q[context : context + count].contiguous(), whole.num_rows.clone().fill_(1)
    return replace(whole, q=q, queries=queries, num_rows=one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_rows_do_not_depend_on_chunks_other_rows_or_whether_they_are_divided(dtype):
    """The same query over the same keys gives the same bits alone, in a chunk and in a batch, divided and whole."""
    whole = AttentionCase.make(PAIRS, [(0, 77), (9, 3), (62, 4), (95, 1), (96, 1)], dtype=dtype, block_size=16)
    expected = run(whole, (EXACT, 1), splits=WHOLE_ROWS)
    for splits in (SHORT, Splits(0.0, 3)):
        assert torch.equal(run(whole, (EXACT, 1), splits=splits), expected)
    for context, count in [(76, 1), (63, 1), (64, 2), (36, 1), (30, 7), (16, 21), (5, 20), (60, 17), (70, 4)]:
        part = part_of(whole, context, count)
        for splits in (SHORT, WHOLE_ROWS):
            assert torch.equal(run(part, (EXACT, 1), splits=splits), expected[context : context + count])


def masked(shape, window=None, soft_cap=None, scale=0.5, *, has_sinks=False):
    sinks = torch.linspace(-2, 5, shape.num_q_heads, device=DEVICE) if has_sinks else None
    return AttentionShape(shape, scale, soft_cap, window, sinks=sinks)


WINDOWED = [(40, 1), (0, 21), (31, 1), (70, 23), (130, 1), (24, 2)]  # (tokens in the pool, queries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [
    masked(PAIRS, window=1), masked(PAIRS, window=33), masked(PAIRS, soft_cap=0.7),
    masked(PAIRS, window=17, soft_cap=0.7), masked(PAIRS, has_sinks=True), masked(PAIRS, window=17, has_sinks=True),
], ids=lambda layer: f"window {layer.window} cap {layer.soft_cap} sinks {layer.sinks is not None}")  # fmt: skip
@pytest.mark.parametrize("block_size", [16, pytest.param(4, marks=pytest.mark.deep)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding lines may see no key
def test_windows_soft_caps_and_sinks(layer, block_size, dtype):
    """Slots before the windows hold NaN, as blocks may that the scheduler has freed."""
    case = AttentionCase.make(PAIRS, WINDOWED, dtype=dtype, block_size=block_size, padding=3, layer=layer)
    assert error_of(case, fast(case)) < TOLERANCE[dtype]
    assert error_of(case, run(case, (EXACT, 1))) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_windows_over_an_fp8_cache():
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.125]], device=DEVICE)
    layer = masked(PAIRS, window=18, soft_cap=2.0)
    case = AttentionCase.make(PAIRS, WINDOWED, dtype=torch.float32, block_size=16, scales=scales, layer=layer)
    assert error_of(case, fast(case)) < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity is the limit that the kernel needs
def test_large_scores_saturate_at_the_soft_cap():
    case = AttentionCase.make(PAIRS, [(40, 1), (3, 9)], dtype=torch.float32, block_size=16, layer=masked(PAIRS, 9, 3.0))
    case.q.mul_(1e4)
    assert error_of(case, fast(case)) < TOLERANCE[torch.float32]


def test_a_window_skips_the_keys_before_it():
    """The work of a row is bounded by the window: its splits begin where the window does."""
    case = AttentionCase.make(PAIRS, [(500, 1), (20, 1)], dtype=torch.float32, block_size=16)
    for window, expected in [(None, 16 + 1), (40, 2 + 1), (22, 2 + 1), (21, 1 + 1)]:
        work = case.empty_work()
        make_work_list(
            case.queries, case.num_rows, work, DECODE, queries_per_tile=DECODE.queries(PAIRS), splits=SHORT,
            window=window,
        )  # fmt: skip
        assert work.sizes.tolist() == [expected, 32]


WINDOW_MUTATIONS = [
    ("key[None, :] > query_position[:, None] - window", "key[None, :] > query_position[:, None] - window - 1"),
    ("is_in = is_in & (key >= lowest)", "is_in = is_in & (key >= 0)"),
    ('zero = tl.where(top == -float("inf"), 0.0, top)\n    weights', "zero = top\n    weights"),
    ("lowest = tl.maximum(context + first_query + 1 - window, 0)", "lowest = tl.maximum(context + 1 - window, 0) + 1"),
    ("first_key = lowest // (MIN_SPLIT + FIXED) * (MIN_SPLIT + FIXED)", "first_key = 0"),
    ("(1.0 - 2.0 / (doubled + 1.0))", "(1.0 - 2.0 / (doubled + 2.0))"),
]


@pytest.mark.parametrize(("old", "new"), WINDOW_MUTATIONS, ids=[old for old, _ in WINDOW_MUTATIONS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutants_of_windows_are_caught(plant_mutant, old, new):
    case = AttentionCase.make(
        PAIRS, WINDOWED, dtype=torch.float32, block_size=16, layer=masked(PAIRS, window=17, soft_cap=2.0)
    )
    plant_mutant(attention, old, new)
    expected = attention.reference(case.q, case.cache, case.queries, len(WINDOWED), case.attention)
    assert not relative_error(fast(case), expected) < 1e-4


@pytest.mark.parametrize("window", [19, 50])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact_rows_with_a_window_do_not_depend_on_chunks(window):
    layer = masked(PAIRS, window=window)
    whole = AttentionCase.make(PAIRS, [(0, 97)], dtype=torch.float32, block_size=16, layer=layer)
    whole.cache[0].nan_to_num_(0.5), whole.cache[1].nan_to_num_(0.5)
    expected = run(whole, (EXACT, 1))
    for context, count in [(96, 1), (82, 1), (30, 7), (16, 21), (47, 10)]:
        for splits in (SHORT, WHOLE_ROWS):
            found = run(part_of(whole, context, count), (EXACT, 1), splits=splits)
            assert torch.equal(found, expected[context : context + count])
