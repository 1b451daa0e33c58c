"""Generate over real gRPC with a fake scheduler."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.schedulers import attach_stream
from tests.unit.gateway.fakes import (
    ABORTED,
    EOS,
    LENGTH,
    STOP,
    FakeScheduler,
    TestGateway,
    digest_of,
    refused,
    rest,
    until,
)
from tests.unit.gateway.tokenizer_kinds import byte_level

TOKENIZER = byte_level()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


async def test_a_stream_has_accepted_chunks_and_finished(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    ids = encode("Hello wörld 😀")
    scheduler.play(ids)
    result = await gateway.collect(request_id="r.1", sampling=types.SamplingParams(seed=7))
    assert (result.accepted.request_id, result.accepted.seed, result.accepted.model) == ("r.1", 7, "demo")
    assert result.accepted.prompt_tokens == 3
    assert (result.ids(), result.text()) == (ids, "Hello wörld 😀")
    result.check_offsets()
    finished = result.finished[0]
    assert (finished.reason, finished.output_digest) == (LENGTH, digest_of(ids))
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (3, len(ids))
    assert (finished.usage.cached_tokens, finished.usage.recomputed_tokens) == (3, 2)


async def test_the_scheduler_gets_all_defaults(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([9])
    result = await gateway.collect(stop=types.StopParams(stop=["x"], stop_token_ids=[4], ignore_eos=True))
    submit = scheduler.submits[0]
    assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.n) == (1, 1, 1)
    assert submit.sampling.seed == result.accepted.seed
    assert submit.stop == types.StopParams(max_tokens=253, stop_token_ids=[4], ignore_eos=True)
    assert submit.request_id == result.accepted.request_id != ""
    assert submit.prompt_token_ids == b"\x05\0\0\0\x06\0\0\0\x07\0\0\0"


async def test_text_and_chat_prompts_are_tokenized(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([9])
    await gateway.collect(prompt=pb.Prompt(text="Hello world"))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello world")])
    await gateway.collect(prompt=pb.Prompt(chat=chat))
    assert scheduler.submits[0].prompt_token_ids == scheduler.submits[1].prompt_token_ids
    assert len(scheduler.submits[0].prompt_token_ids) == 4 * len(encode("Hello world"))


async def test_each_sample_has_its_own_stream(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    ids = encode("abc def")
    scheduler.play(ids)
    result = await gateway.collect(sampling=types.SamplingParams(n=3))
    assert sorted(result.finished) == [0, 1, 2]
    for index in range(3):
        assert (result.ids(index), result.text(index)) == (ids, "abc def")
        result.check_offsets(index)


async def test_an_end_token_stays_in_ids_and_out_of_text(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    ids = [*encode("done"), 1]
    scheduler.play(ids, EOS)
    result = await gateway.collect(output=pb.OutputParams(skip_special_tokens=False))
    assert (result.ids(), result.text(), result.finished[0].reason) == (ids, "done", EOS)


async def test_the_matched_stop_token_is_reported(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    ids = encode("one.")
    scheduler.on_submit = lambda submit: scheduler.finish(submit.handle, STOP, ids=ids, stop_token_id=ids[-1])
    result = await gateway.collect(stop=types.StopParams(stop_token_ids=[ids[-1]]))
    assert (result.ids(), result.text()) == (ids, TOKENIZER.decode(ids[:-1]))
    assert result.finished[0].stop_token_id == ids[-1]


@pytest.mark.parametrize(("include", "text"), [(False, "Hello "), (True, "Hello END")])
async def test_a_stop_string_across_tokens(
    gateway: TestGateway, scheduler: FakeScheduler, include: bool, text: str
) -> None:
    ids = [id_ for char in "Hello END of it" for id_ in encode(char)]

    def on_submit(submit: scheduler_pb2.Submit) -> None:
        for position, id_ in enumerate(ids):
            scheduler.send(submit.handle, [id_], offset=position)

    scheduler.on_submit = on_submit
    result = await gateway.collect(stop=types.StopParams(stop=["END"], include_stop_in_output=include))
    finished = result.finished[0]
    assert (result.text(), result.ids()) == (text, ids[:9])
    assert (finished.reason, finished.stop, finished.usage.output_tokens) == (STOP, "END", 9)
    assert finished.output_digest == digest_of(ids[:9])
    assert finished.usage.cached_tokens == 3
    cancel = scheduler.cancels[0]
    assert (cancel.sample_index, cancel.HasField("sample_index"), cancel.reason) == (0, True, STOP)


async def test_a_stop_string_in_the_last_delta_needs_no_cancel(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([id_ for char in "ab END cd" for id_ in encode(char)])
    result = await gateway.collect(stop=types.StopParams(stop=["END"]))
    assert (result.text(), len(result.ids()), result.finished[0].stop) == ("ab ", 6, "END")
    assert scheduler.cancels == []


async def test_stop_strings_work_without_text_output(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([id_ for char in "ab END cd" for id_ in encode(char)])
    result = await gateway.collect(stop=types.StopParams(stop=["END"]), output=pb.OutputParams(text=False))
    assert (result.text(), len(result.ids()), result.finished[0].stop) == ("", 6, "END")


async def test_text_held_back_is_released_at_the_end(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(encode("half EN"))
    result = await gateway.collect(stop=types.StopParams(stop=["END"]))
    assert (result.text(), result.finished[0].reason) == ("half EN", LENGTH)
    result.check_offsets()


@pytest.mark.parametrize("wants", ["text", "token_ids"])
async def test_only_the_requested_outputs_are_sent(gateway: TestGateway, scheduler: FakeScheduler, wants: str) -> None:
    ids = encode("Hello")
    scheduler.play(ids)
    output = pb.OutputParams(text=wants == "text", token_ids=wants == "token_ids")
    result = await gateway.collect(output=output)
    assert (result.text(), result.ids()) == (("Hello", []) if wants == "text" else ("", ids))
    assert result.finished[0].output_digest == digest_of(ids)


async def test_max_tokens_zero(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play([])
    result = await gateway.collect(stop=types.StopParams(max_tokens=0))
    assert (result.ids(), result.finished[0].reason, scheduler.submits[0].stop.max_tokens) == ([], LENGTH, 0)
    assert scheduler.submits[0].stop.HasField("max_tokens")


async def test_a_cancelled_call_releases_its_request(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    scheduler.send(scheduler.submits[0].handle, [9])
    await call.read()
    call.cancel()
    await until(lambda: scheduler.cancels)
    assert (scheduler.cancels[0].reason, scheduler.cancels[0].HasField("sample_index")) == (ABORTED, False)
    await until(lambda: gateway.num_open == 0)
    assert not gateway.dispatcher.num_open


async def test_an_expired_deadline_releases_its_request(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(tokens=types.TokenIds(ids=[5])))
    error = await refused(gateway.stub.Generate(request, timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: scheduler.cancels)
    await until(lambda: gateway.num_open == 0)


async def test_a_stalled_client_gets_merged_chunks_and_uses_no_more_memory(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    call = gateway.generate(stop=types.StopParams(max_tokens=200, stop=["never"]))
    events = [await call.read()]
    handle = scheduler.submits[0].handle
    request = gateway.clients[0].stream._by_handle[handle]
    ids = [100 + i for i in range(200)]
    for position in range(200):
        scheduler.send(handle, [ids[position]], offset=position)
    await until(lambda: len(request.samples[0].outputs) == 200)
    scheduler.finish(handle)
    events += await rest(call)
    assert [id_ for event in events for id_ in event.chunk.token_ids] == ids


async def test_repeated_tokens_are_dropped(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    handle = scheduler.submits[0].handle
    scheduler.send(handle, [10, 11])
    scheduler.send(handle, [11, 12], offset=1)
    scheduler.finish(handle)
    ids = [id_ for event in await rest(call) for id_ in event.chunk.token_ids]
    assert ids == [10, 11, 12]


async def test_a_gap_is_an_internal_error_and_cancels(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    scheduler.send(scheduler.submits[0].handle, [10], offset=1)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "expected 0" in error.details()
    await until(lambda: scheduler.cancels)


async def test_abort_reaches_requests_of_other_gateways_through_the_schedulers(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    scheduler.elsewhere = {"of-another-gateway"}
    call = gateway.generate(request_id="mine")
    await call.read()
    response = await gateway.stub.Abort(pb.AbortRequest(request_ids=["unknown", "of-another-gateway", "mine"]))
    assert response.aborted_ids == ["of-another-gateway", "mine"]
    assert response.unknown_ids == ["unknown"]
    assert scheduler.asked_to_abort == ["unknown", "of-another-gateway"]
    await rest(call)


async def test_abort_ends_the_stream_with_aborted(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(request_id="victim", sampling=types.SamplingParams(n=2))
    await call.read()
    response = await gateway.stub.Abort(pb.AbortRequest(request_ids=["victim", "victim", "unknown"]))
    assert (response.aborted_ids, response.unknown_ids) == (["victim"], ["unknown"])
    reasons = [event.finished.reason for event in await rest(call)]
    assert reasons == [ABORTED, ABORTED]


async def test_one_request_id_at_a_time(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    first = gateway.generate(request_id="same")
    await first.read()
    error = await refused(gateway.generate(request_id="same"))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    scheduler.play([9])
    first.cancel()
    await until(lambda: gateway.num_open == 0)
    assert (await gateway.collect(request_id="same")).ids() == [9]


async def test_more_than_max_streams_are_refused_with_a_retry_delay(scheduler: FakeScheduler) -> None:
    async with TestGateway([scheduler.address], max_streams=1) as gateway:
        await gateway.ready()
        first = gateway.generate()
        await first.read()
        error = await refused(gateway.generate())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.trailing_metadata()["grpc-retry-pushback-ms"] == "1000"
        first.cancel()


async def test_a_refusal_keeps_code_message_and_retry_delay(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    refusal = scheduler_pb2.Refusal(code=8, message="queue is full", retry_after_ms=250, field="")
    scheduler.refusals.append(refusal)
    error = await refused(gateway.generate())
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
    assert error.trailing_metadata()["grpc-retry-pushback-ms"] == "250"


async def test_a_failed_sample_reports_the_cause(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.on_submit = lambda submit: scheduler.finish(
        submit.handle, types.FINISH_REASON_ERROR, message="NaN in logits", preemptions=2
    )
    finished = (await gateway.collect()).finished[0]
    assert (finished.reason, finished.message, finished.preemptions) == (types.FINISH_REASON_ERROR, "NaN in logits", 2)


async def test_draining_lets_open_streams_finish(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    drain = asyncio.create_task(gateway.streams.drain(10))
    await until(lambda: gateway.streams._is_draining)
    error = await refused(gateway.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    handle = scheduler.submits[0].handle
    scheduler.send(handle, [9])
    scheduler.finish(handle)
    assert [event.finished.reason for event in await rest(call)][-1] == LENGTH
    await drain


async def test_draining_ends_open_streams_at_the_timeout(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    await gateway.streams.drain(0.01)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "resume on another gateway" in error.details()


async def test_a_scheduler_may_report_queued_requests_with_deltas(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    scheduler.reports_queued_handles = True
    scheduler.play(encode("done"))
    results = await asyncio.gather(*(gateway.collect() for _ in range(5)))
    assert [result.text() for result in results] == ["done"] * 5


async def test_messages_that_wait_for_the_stream_are_sent_as_one_batch(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    scheduler.takes_batches = True
    scheduler.welcome()
    client = gateway.clients[0]
    await until(lambda: client.stream.takes_batches)
    scheduler.play(encode("done"))
    heartbeats = [scheduler_pb2.AttachRequest(heartbeat=scheduler_pb2.GatewayHeartbeat()) for _ in range(3)]
    for message in heartbeats:
        client.stream._send(message)
    result = await gateway.collect()
    assert result.text() == "done"
    assert scheduler.num_heartbeats == 3
    assert scheduler.batch_sizes[:1] == [3]


def test_a_batch_is_not_much_larger_than_its_last_message() -> None:
    submit = scheduler_pb2.Submit(prompt_token_ids=bytes(attach_stream.BATCH_BYTES // 2))
    batches = list(attach_stream.batches_of([scheduler_pb2.AttachRequest(submit=submit)] * 5))
    assert [len(batch.batch.messages) for batch in batches] == [2, 2, 0]
    assert batches[-1].submit == submit
