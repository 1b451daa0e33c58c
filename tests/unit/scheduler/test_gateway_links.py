"""Gateways: outboxes that merge messages and stay bounded, streams over real gRPC, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop
from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2

from scheduler_svc.core.messages import Deltas
from scheduler_svc.gateways import streams as gateway_links
from scheduler_svc.gateways.streams import Outbox
from svc_common.errors import OverloadedError
from tests.unit.scheduler.conftest import MakeStack
from tests.unit.scheduler.fakes import settle, until
from tests.unit.scheduler.toy_worker import expected_tokens, make_submit


def deltas(offset: int, count: int = 1) -> Deltas:
    ones = np.ones(count, dtype=np.uint32)
    return Deltas(ones * 0, ones, ones * 0, np.arange(offset, offset + count, dtype=np.uint32), ones * 9)


async def test_outbox_merges_unread_deltas() -> None:
    outbox = Outbox("g")
    outbox.deliver(deltas(0))
    outbox.reply(1, None)
    outbox.welcome(scheduler_pb2.Welcome(ready_workers=1))
    for offset in range(1, 50):
        outbox.deliver(deltas(offset))
        outbox.welcome(scheduler_pb2.Welcome(ready_workers=2))
    outbox.close()
    messages = [message async for message in outbox.messages()]
    assert [message.WhichOneof("message") for message in messages] == ["welcome", "submit_reply", "deltas"]
    assert messages[0].welcome.ready_workers == 2
    assert np.frombuffer(messages[2].deltas.offsets, dtype="<u4").tolist() == list(range(50))
    assert messages[2].deltas.sample_indices == b""


def offsets_of(message: scheduler_pb2.AttachResponse) -> list[int]:
    return [int(offset) for offset in np.frombuffer(message.deltas.offsets, dtype="<u4")]


async def test_outbox_keeps_further_tokens_for_an_interval() -> None:
    outbox = Outbox("g", interval_s=0.05)
    messages, loop = outbox.messages(), asyncio.get_running_loop()
    started = loop.time()
    outbox.deliver(deltas(1))
    assert offsets_of(await anext(messages)) == [1]  # the interval has passed: sent at once
    outbox.deliver(deltas(2))
    outbox.deliver(deltas(3))
    assert offsets_of(await anext(messages)) == [2, 3]
    assert loop.time() - started > 0.049


def test_an_interval_may_end_in_less_than_a_millisecond() -> None:
    """uvloop, the loop of the services, then runs the call at once, and its handle has no time."""

    async def run() -> None:
        outbox = Outbox("g", interval_s=0.0003)
        for offset in range(3):
            outbox.deliver(deltas(offset))
        assert offsets_of(await anext(outbox.messages())) == [0, 1, 2]

    uvloop.run(run())


async def test_a_first_token_begins_the_interval() -> None:
    outbox = Outbox("g", interval_s=0.05)
    messages, loop = outbox.messages(), asyncio.get_running_loop()
    started = loop.time()
    outbox.deliver(deltas(0))
    assert offsets_of(await anext(messages)) == [0]
    outbox.deliver(deltas(1))
    outbox.deliver(deltas(2))
    assert offsets_of(await anext(messages)) == [1, 2]
    assert loop.time() - started > 0.049


async def test_outbox_sends_first_tokens_and_ends_at_once() -> None:
    outbox = Outbox("g", interval_s=1000.0)
    messages = outbox.messages()
    outbox.deliver(deltas(1))
    await anext(messages)
    outbox.deliver(deltas(2))
    outbox.deliver(deltas(0))
    assert offsets_of(await anext(messages)) == [2, 0]  # waiting tokens are sent along, in order
    reader = asyncio.ensure_future(anext(messages, None))
    outbox.deliver(deltas(3))
    await settle()
    assert not reader.done()
    outbox.close()
    assert offsets_of(await reader) == [3]


def queued_in(message: scheduler_pb2.AttachResponse) -> list[int]:
    return [int(handle) for handle in np.frombuffer(message.deltas.queued_handles, dtype="<u4")]


async def test_outbox_reports_queued_requests_with_the_next_tokens() -> None:
    outbox = Outbox("g", takes_queued_handles=True)
    messages = outbox.messages()
    outbox.reply(4, None)
    outbox.reply(5, None)
    outbox.reply(6, OverloadedError("full"))
    outbox.deliver(deltas(0))
    refused, told = await anext(messages), await anext(messages)
    assert refused.submit_reply.handle == 6
    assert (queued_in(told), offsets_of(told)) == ([4, 5], [0])
    outbox.deliver(deltas(1))
    assert queued_in(await anext(messages)) == []


async def test_outbox_reports_queued_requests_soon_without_tokens() -> None:
    outbox = Outbox("g", interval_s=1000.0, takes_queued_handles=True)
    outbox.reply(4, None)
    async with asyncio.timeout(60.0):
        message = await anext(outbox.messages())
    assert (queued_in(message), offsets_of(message)) == ([4], [])


async def test_outbox_bounds_queued_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_links, "MAX_PENDING_REPLIES", 10)
    outbox = Outbox("g", takes_queued_handles=True)
    for handle in range(11):
        outbox.reply(handle, None)
    with pytest.raises(OverloadedError, match="11 unread replies"):
        await anext(outbox.messages())


async def test_a_batch_has_the_effect_of_its_messages(make_stack: MakeStack) -> None:
    stack = await make_stack()
    await stack.worker()
    gateway = await stack.gateway()
    await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers)
    assert gateway.welcomes[-1].takes_batches
    submits = [scheduler_pb2.AttachRequest(submit=make_submit(handle, [handle], max_tokens=20)) for handle in (1, 2)]
    cancel = scheduler_pb2.AttachRequest(cancel=scheduler_pb2.Cancel(handle=2))
    batch = scheduler_pb2.AttachBatch(messages=[*submits, cancel])
    await gateway.call.write(scheduler_pb2.AttachRequest(batch=batch))
    await until(lambda: len(gateway.finished) == 2)
    assert gateway.tokens[1, 0] == expected_tokens([1], 20)
    assert gateway.finished[2, 0].reason == types_pb2.FINISH_REASON_ABORTED


async def test_a_batch_in_a_batch_is_refused(make_stack: MakeStack) -> None:
    stack = await make_stack()
    gateway = await stack.gateway()
    await until(lambda: gateway.welcomes)
    inner = scheduler_pb2.AttachRequest(batch=scheduler_pb2.AttachBatch())
    outer = scheduler_pb2.AttachBatch(messages=[inner])
    await gateway.call.write(scheduler_pb2.AttachRequest(batch=outer))
    await until(lambda: gateway.error is not None)
    assert gateway.error is not None
    assert gateway.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_outbox_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_links, "MAX_PENDING_TOKENS", 100)
    outbox = Outbox("g")
    for offset in range(0, 1000, 10):
        outbox.deliver(deltas(offset, 10))
        assert outbox.num_pending_tokens <= 100
    with pytest.raises(OverloadedError, match="110 unread tokens"):
        await anext(outbox.messages())


async def test_a_gateway_that_stops_reading_does_not_stall_others(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_links, "MAX_PENDING_TOKENS", 500)
    stack = await make_stack()
    await stack.worker(max_model_len=20_000)
    slow = await stack.gateway()
    await until(lambda: slow.welcomes)
    (outbox,) = stack.parts.gateways._outboxes.values()
    good = await stack.gateway()
    await until(lambda: good.welcomes and good.welcomes[-1].ready_workers)
    taken = outbox._take
    outbox._take = lambda: None  # type: ignore[method-assign]  # as if the stream's write never returned
    await slow.submit(1, [1, 2, 3], max_tokens=200)
    await slow.submit(2, [1, 2, 4], max_tokens=200)
    await slow.submit(3, [1, 2, 5], max_tokens=200)
    await good.submit(1, [1, 2, 3], max_tokens=200, request_id="good")
    await until(lambda: (1, 0) in good.finished, 30)
    assert good.tokens[1, 0] == expected_tokens([1, 2, 3], 200)
    await until(lambda: outbox._error is not None)
    outbox._take = taken  # type: ignore[method-assign]
    await until(lambda: slow.error is not None)
    assert slow.error is not None
    assert slow.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: not stack.parts.step_loop.has_work)


async def test_a_slow_gateway_gets_fewer_larger_messages(make_stack: MakeStack) -> None:
    stack = await make_stack()
    worker = await stack.worker()
    gateway = await stack.gateway()
    await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers)
    outbox = next(iter(stack.parts.gateways._outboxes.values()))
    taken, outbox._take = outbox._take, lambda: None  # type: ignore[method-assign]
    await gateway.submit(1, [1, 2, 3], max_tokens=100)
    await until(lambda: outbox.num_pending_tokens == 100)
    before = gateway.num_messages
    outbox._take = taken  # type: ignore[method-assign]
    outbox.reply(77, None)
    await until(lambda: (1, 0) in gateway.finished)
    assert gateway.tokens[1, 0] == expected_tokens([1, 2, 3], 100)
    assert gateway.num_messages - before == 3
    assert worker.steps >= 100


async def test_invalid_submits_are_refused_without_ending_the_stream(make_stack: MakeStack) -> None:
    stack = await make_stack()
    worker = await stack.worker()
    gateway = await stack.gateway()
    await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers)
    worker.gate.clear()
    await gateway.submit(1, [1], request_id="taken")
    await gateway.submit(1, [1], request_id="same handle")
    await gateway.submit(2, [1], request_id="taken")
    await gateway.submit(3, [])
    await gateway.submit(5, [1], n=9)
    await gateway.submit(6, [1] * 10, max_tokens=250)
    odd = make_submit(7, [1])
    odd.prompt_token_ids = b"12345"
    await gateway.call.write(scheduler_pb2.AttachRequest(submit=odd))
    await until(lambda: len(gateway.replies) == 6)
    codes = {handle: refusal.code for handle, refusal in gateway.replies.items() if refusal is not None}
    exists, invalid = grpc.StatusCode.ALREADY_EXISTS.value[0], grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert codes == {1: exists, 2: exists, 3: invalid, 5: invalid, 6: invalid, 7: invalid}
    worker.gate.set()
    await until(lambda: (1, 0) in gateway.finished)
    assert gateway.tokens[1, 0] == expected_tokens([1], 8)


async def test_a_full_queue_says_when_to_retry(make_stack: MakeStack) -> None:
    stack = await make_stack("--max-waiting", "1")
    worker = await stack.worker()
    gateway = await stack.gateway()
    await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers)
    worker.gate.clear()
    for handle in range(12):
        await gateway.submit(handle, [handle + 1])
        await until(lambda: len(gateway.replies) == handle + 1)  # noqa: B023
    refusals = [refusal for refusal in gateway.replies.values() if refusal is not None]
    assert refusals
    assert {refusal.code for refusal in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
    assert all(refusal.retry_after_ms >= 100 for refusal in refusals)
    worker.gate.set()


@pytest.mark.parametrize(
    "message",
    [
        scheduler_pb2.AttachRequest(submit=make_submit(1, [1])),
        scheduler_pb2.AttachRequest(hello=scheduler_pb2.Hello(gateway_id="g", protocol_version=99)),
        scheduler_pb2.AttachRequest(),
    ],
)
async def test_a_stream_must_start_with_hello(make_stack: MakeStack, message: scheduler_pb2.AttachRequest) -> None:
    stack = await make_stack()
    gateway = await stack.gateway()
    call = gateway.stub.Attach()
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in (caught.value.details() or "")


async def test_a_protocol_error_ends_only_the_stream_of_its_gateway(make_stack: MakeStack) -> None:
    stack = await make_stack()
    await stack.worker()
    bad, good = await stack.gateway(), await stack.gateway()
    await until(lambda: good.welcomes and good.welcomes[-1].ready_workers)
    await bad.submit(1, [1, 2], max_tokens=200)
    await good.submit(1, [1, 2], max_tokens=50, request_id="good")
    await bad.hello()
    await until(lambda: bad.error is not None)
    assert bad.error is not None
    assert bad.error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in (bad.error.details() or "")
    await until(lambda: (1, 0) in good.finished)
    assert good.tokens[1, 0] == expected_tokens([1, 2], 50)
    await until(lambda: not stack.parts.step_loop.has_work)


async def read_to_end(call: Any) -> None:
    async for _ in call:
        pass


async def test_an_undecodable_message_ends_the_stream_without_a_traceback(
    make_stack: MakeStack, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await make_stack()
    gateway = await stack.gateway()
    call = gateway._channel.stream_stream("/quire.internal.v1.SchedulerService/Attach")()
    hello = scheduler_pb2.Hello(gateway_id="g", protocol_version=1)
    await call.write(scheduler_pb2.AttachRequest(hello=hello).SerializeToString())
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError, match="not a valid protobuf message") as caught:
        await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text


async def test_heartbeats_contain_the_load(make_stack: MakeStack) -> None:
    stack = await make_stack("--gateway-heartbeat-s", "0.05")
    worker, gateway = await stack.worker(), await stack.gateway()
    await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers)
    assert gateway.welcomes[-1].heartbeat_interval_s == pytest.approx(0.05)
    worker.gate.clear()
    for handle in range(12):
        await gateway.submit(handle, [handle + 1] * 40, max_tokens=4)
    await until(lambda: len(gateway.replies) == 12)
    num_before = len(gateway.heartbeats)  # some of these may have been sent before all requests had arrived
    await until(lambda: len(gateway.heartbeats) > num_before + 1)
    beat = gateway.heartbeats[-1]
    assert beat.num_waiting + beat.num_running == 12
    assert beat.num_waiting
    assert 40 * beat.num_waiting <= beat.pending_tokens <= 40 * 12
    assert beat.ready_workers == 1
    worker.gate.set()
    await until(lambda: not gateway.heartbeats[-1].pending_tokens)
    assert gateway.error is None  # it never sent a heartbeat, so none is expected


async def test_a_frozen_gateway_frees_its_rows_even_if_its_stream_is_stuck(make_stack: MakeStack) -> None:
    stack = await make_stack("--gateway-heartbeat-s", "0.02")
    await stack.worker()
    gateway = await stack.gateway()
    await until(lambda: gateway.welcomes and gateway.welcomes[-1].ready_workers)
    [outbox] = stack.parts.gateways._outboxes.values()
    outbox._take = lambda: None  # type: ignore[method-assign]  # as if the stream's write never returned
    await gateway.heartbeat()
    await gateway.submit(1, [1, 2, 3], max_tokens=200)
    await until(lambda: stack.parts.step_loop.has_work)
    await until(lambda: not stack.parts.step_loop._gateways)
    await until(lambda: not stack.parts.step_loop.has_work)
