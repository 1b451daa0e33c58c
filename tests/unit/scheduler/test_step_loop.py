"""The step loop with fake links: order, routing, refusals, losses."""

from __future__ import annotations

import pytest

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.refusals import RetryAdvice
from scheduler_svc.step_loop import StepLoop
from step_protocol.messages import StepOutput
from svc_common.errors import AlreadyExistsError, InvalidRequestError, OverloadedError, UnavailableError
from tests.builders import make_group
from tests.unit.core.calls import count_calls
from tests.unit.scheduler.fakes import FakeGateway, FakeWorker, running_loop, settle, until


def submit(loop: StepLoop, owner: int, handle: int, **fields: object) -> None:
    fields.setdefault("request_id", f"r{owner}-{handle}")
    loop.submit(make_group(owner=owner, handle=handle, **fields))  # type: ignore[arg-type]


async def test_refuses_requests_until_a_worker_joins() -> None:
    async with running_loop() as loop:
        gateway = FakeGateway()
        submit(loop, loop.attach(gateway), 1)
        await settle()
        [(handle, error)] = gateway.replies
        assert handle == 1
        assert isinstance(error, UnavailableError)
        assert error.retry_after_s
        assert not loop.has_work


async def test_aborts_by_request_id_for_any_gateway() -> None:
    async with running_loop() as loop:
        one, other, worker = FakeGateway(), FakeGateway(), FakeWorker(loop)
        worker.join()
        submit(loop, loop.attach(one), 1, max_tokens=50, request_id="of-one")
        submit(loop, loop.attach(other), 1, max_tokens=50, request_id="of-other")
        await settle()
        assert await loop.abort(["unknown", "of-other"]) == ["of-other"]
        await settle()
        assert (one.reasons(), other.reasons()) == ({}, {(1, 0): "aborted"})
        assert await loop.abort(["of-one", "of-other"]) == ["of-one"]
        await worker.answer_all()
        assert not loop.has_work


async def test_refusals_name_their_reason_and_affect_no_other_request() -> None:
    async with running_loop(max_waiting=2) as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join(max_num_seqs=1)
        owner = loop.attach(gateway)
        submit(loop, owner, 1)
        await settle()
        submit(loop, owner, 1, request_id="other")
        submit(loop, owner, 2, request_id="r0-1")
        submit(loop, owner, 3, max_tokens=10_000)
        submit(loop, owner, 4)
        submit(loop, owner, 5)
        submit(loop, owner, 6)
        await settle()
        errors = dict(gateway.replies[1:])
        assert isinstance(errors[1], AlreadyExistsError)
        assert errors[1].field == "handle"
        assert isinstance(errors[2], AlreadyExistsError)
        assert errors[2].field == "request_id"
        assert isinstance(errors[3], InvalidRequestError)
        assert errors[4] is errors[5] is None
        assert isinstance(errors[6], OverloadedError)
        assert errors[6].retry_after_s
        assert errors[6].retry_after_s >= 0.1
        await worker.answer_all()
        assert {handle for handle, _ in gateway.reasons()} == {1, 4, 5}


async def test_a_refusal_and_a_drain_build_no_full_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_loop(max_waiting=1) as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join(max_num_seqs=1)
        owner = loop.attach(gateway)
        calls = count_calls(monkeypatch, Scheduler, "stats")
        for handle in range(1, 4):
            submit(loop, owner, handle)
            await settle()
        loop.worker_draining(worker)
        assert isinstance(gateway.replies[2][1], OverloadedError)
        await worker.answer_all()
        assert not calls


async def test_requests_wait_for_a_worker_only_for_a_limited_time() -> None:
    async with running_loop(worker_patience_s=0.05) as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join()
        owner = loop.attach(gateway)
        submit(loop, owner, 1, max_tokens=2)
        await settle()
        loop.worker_lost(worker, "gone")
        submit(loop, owner, 2, max_tokens=2)
        await until(lambda: len(gateway.reasons()) == 2)
        assert gateway.reasons() == {(1, 0): "error", (2, 0): "error"}
        assert "0.05 s" in gateway.delivered[0].finished[0].message
        submit(loop, owner, 3)
        await settle()
        assert isinstance(gateway.replies[2][1], UnavailableError)
        back = FakeWorker(loop, "w0", 2)
        back.join()
        submit(loop, owner, 4, max_tokens=2)
        await back.answer_all()
        assert gateway.tokens(4) == [7, 7]


async def test_an_unschedulable_request_ends_even_if_no_other_fact_arrives() -> None:
    async with running_loop(worker_patience_s=0.05) as loop:
        gateway, big, small = FakeGateway(), FakeWorker(loop), FakeWorker(loop, "small")
        big.join(num_blocks=64)
        owner = loop.attach(gateway)
        submit(loop, owner, 1, prompt=40)
        await settle()
        small.join(num_blocks=4)
        loop.worker_lost(big, "gone")
        await until(lambda: gateway.reasons() == {(1, 0): "error"})
        assert "40 prompt tokens" in gateway.delivered[-1].finished[0].message
        assert not loop.has_work


async def test_overload_and_deadline_refusals_have_a_retry_delay() -> None:
    async with running_loop(max_waiting_tokens=50, expected_output_tokens=8) as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join(max_num_seqs=1)
        owner = loop.attach(gateway)
        submit(loop, owner, 1)
        await settle()
        submit(loop, owner, 2, prompt=40)
        submit(loop, owner, 3, prompt=40)
        submit(loop, owner, 4, prompt=[9], max_tokens=1, timeout_s=0.0, takes_over=True)
        await settle()
        error = dict(gateway.replies)[3]
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s
        await worker.answer_all()
        assert gateway.reasons() == {(1, 0): "length", (2, 0): "length", (4, 0): "aborted"}


async def test_a_new_lease_replaces_the_old_one() -> None:
    async with running_loop() as loop:
        gateway, old, new = FakeGateway(), FakeWorker(loop), FakeWorker(loop)
        old.join()
        submit(loop, loop.attach(gateway), 1, max_tokens=3)
        await settle()
        new.join()
        await settle()
        old.answer(token=99)
        loop.worker_lost(old, "late news")
        await new.answer_all(token=1)
        assert gateway.tokens(1) == [1, 1, 1]
        assert old.closed
        assert new.closed is None


async def test_a_worker_that_answers_another_step_is_dropped() -> None:
    async with running_loop() as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join()
        submit(loop, loop.attach(gateway), 1, max_tokens=2)
        await settle()
        loop.step_answered(worker, StepOutput(77, worker.sent[0].rows, worker.sent[0].rows, worker_id="w0"))
        await settle()
        assert worker.closed
        assert "77" in worker.closed
        assert loop.has_work


async def test_a_draining_worker_is_released_when_it_is_empty() -> None:
    async with running_loop() as loop:
        gateway, leaving, staying = FakeGateway(), FakeWorker(loop), FakeWorker(loop, "w1")
        leaving.join()
        owner = loop.attach(gateway)
        submit(loop, owner, 1, max_tokens=3)
        await settle()
        staying.join()
        loop.worker_draining(leaving)
        submit(loop, owner, 2, max_tokens=2)
        await settle()
        assert leaving.closed is None
        await leaving.answer_all(token=1)
        await staying.answer_all(token=2)
        assert leaving.closed == "drained"
        assert gateway.tokens(1) == [2, 2, 2]
        assert gateway.tokens(2) == [2, 2]


@pytest.mark.parametrize("error", [MemoryError("pool"), RuntimeError("bug")])
async def test_a_worker_that_the_core_fails_to_add_is_closed_and_others_continue(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with running_loop() as loop:
        gateway, good, bad = FakeGateway(), FakeWorker(loop), FakeWorker(loop, "bad")
        good.join()
        await settle()

        def fail(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "add_worker", fail)
            bad.join()
            await settle()
        assert bad.closed is not None
        assert type(error).__name__ in bad.closed
        submit(loop, loop.attach(gateway), 1)
        await good.answer_all()
        assert gateway.reasons() == {(1, 0): "length"}


async def test_without_readers_no_prefix_changes_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, BlockManager, "take_events")
    async with running_loop() as loop:
        worker = FakeWorker(loop)
        worker.join()
        submit(loop, loop.attach(FakeGateway()), 1, prompt=9, max_tokens=1)
        await worker.answer_all()
        assert len(loop.core.cached_prefixes()[0].blocks) == 2
        loop.worker_lost(worker, "gone")
        await settle()
    assert not calls


def test_retry_advice_follows_the_rate_of_ends() -> None:
    advice = RetryAdvice()
    assert advice.seconds(1000, 0.0) == 1.0
    for i in range(11):
        advice.record_end(i * 0.1)
    assert 0.1 <= advice.seconds(30, 1.0) <= 0.2
    assert 2.0 < advice.seconds(900, 1.0) < 4.0
    assert advice.seconds(10**6, 1.0) == 30.0


async def test_changes_of_an_idle_worker_are_sent_without_another_fact() -> None:
    async with running_loop(changes_wait_s=0.05) as loop:
        gateway, worker = FakeGateway(), FakeWorker(loop)
        worker.join()
        submit(loop, loop.attach(gateway), 1, max_tokens=1)
        await worker.answer_all()
        assert gateway.reasons() == {(1, 0): "length"}
        assert len(worker.sent) == 1
        await until(lambda: len(worker.sent) == 2)
        assert len(worker.sent[1].close_rows) == 1
        assert not len(worker.sent[1].rows)


async def test_an_alarm_is_set_again_for_an_earlier_time() -> None:
    async with running_loop(worker_patience_s=60.0, changes_wait_s=0.05) as loop:
        gateway, big, small = FakeGateway(), FakeWorker(loop), FakeWorker(loop, "small")
        big.join(num_blocks=64)
        owner = loop.attach(gateway)
        submit(loop, owner, 1, prompt=40)
        await settle()
        small.join(num_blocks=4)
        loop.worker_lost(big, "gone")  # request 1 waits for a worker, for a minute
        await settle()
        submit(loop, owner, 2, prompt=4, max_tokens=1)
        await small.answer_all()
        await until(lambda: len(small.sent) == 2)
        assert gateway.reasons() == {(2, 0): "length"}
