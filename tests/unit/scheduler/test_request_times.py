"""Times and debug logs of a request in the step loop."""

from __future__ import annotations

import logging

import pytest

from tests.builders import make_group
from tests.unit.scheduler.fakes import FakeGateway, FakeWorker, running_loop, settle


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


async def test_refusals_are_counted_by_code() -> None:
    async with running_loop(max_waiting=1) as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        loop.submit(make_group(owner=loop.attach(gateway), handle=1, request_id="early"))
        worker.join(max_num_seqs=1)
        for handle in range(2, 5):
            loop.submit(make_group(owner=0, handle=handle, request_id=f"r{handle}"))
            await settle()
        loop.submit(make_group(owner=0, handle=9, request_id="long", max_tokens=100_000))
        await settle()
        assert loop.times.refusals == {"UNAVAILABLE": 1, "RESOURCE_EXHAUSTED": 2}


async def test_debug_lines_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="scheduler_svc")
    async with running_loop() as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join()
        loop.submit(make_group(owner=loop.attach(gateway), handle=1, request_id="traced", max_tokens=2))
        await worker.answer_all()
    lines = [(record.getMessage().partition(" after ")[0], record.__dict__["request_id"]) for record in caplog.records]
    assert lines == [
        ("request traced is queued: 10 prompt tokens", "traced"),
        ("request traced: sample 0 ended (length) with 2 tokens", "traced"),
    ]
