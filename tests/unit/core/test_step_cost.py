"""Steps and admissions stay cheap: counted in calls, which are the same on every machine, never in seconds.

When a limit is passed on purpose, run `make bench-core` before and after, and raise it with the reason in the commit.
"""

import sys
from collections import Counter

import numpy as np
import pytest

from bench import core
from bench.core import FullWorkers, SteadyDecode, add, answer_all
from tests.builders import make_capacity, make_scheduler
from tests.call_counts import counted
from tests.unit.core.test_scheduler import answer

BLOCK_SIZE = 16


def mean(calls: Counter[str], num_steps: int) -> Counter[str]:
    return Counter({event: round(total / num_steps) for event, total in calls.items()})


def calls_per_step(
    num_seqs: int, *, has_churn: bool = False, window: int | None = None, has_drafts: bool = False
) -> Counter[str]:
    """Mean calls of a step, messages included, over one cycle in which every row opens one block. `has_churn`: in each
    step one sequence ends and another begins. `window`: an attention window that all rows have left. `has_drafts`: all
    rows speculate.
    """
    decode, calls = SteadyDecode(num_seqs, BLOCK_SIZE, window), Counter[str]()
    for _ in range(4):
        decode.step(decode.answer_with_drafts() if has_drafts else decode.answer(), has_messages=True)
    for i in range(BLOCK_SIZE):
        if has_churn:
            decode.replace_one()
        ending_row = i if has_churn else None
        answer = decode.answer_with_drafts() if has_drafts else decode.answer(ending_row)
        with counted(calls):
            decode.step(answer, has_messages=True)
    return mean(calls, BLOCK_SIZE)


def calls_per_admission(num_workers: int, num_tokens: int) -> Counter[str]:
    """Mean calls from the arrival of a new prompt to the step that admits it."""
    scheduler, calls = core.make_scheduler(16, BLOCK_SIZE, num_workers), Counter[str]()
    rng = np.random.default_rng(0)
    for i in range(9):
        prompt = rng.integers(3, 50_000, num_tokens, dtype=np.uint32)
        with counted(calls if i else Counter()):
            add(scheduler, str(i), prompt, max_tokens=1)
            batches = scheduler.schedule(0.0)
        answer_all(scheduler, batches)
    return mean(calls, 8)


@pytest.mark.parametrize(("num_seqs", "python_calls", "c_calls"), [(1, 58, 58), (256, 73, 143)])
def test_calls_of_a_steady_step(num_seqs: int, python_calls: int, c_calls: int) -> None:
    calls = calls_per_step(num_seqs)
    assert calls["call"] <= python_calls, "Python calls"
    assert calls["c_call"] <= c_calls, "calls of C functions"


@pytest.mark.parametrize(("num_seqs", "python_calls", "c_calls"), [(1, 63, 60), (256, 102, 171)])
def test_calls_of_a_step_with_a_window(num_seqs: int, python_calls: int, c_calls: int) -> None:
    calls = calls_per_step(num_seqs, window=256)
    assert calls["call"] <= python_calls, "Python calls"
    assert calls["c_call"] <= c_calls, "calls of C functions"


@pytest.mark.parametrize(("num_seqs", "python_calls", "c_calls"), [(1, 106, 106), (256, 124, 286)])
def test_calls_of_a_step_with_drafts(num_seqs: int, python_calls: int, c_calls: int) -> None:
    calls = calls_per_step(num_seqs, has_drafts=True)
    assert calls["call"] <= python_calls, "Python calls"
    assert calls["c_call"] <= c_calls, "calls of C functions"


@pytest.mark.parametrize(("num_seqs", "python_calls", "c_calls"), [(32, 212, 261), (256, 214, 318)])
def test_calls_of_a_step_with_churn(num_seqs: int, python_calls: int, c_calls: int) -> None:
    calls = calls_per_step(num_seqs, has_churn=True)
    assert calls["call"] <= python_calls, "Python calls"
    assert calls["c_call"] <= c_calls, "calls of C functions"


@pytest.mark.parametrize(
    ("num_workers", "num_tokens", "python_calls", "c_calls"), [(8, 128, 176, 180), (64, 128, 176, 180)]
)
def test_calls_of_an_admission(num_workers: int, num_tokens: int, python_calls: int, c_calls: int) -> None:
    calls = calls_per_admission(num_workers, num_tokens)
    assert calls["call"] <= python_calls, "Python calls"
    assert calls["c_call"] <= c_calls, "calls of C functions"


@pytest.mark.parametrize("has_moves", [False, True])
def test_a_step_costs_what_it_admits_and_not_what_it_refuses(has_moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks are short, at most twice the calls as where rows are short."""
    monkeypatch.setattr(FullWorkers, "NUM_ROWS", 64)
    monkeypatch.setattr(FullWorkers, "NUM_WAITING", 200)
    rows, blocks = Counter[str](), Counter[str]()
    for is_short_of_blocks, calls in ((False, rows), (True, blocks)):
        full = FullWorkers(is_short_of_blocks=is_short_of_blocks, has_moves=has_moves)
        for _ in range(64):
            with counted(calls):
                full.step()
    assert blocks.total() <= 1.6 * rows.total()


def test_a_row_that_opens_no_block_costs_no_call() -> None:
    few, many = calls_per_step(16), calls_per_step(256)
    rows_that_open_a_block = (256 - 16) // BLOCK_SIZE
    per_row = (many["call"] + many["c_call"] - few["call"] - few["c_call"]) / rows_that_open_a_block
    assert per_row <= 10, "calls for each row that fills a block and opens the next"


def test_one_schedule_passes_few_files() -> None:
    """Files that a reader of one step must open: a decode run, and prompts that a pool which may fill up admits."""
    scheduler = make_scheduler(make_capacity(num_blocks=120, block_size=16, max_num_batched_tokens=256))
    sizes = [(90, 150)] * 6 + [(100, 150), (100, 100), (100, 100)]
    for i, (num_tokens, max_tokens) in enumerate(sizes):
        add(scheduler, f"{i}", np.arange(200 * i, 200 * i + num_tokens, dtype=np.uint32), max_tokens)
        if i < 6:
            (batch,) = scheduler.schedule(0.0)
            scheduler.update(answer(batch), 0.0)
    files = set()
    sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))
    try:
        (batch,) = scheduler.schedule(0.0)
    finally:
        sys.setprofile(None)
    assert set(batch.query_lens.tolist()) > {1}, "a mixed step"
    assert batch.opens
    assert len([name for name in files if "/scheduler_svc/" in name]) <= 9
