"""Bugs that the simulation of the whole system found, each as the shortest story that shows it."""

from __future__ import annotations

from array import array

from quire.v1 import scheduler_pb2, types_pb2

from gateway_svc.scheduler_request import SchedulerRequest


class Deaf:
    """A scheduler that takes cancels and never answers."""

    def cancel(self, request: SchedulerRequest, sample_index: int | None, reason: int) -> bool:
        return True

    def release(self, request: SchedulerRequest) -> None:
        """Nothing is left to do."""


async def test_an_aborted_request_is_not_begun_again_elsewhere() -> None:
    """Its cancel was lost with the scheduler; the next one ran it to its end, for nobody."""
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
