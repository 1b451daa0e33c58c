"""Admission: the peak of rows and a new sequence, shared blocks, the watermark, when a refusal ends."""

import random

import numpy as np
import pytest

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.policy import excess_blocks, steps_to_retry
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence, SequenceData
from scheduler_svc.core.worker_state import WorkerState
from step_protocol.columns import EMPTY
from tests.builders import make_capacity, make_group, make_scheduler, run_to_end
from tests.unit.core.calls import count_calls

BLOCK_SIZE = 4


def sequence(rng: random.Random) -> Sequence:
    num_output, stop = rng.choice([0, 0, 0, 3]), rng.random() < 0.5
    group = make_group(
        rng.randint(1, 40), max_tokens=num_output + rng.randint(1, 60), ignore_eos=stop, priority=rng.randint(0, 1)
    )
    return Sequence(group, 0, SequenceData(group.prompt, np.arange(num_output, dtype=np.uint32)), 1)


def open_row(table: RowTable, pool: BlockManager, seq: Sequence) -> int:
    token_ids = seq.data.token_ids()
    blocks = pool.allocate(-(-len(token_ids) // BLOCK_SIZE)).astype(np.uint32)
    row = table.open(seq, token_ids, blocks, 0, len(seq.group.prompt) + seq.group.stop.max_tokens)
    table.num_computed_tokens[row] = len(token_ids)
    return row


def test_a_refused_sequence_cannot_fit_before_the_block_in_which_it_is_asked_again() -> None:
    rng, num_refused = random.Random(0), 0
    for _ in range(100):
        table, pool = RowTable(make_capacity(num_blocks=1000)), BlockManager(1000, BLOCK_SIZE)
        group = make_group(40, max_tokens=70, ignore_eos=True)  # shares its prompt
        sharer = open_row(table, pool, Sequence(group, 0, SequenceData(group.prompt, EMPTY), 1))
        for _ in range(rng.randint(1, 6)):
            open_row(table, pool, sequence(rng))
        seq, max_blocks = sequence(rng), rng.randint(30, 100)
        hits = table.table[sharer, : rng.randint(0, min(10, seq.data.num_tokens // BLOCK_SIZE))].astype(np.int64)
        if not (num_excess := excess_blocks(table, pool, seq, hits, 0, 20.0, max_blocks)):
            continue
        num_refused += 1
        num_certain = steps_to_retry(num_excess, 1, BLOCK_SIZE) - BLOCK_SIZE // 4
        rows = table.active()
        for _ in range(min(num_certain, int((table.limit[rows] - table.num_tokens[rows]).min()) - 1)):
            table.num_tokens[rows] += 1
            table.num_computed_tokens[rows] += 1
            assert excess_blocks(table, pool, seq, hits, 0, 20.0, max_blocks)
    assert num_refused > 20


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_sequences_that_fill_the_pool_exactly_run_together(pipeline_depth: int) -> None:
    sizes = make_capacity(
        num_blocks=12,
        block_size=256,
        max_num_batched_tokens=2048,
        max_model_len=1024,
        pipeline_depth=pipeline_depth,
    )
    scheduler = make_scheduler(sizes)
    for i in range(6):  # 257 + 256 tokens: two blocks each, because the last token needs no KV
        scheduler.add_group(make_group(range(1000 * i, 1000 * i + 257), f"r{i}", max_tokens=256, ignore_eos=True), 0.0)
    assert run_to_end(scheduler) == 256
    assert scheduler.stats().counts.num_preemptions == 0


def test_a_shared_block_counts_for_the_sequence_that_holds_it_last() -> None:
    scheduler = make_scheduler(make_capacity(num_blocks=7))
    requests = {"a": ([1, 2, 3, 4, 10, 11], 1), "b": ([1, 2, 3, 4, 20, 21], 5)}  # share one block
    requests |= {"c": ([1, 2, 3, 4, 30, 31, 32, 33, 34], 7), "d": ([40, 41, 42], 11)}
    for name, (prompt, max_tokens) in requests.items():
        scheduler.add_group(make_group(prompt, name, max_tokens=max_tokens, ignore_eos=True), 0.0)
    assert run_to_end(scheduler) == 11
    assert scheduler.stats().counts.num_preemptions == 0


def test_the_watermark_of_a_small_pool_is_no_block() -> None:
    scheduler = make_scheduler(make_capacity(num_blocks=2, block_size=16))
    for name in "ab":
        scheduler.add_group(make_group(8, name, max_tokens=8, ignore_eos=True), 0.0)
    assert run_to_end(scheduler) == 8


def test_a_refused_sequence_is_asked_again_as_the_projected_peak_falls() -> None:
    scheduler = make_scheduler(
        make_capacity(num_blocks=80, block_size=1, max_num_seqs=16, max_num_batched_tokens=64), watermark=0.0
    )
    for i in range(12):
        scheduler.add_group(make_group(range(100 * i, 100 * i + 4), f"r{i}", max_tokens=30, ignore_eos=True), 0.0)
    assert run_to_end(scheduler) == 139  # 180 if the sequence is retried only when a row ends
    assert scheduler.stats().counts.num_preemptions == 0


def test_a_sequence_that_needs_as_much_as_a_refused_one_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(make_capacity(num_blocks=16))
    for i in range(8):
        scheduler.add_group(make_group(range(100 * i, 100 * i + 20), f"r{i}", max_tokens=20, ignore_eos=True), 0.0)
    asked = count_calls(monkeypatch, WorkerState, "try_admit")
    scheduler.schedule(0.0)
    num_running = scheduler.load().num_running
    assert len(asked) == num_running + 1
    worker = scheduler._workers["w0"]
    assert sum(worker.refusal(entry) is not None for entry in scheduler._waiting) > 1
