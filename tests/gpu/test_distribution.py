"""The programs of a decode step's attention end at about the same time, for the lengths of real batches."""

from __future__ import annotations

import random

import pytest

from bench.gpu.aot import HOPPER
from bench.gpu.distribution import distribute
from worker_svc.engine.backend import HeadShape
from worker_svc.engine.gpu.attention.tiles import DECODE_TILES, UNITS_OF_ROW, splits_for


def lengths(count: int, seed: int) -> list[int]:
    """Of nano-vllm's benchmark while it runs: 100 to 1,024 prompt tokens, and part of as many output tokens."""
    rng = random.Random(seed)
    return [rng.randint(100, 1024) + rng.randint(0, rng.randint(100, 1024)) for _ in range(count)]


@pytest.mark.parametrize("shape", [HeadShape(16, 8, 128), HeadShape(32, 8, 128)])
@pytest.mark.parametrize(("count", "most"), [(64, 1.1), (128, 1.05), (256, 1.03)])
def test_programs_end_at_about_the_same_time(shape, count, most):
    for seed in range(3):
        assert distribute(lengths(count, seed), shape, HOPPER.processors).longest_to_mean <= most


def test_long_rows_do_not_occupy_single_programs():
    shape = HeadShape(16, 8, 128)
    found = distribute([30_000, *[200] * 63], shape, HOPPER.processors)
    assert found.longest_to_mean <= 1.2
    assert found.overhead <= 1.6
    alone = distribute([131_072], shape, HOPPER.processors)
    assert alone.merged * shape.num_kv_heads >= UNITS_OF_ROW > HOPPER.processors.count


@pytest.mark.parametrize("count", [1, 8, 256])
def test_scratch_memory_is_bounded(count):
    """A step has a bounded number of splits, however long its rows are."""
    shape = HeadShape(32, 8, 128)
    splits = splits_for(shape, HOPPER.processors)
    keys = splits.keys(count * 131_072, 131_072, DECODE_TILES.min_split)
    assert count * -(-131_072 // keys) <= splits.most + count
    assert (splits.most + 256) * shape.num_q_heads * shape.head_dim * 4 < 64 << 20


@pytest.mark.parametrize("shape", [HeadShape(16, 8, 128), HeadShape(8, 1, 128)])
@pytest.mark.parametrize("rows", [[131_072], [32_768], [30_000, *[200] * 63], [4_096] * 40, [1_024] * 256])
def test_exact_rows_occupy_all_programs(shape, rows):
    """Long rows are divided, and batches that fill the programs are not."""
    found = distribute(rows, shape, HOPPER.processors, 2, is_exact=True)
    units = sum(-(-length // 512) for length in rows) * shape.num_kv_heads
    if units >= 8 * HOPPER.processors.count:
        assert found.longest_to_mean <= 1.35
    assert found.merged == (0 if rows == [1_024] * 256 and shape.num_kv_heads == 8 else found.merged)


def test_the_number_of_splits_that_one_program_merges_is_bounded():
    found = distribute([1_000_000], HeadShape(8, 1, 128), HOPPER.processors)
    assert 1 < found.merged <= 128
