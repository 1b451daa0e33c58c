"""Work of a runner that can wait is done while the worker is idle, and not beside steps."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from worker_svc.steps import executor as executors
from worker_svc.steps.executor import StepExecutor


class Idle:
    """A runner with some parts of work."""

    works_when_idle = True

    def __init__(self, parts):
        self.parts, self.done = parts, 0

    def work_when_idle(self):
        if self.parts and isinstance(self.parts[0], Exception):
            raise self.parts.pop(0)
        if not self.parts:
            return False
        self.parts.pop(0)
        self.done += 1
        return True


@pytest.fixture
async def executor(monkeypatch):
    monkeypatch.setattr(executors, "IDLE_S", 0.0)
    failed = Future()
    made = StepExecutor(worker_epoch=1, on_fatal=failed.set_result)
    made.failed = failed
    yield made
    made.close()


def answered(executor, runner):
    """Ends a step."""
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(None)
    executor._runner = runner
    executor._record_answered(answer)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_all_parts_are_done_after_the_last_step(executor):
    runner = Idle([1, 2, 3])
    answered(executor, runner)
    await until(lambda: not runner.parts)
    assert runner.done == 3


async def test_nothing_is_done_while_a_step_is_in_flight(executor):
    runner, step = Idle([1]), asyncio.get_running_loop().create_future()
    executor._in_flight.add(step)
    answered(executor, runner)
    executor._use_idleness(runner)
    await executor._call(lambda: None)  # the model thread has had its turn
    assert runner.done == 0
    executor._in_flight.discard(step)
    answered(executor, runner)
    await until(lambda: runner.done == 1)


async def test_an_error_is_fatal(executor):
    answered(executor, Idle([ValueError("the device is lost")]))
    error = await asyncio.wait_for(asyncio.wrap_future(executor.failed), 30)
    assert str(error) == "the device is lost"
