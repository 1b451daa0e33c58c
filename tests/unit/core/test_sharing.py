"""Shared blocks, counted by runs, against a count block by block."""

import random

import numpy as np

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.policy import shared_before
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence, SequenceData
from tests.builders import make_capacity, make_group

BLOCK_SIZE = 4


def make_table(rng: random.Random) -> tuple[RowTable, BlockManager]:
    """Up to six rows whose tables begin with a part of an earlier row's table."""
    table, pool = RowTable(make_capacity()), BlockManager(64, BLOCK_SIZE)
    tables = [np.empty(0, dtype=np.int64)]
    for i in range(rng.randint(1, 6)):
        other = rng.choice(tables)
        shared = other[: rng.randint(0, len(other))]
        pool.share(shared)
        blocks = np.concatenate((shared, pool.allocate(rng.randint(0 if len(shared) else 1, 4))))
        prompt = np.arange(BLOCK_SIZE * len(blocks), dtype=np.uint32)
        seq = Sequence(make_group(prompt.tolist(), f"r{i}"), 0, SequenceData(prompt, prompt[:0]), i)
        table.open(seq, prompt, blocks.astype(np.uint32), len(prompt), 100)
        tables.append(blocks)
    return table, pool


def test_runs_count_as_much_as_single_blocks() -> None:
    num_shared = 0
    for seed in range(300):
        rng = random.Random(seed)
        table, pool = make_table(rng)
        rows = table.active()
        source = table.held_blocks(rng.choice(rows.tolist())).tolist()
        hits = np.array(source[: rng.randint(0, len(source))], dtype=np.int64)
        tables = [*(table.held_blocks(row).tolist() for row in rows), hits.tolist()]
        order = rng.sample(range(len(tables)), len(tables))
        before: set[int] = set()
        expected = [0] * len(tables)
        for i in order:
            expected[i] = len(before.intersection(tables[i]))
            before |= set(tables[i])
        assert shared_before(table, pool, rows, hits, np.array(order)).tolist() == expected, f"seed {seed}"
        num_shared += sum(expected)
    assert num_shared > 300
