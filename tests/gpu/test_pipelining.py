"""The worker's shell over a pipelined runner: a step is launched before the previous one is answered."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from quire.internal.v1 import worker_pb2

from step_protocol.columns import EMPTY
from step_protocol.messages import BadBatchError, StepOutput
from worker_svc.engine.runner import Runner
from worker_svc.steps.executor import StepExecutor

EPOCH = 9


class SlowDevice(Runner):
    """Launches immediately; a step finishes when the test says so."""

    info = None
    launches = True

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.done: dict[int, threading.Event] = {}
        self.has_launched = threading.Semaphore(0)
        self.fault: Exception | None = None

    def launch(self, batch):
        if batch.step_id == 99:
            raise BadBatchError("no")
        self.launched.append(batch.step_id)
        self.done[batch.step_id] = threading.Event()
        self.has_launched.release()
        device = self

        class Launched:
            def result(self) -> StepOutput:
                device.done[batch.step_id].wait(10)
                if device.fault is not None:
                    raise device.fault
                return StepOutput(batch.step_id, EMPTY, np.array([], np.uint32), [], 1)

        return Launched()

    def execute(self, batch):
        return self.launch(batch).result()

    def committed_blocks(self):
        return []

    def reset_rows(self) -> None: ...

    def rows_used(self) -> int:
        return 0


@pytest.fixture
async def executor():
    fatal: list[BaseException] = []
    executor = StepExecutor(worker_epoch=EPOCH, on_fatal=fatal.append)
    executor.fatal = fatal
    device = SlowDevice()
    await executor.load(lambda: device)
    executor.device = device
    yield executor
    for done in device.done.values():
        done.set()
    executor.close()


def step(lease, step_id):
    return worker_pb2.StepBatch(fence=lease.fence, step_id=step_id)


async def launched(device, count):
    for _ in range(count):
        assert await asyncio.to_thread(device.has_launched.acquire, True, 10)


async def test_a_step_starts_before_the_previous_one_is_answered(executor):
    lease, seen = executor.lease(1, "scheduler"), []
    executor.on_step = lambda batch, epoch, tags: seen.append(batch.step_id)
    [first], [second] = executor.submit([step(lease, 1)]), executor.submit([step(lease, 2)])
    await launched(executor.device, 2)
    assert executor.device.launched == [1, 2]
    assert executor.num_in_flight == 2
    executor.device.done[2].set()
    executor.device.done[1].set()
    assert [(await answer).step_id for answer in (first, second)] == [1, 2]
    await asyncio.sleep(0)  # callbacks of the answers
    assert executor.num_in_flight == 0
    [kept] = executor.submit([step(lease, 2)])
    assert kept.result().step_id == 2  # not run again
    assert seen == [1, 2]


async def test_a_fault_that_is_reported_late_is_fatal(executor):
    lease = executor.lease(1, "scheduler")
    [answer] = executor.submit([step(lease, 1)])
    await launched(executor.device, 1)
    executor.device.fault = RuntimeError("an illegal memory access was encountered")
    executor.device.done[1].set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await answer
    assert executor.fatal == [executor.device.fault]
