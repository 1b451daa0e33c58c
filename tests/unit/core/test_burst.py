"""Short decode steps share a message; other events end the burst, not the rows."""

import numpy as np
import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from step_protocol.messages import StepBatch, StepOutput
from tests.invariants import check_scheduler

STEP_S = 0.001
PROMPT_LEN = 3


class Driver:
    """A scheduler with one worker that takes STEP_S for a step, and samples row + 500."""

    def __init__(self, burst_s: float, depth: int = 1, num_blocks: int = 256, max_num_seqs: int = 2) -> None:
        self.scheduler = Scheduler(SchedulerConfig(burst_s=burst_s, eos_token_ids=frozenset({9})))
        self.scheduler.add_worker(WorkerCapacity("w", 1, num_blocks, 4, max_num_seqs, 64, 512, depth))
        self.now = 0.0
        self.in_flight: list[StepBatch] = []  # one for each message

    def add(self, request_id: str, max_tokens: int = 200) -> None:
        prompt = np.arange(10, 10 + PROMPT_LEN, dtype=np.uint32)
        self.scheduler.add_group(SequenceGroup(request_id, prompt, StopCondition(max_tokens)), self.now)

    def schedule(self) -> None:
        self.in_flight += self.scheduler.schedule(self.now)
        check_scheduler(self.scheduler)

    def answer(self, token: int = 500) -> list[Deltas]:
        """The oldest message is answered, then what can be sent is sent."""
        first = self.in_flight.pop(0)
        steps = [first, *first.then]
        self.now += STEP_S * len(steps)
        deltas = []
        for step in steps:
            rows = step.rows[step.sample_mask]
            tokens = np.full(len(rows), token, np.uint32)
            deltas.append(self.scheduler.update(StepOutput(step.step_id, rows, tokens, worker_id="w"), self.now))
            check_scheduler(self.scheduler)
        self.schedule()
        return deltas

    def warm_up(self, num_answers: int = 3) -> None:
        """Answer steps until the scheduler knows how long a step takes."""
        self.schedule()
        for _ in range(num_answers):
            self.answer()

    @property
    def burst(self) -> list[int]:
        """Context of the first row in each step of the newest message."""
        newest = self.in_flight[-1]
        return [int(step.context_lens[0]) for step in (newest, *newest.then)]


def test_a_message_carries_as_many_steps_as_fit_into_the_time() -> None:
    driver = Driver(burst_s=5.5 * STEP_S)
    driver.add("r")
    driver.warm_up()
    first = driver.burst[0]
    assert driver.burst == list(range(first, first + 5))
    assert [len(deltas.token_ids) for deltas in driver.answer()] == [1] * 5
    assert driver.burst[0] == first + 5


@pytest.mark.parametrize("burst_s", [0.0, 0.9 * STEP_S])
def test_each_step_is_a_message_if_a_step_takes_as_long(burst_s: float) -> None:
    driver = Driver(burst_s)
    driver.add("r")
    driver.warm_up()
    assert len(driver.burst) == 1


def test_the_pipeline_counts_messages() -> None:
    driver = Driver(burst_s=3.5 * STEP_S, depth=2)
    driver.add("r")
    driver.warm_up(8)
    assert [1 + len(message.then) for message in driver.in_flight] == [3, 3]


def test_a_request_with_room_begins_with_the_next_message() -> None:
    driver = Driver(burst_s=4.5 * STEP_S)
    driver.add("r")
    driver.warm_up()
    driver.add("new")
    driver.answer()
    (message,) = driver.in_flight
    assert ([opened.group.request_id for opened in message.opens], message.then) == (["new"], [])


def test_a_request_that_waits_for_a_row_does_not_end_bursts() -> None:
    driver = Driver(burst_s=4.5 * STEP_S, max_num_seqs=1)
    driver.add("r")
    driver.warm_up()
    driver.add("waits")
    driver.answer()
    assert len(driver.burst) == 4


def test_a_burst_longer_than_a_second_is_refused() -> None:
    with pytest.raises(ValueError, match="burst_s"):
        SchedulerConfig(burst_s=1.5)
