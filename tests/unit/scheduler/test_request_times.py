"""Times and debug logs of a request in the step loop."""

from __future__ import annotations

from tests.builders import make_group
from tests.unit.scheduler.fakes import FakeGateway, FakeWorker, running_loop


async def test_queue_prefill_and_decode_times_are_observed_once() -> None:
    async with running_loop() as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join()
        owner = loop.attach(gateway)
        loop.submit(make_group(owner=owner, handle=1, request_id="one", max_tokens=1))
        loop.submit(make_group(owner=owner, handle=2, request_id="two", max_tokens=3, n=2))
        await worker.answer_all()
        times = loop.times
        # Forked samples have no queue and prefill times of their own.
        assert [sum(part.counts) for part in (times.queue, times.prefill, times.decode)] == [2, 2, 3]
        assert sum(times.turn.counts) >= 4
        assert not times._first_token_at, "notes of requests that have ended"
        assert times.idle_s > 0


async def test_a_request_taken_over_has_no_first_token() -> None:
    async with running_loop() as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join()
        loop.submit(make_group(owner=loop.attach(gateway), handle=1, outputs=[[5, 6]], max_tokens=4, takes_over=True))
        await worker.answer_all()
        assert gateway.reasons() == {(1, 0): "length"}
        assert sum(loop.times.queue.counts) == sum(loop.times.decode.counts) == 0
