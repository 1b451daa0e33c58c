"""Bugs that the simulation of the whole system has found, each as the shortest sequence that shows it."""

from __future__ import annotations

import asyncio
from array import array
from random import Random

from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2

from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from scheduler_svc.core.sequence import StopCondition
from tests.builders import make_capacity
from tests.sim.system.world import Setup, World


class Deaf:
    """A scheduler that accepts cancels and never answers."""

    def cancel(self, request: SchedulerRequest, sample_index: int | None, reason: int) -> bool:
        return True

    def release(self, request: SchedulerRequest) -> None:
        """Does nothing."""


async def test_an_aborted_request_does_not_start_on_another_scheduler() -> None:
    """The cancel was lost with the scheduler, and the next scheduler ran the request to its end without a reader."""
    request = SchedulerRequest(scheduler_pb2.Submit(request_id="r"), [array("I"), array("I")], [False, False])
    request.attach(Deaf())
    request.on_accepted()
    request.abort()
    assert not request.is_over
    request.on_detached()
    assert request.is_over
    assert [sample.finish.reason for sample in request.samples if sample.finish] == 2 * [
        types_pb2.FINISH_REASON_ABORTED
    ]
    request.release()


def test_a_worker_whose_host_dies_during_the_handshake_may_register_again() -> None:
    """The handshake waited for a host that was gone, and the worker id stayed in use meanwhile."""
    world = World(Setup(capacities=(make_capacity("w0"),), num_gateways=1, num_schedulers=1), Random(1))
    request = world.add_request([1, 2, 3], StopCondition(5), n=1, arrives_at=0.0)

    async def die_and_return() -> None:
        worker = world.workers[0]
        while worker.executor._lease is None:  # noqa: ASYNC110 - the moment is the story
            await asyncio.sleep(1e-4)
        worker.kill(is_silent=True)
        await asyncio.sleep(0.5)
        worker.start()

    world.run(die_and_return)
    assert request.ended_at is not None
    assert request.ended_at < 10
