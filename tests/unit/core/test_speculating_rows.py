"""Rows that speculate: which rows they are, and what each step reserves for them."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.scheduler import Scheduler
from step_protocol.messages import StepBatch, StepOutput
from tests.builders import make_capacity, make_group, make_scheduler
from tests.invariants import check_scheduler


class Driver:
    """A worker with two messages in flight. Each row samples token 7; `wanted` has the drafts that it asks for."""

    def __init__(self, num_rows: int = 2, num_blocks: int = 64, prompt: int = 8) -> None:
        self.scheduler: Scheduler = make_scheduler(make_capacity(num_blocks=num_blocks, pipeline_depth=2), burst_s=0.01)
        self.in_flight: list[StepBatch] = []
        self.wanted = [0] * num_rows
        self.now = 0.0
        for row in range(num_rows):  # the first request gets the first row
            self.scheduler.add_group(make_group(range(9 * row, 9 * row + prompt), f"r{row}", max_tokens=100), 0.0)
        self.send()

    @property
    def worker(self):
        return next(iter(self.scheduler._workers.values()))

    @property
    def speculating(self) -> list[int]:
        return sorted(self.worker.speculation.rows.tolist())

    def send(self) -> list[StepBatch]:
        new = self.scheduler.schedule(self.now)
        check_scheduler(self.scheduler)
        self.in_flight += new
        return new

    def answer(self, num_tokens: int = 1) -> list[StepBatch]:
        """Answer the oldest message with so many tokens of each row, as far as they are reserved. Returns what is sent
        then.
        """
        first = self.in_flight.pop(0)
        self.now += 0.001
        for step in (first, *first.then):
            most = np.ones_like(step.rows) if step.max_query_lens is None else np.maximum(step.max_query_lens, 1)
            rows, lens = step.rows[step.sample_mask], np.minimum(num_tokens, most[step.sample_mask]).astype(np.uint32)
            self.scheduler.update(
                StepOutput(
                    step.step_id, rows, np.full(int(lens.sum()), 7, np.uint32), worker_id="w0", token_lens=lens,
                    draft_lens=np.array(self.wanted, np.uint32)[rows],
                ),
                self.now,
            )  # fmt: skip
            check_scheduler(self.scheduler)
        return self.send()


def most_of(step: StepBatch) -> dict[int, int]:
    most = np.zeros_like(step.rows) if step.max_query_lens is None else step.max_query_lens
    return dict(zip(step.rows.tolist(), most.tolist(), strict=True))


def test_a_step_has_room_for_the_drafts_that_a_row_wants() -> None:
    driver = Driver()
    driver.answer()
    driver.wanted = [3, 0]
    driver.answer()
    (step,) = driver.answer()
    assert most_of(step) == {0: 4, 1: 0}
    assert driver.speculating == [0]


def test_rows_whose_drafts_end_are_sent_as_others_and_join_the_run_with_the_last_one() -> None:
    driver = Driver()
    driver.wanted = [3, 3]
    for _ in range(3):
        driver.answer()
    driver.wanted = [0, 3]
    for _ in range(3):
        driver.answer()
    (step,) = driver.answer()
    assert most_of(step) == {0: 0, 1: 4}
    assert driver.speculating == [0, 1]
    driver.wanted = [0, 0]
    for _ in range(3):
        driver.answer()
    assert driver.speculating == []
    assert driver.in_flight[-1].is_decode


def test_rows_without_drafts_use_the_blocks_that_were_taken_for_drafts_and_have_bursts() -> None:
    driver = Driver()
    driver.wanted = [3, 3]
    for _ in range(3):
        driver.answer()
    r, num_used = driver.worker.rows, driver.worker.pool.num_used
    assert (r.num_blocks[:2] * 4 - r.num_computed_tokens[:2] >= 4).all(), "blocks after the one that they write to"
    driver.wanted = [0, 0]
    while not driver.in_flight[-1].then:
        driver.answer()
    assert driver.worker.pool.num_used == num_used
    while driver.scheduler.has_work:
        (message,) = driver.in_flight[:1]
        for step in (message, *message.then):
            slots = [
                r.table[row, end // 4] * 4 + end % 4
                for row, end in zip(step.rows.tolist(), step.context_lens.tolist(), strict=True)
            ]
            assert step.slot_mapping.tolist() == slots
        driver.answer()


def test_no_row_takes_blocks_for_drafts_while_the_pool_has_fewer_than_rows() -> None:
    driver = Driver(num_blocks=30)  # one row ends with 27
    driver.wanted = [3, 3]
    shortest, num_drafts = 30, 0
    while driver.scheduler.has_work:
        num_free = driver.worker.pool.num_free
        for step in driver.answer():
            num_drafts += sum(max(most - 1, 0) for most in most_of(step).values())
            if num_free < 2:
                assert max(most_of(step).values()) <= 1, "no drafts, at positions that may be unknown"
        shortest = min(shortest, num_free)
    assert shortest < 2
    assert num_drafts > 20
