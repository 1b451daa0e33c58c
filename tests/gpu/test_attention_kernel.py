"""Paged attention: random batches over pools with NaN against float64, and planted faults that must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.builders import DEVICE, DTYPES, TOLERANCE, AttentionCase, relative_error
from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.kernels import attention
from worker_svc.engine.gpu.kernels.attention import Tiles
from worker_svc.engine.gpu.kernels.work_list import MAX_QUERIES, make_work_list
from worker_svc.engine.gpu.kernels.work_list import reference as expected_items

DECODE = Tiles(block_m=16, block_n=16, split=32, num_warps=4, num_stages=3)
PREFILL = Tiles(block_m=32, block_n=16, split=0, num_warps=4, num_stages=3)
EXACT = Tiles(block_m=16, block_n=16, split=0, num_warps=4, num_stages=3, one_loop=True)

PAIRS = HeadShape(4, 2, 16)
MIXED = [(40, 1), (0, 21), (31, 1), (17, 13), (32, 1), (0, 1), (5, 2)]


def run(case, *passes, num_programs=3):
    """Attention in one launch per (tiles, min_queries, max_queries)."""
    out = torch.full_like(case.q, float("nan"))
    longest = int((case.queries.contexts + 64).max())
    for tiles, min_queries, max_queries in passes:
        work, parts = case.empty_work(), case.empty_parts(-(-longest // tiles.split) if tiles.split else 1)
        make_work_list(
            case.queries, case.num_rows, work,
            queries_per_tile=tiles.queries(case.shape), split=tiles.split,
            min_queries=min_queries, max_queries=max_queries,
        )  # fmt: skip
        attention.paged_attention(
            case.q, case.cache, case.queries, work, parts, out, case.shape, tiles, num_programs, case.scales
        )
        if tiles.split:
            attention.combine(case.queries, case.num_rows, parts, out, case.shape, tiles)
    return out


def fast(case, **options):
    return run(case, (DECODE, 1, 1), (PREFILL, 2, MAX_QUERIES), **options)


def error_of(case, out):
    num_rows = int(case.num_rows)
    end = int(case.queries.starts[num_rows])
    expected = attention.reference(case.q, case.cache, case.queries, num_rows, case.shape, case.scales)
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
    assert error_of(case, run(case, (EXACT, 1, MAX_QUERIES))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
def test_fp8_keys_and_values(dtype, dim):
    """Against float64 attention over the values that the pool holds."""
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.125]], device=DEVICE)
    rows = [(40, 1), (17, 5), (0, 3)]
    case = AttentionCase.make(HeadShape(4, 2, dim), rows, dtype=dtype, block_size=16, padding=2, scales=scales)
    assert error_of(case, fast(case)) < TOLERANCE[dtype]
    assert error_of(case, run(case, (EXACT, 1, MAX_QUERIES))) < TOLERANCE[dtype]


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
    assert error_of(case, run(case, (EXACT, 1, MAX_QUERIES))) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [[(0, 1)], [(63, 1), (64, 1), (65, 1)], [(0, 16), (16, 16)]])
def test_lengths_at_boundaries_of_blocks_tiles_and_splits(rows):
    case = AttentionCase.make(PAIRS, rows, dtype=torch.float32, block_size=16)
    assert error_of(case, fast(case)) < TOLERANCE[torch.float32]


def test_an_empty_batch_writes_nothing():
    case = AttentionCase.make(PAIRS, [(5, 1)], dtype=torch.float32, block_size=16)
    case.num_rows.zero_()
    assert torch.isnan(fast(case)).all()


@pytest.mark.parametrize(("min_queries", "max_queries"), [(1, 1), (2, MAX_QUERIES), (1, MAX_QUERIES)])
@pytest.mark.parametrize("split", [0, 16])
def test_work_list(min_queries, max_queries, split):
    case = AttentionCase.make(PAIRS, [*MIXED, (3, 300)], dtype=torch.float32, block_size=16, padding=5)
    work = case.empty_work()
    options = {"queries_per_tile": 4, "split": split, "min_queries": min_queries, "max_queries": max_queries}
    make_work_list(case.queries, case.num_rows, work, **options)
    num_rows = int(case.num_rows)
    starts, contexts = case.queries.starts.tolist(), case.queries.contexts.tolist()
    expected = expected_items(starts[: num_rows + 1], contexts[:num_rows], **options)
    assert int(work.count) == len(expected)
    assert [tuple(item) for item in work.items[: len(expected), :3].tolist()] == expected
    assert (work.items[len(expected) :] == -1).all()


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
    expected = attention.reference(case.q, case.cache, case.queries, len(MIXED), PAIRS)
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
    ("begin = split * SPLIT", "begin = split * (SPLIT - 1)"),
    ("shrink = tl.exp2(best - top)\n    total", "shrink = tl.exp2(top - top)\n    total"),
    ("block * PAGE + key % PAGE", "block * PAGE + (key + 1) % PAGE"),
    ("for split in range((num_keys + SPLIT - 1) // SPLIT)", "for split in range(num_keys // SPLIT)"),
]


@pytest.mark.parametrize(("old", "new"), MUTATIONS, ids=[old for old, _ in MUTATIONS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mutants_are_caught(plant_mutant, old, new):
    case = AttentionCase.make(PAIRS, MIXED, dtype=torch.float32, block_size=16)
    plant_mutant(attention, old, new)
    assert relative_error(fast(case), attention.reference(case.q, case.cache, case.queries, len(MIXED), PAIRS)) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_tiles_do_not_depend_on_chunks_or_other_rows(dtype):
    """The same query over the same keys gives the same bits alone, in a chunk and in a batch."""
    whole = AttentionCase.make(PAIRS, [(0, 37), (9, 3), (20, 1)], dtype=dtype, block_size=16)
    expected = run(whole, (EXACT, 1, MAX_QUERIES))
    for context, count in [(36, 1), (30, 7), (16, 21), (5, 20)]:
        queries = replace(
            whole.queries,
            rows=whole.queries.rows[:1],
            starts=torch.tensor([0, count], dtype=torch.int32, device=whole.q.device),
            contexts=torch.tensor([context], dtype=torch.int32, device=whole.q.device),
        )
        part = AttentionCase(
            whole.q[context : context + count].contiguous(),
            whole.cache,
            queries,
            whole.num_rows.clone().fill_(1),
            PAIRS,
        )
        assert torch.equal(run(part, (EXACT, 1, MAX_QUERIES)), expected[context : context + count])


def test_a_split_row_does_not_depend_on_other_rows():
    case = AttentionCase.make(PAIRS, [(90, 1), (9, 1), (40, 1)], dtype=torch.float32, block_size=16)
    alone = AttentionCase(
        case.q[:1], case.cache,
        replace(case.queries, rows=case.queries.rows[:1], starts=case.queries.starts[:2],
                contexts=case.queries.contexts[:1]),
        case.num_rows.clone().fill_(1), PAIRS,
    )  # fmt: skip
    assert torch.equal(fast(alone), fast(case)[:1])
