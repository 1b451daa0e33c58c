"""Generate over real gRPC with a fake scheduler."""

from __future__ import annotations

import grpc
import pytest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.schedulers import attach_stream
from tests.unit.gateway.fakes import (
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


async def test_an_end_token_stays_in_ids_and_out_of_text(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    ids = [*encode("done"), 1]
    scheduler.play(ids, EOS)
    result = await gateway.collect(output=pb.OutputParams(skip_special_tokens=False))
    assert (result.ids(), result.text(), result.finished[0].reason) == (ids, "done", EOS)


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


async def test_draining_ends_open_streams_at_the_timeout(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    await gateway.streams.drain(0.01)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "resume on another gateway" in error.details()


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


async def test_times_count_only_before_the_lowest_priority(scheduler: FakeScheduler, gateway: TestGateway) -> None:
    """Lines of batches wait for all others, so their times say nothing about the service."""
    scheduler.play([5, 6, 7])
    for priority in (999, 1000):
        assert (await gateway.collect(scheduling={"priority": priority})).ids() == [5, 6, 7]
    times = gateway.streams.metrics.models["demo"]
    assert [sum(each.counts) for each in (times.ttft, times.e2e, times.per_token, times.generation)] == [1, 1, 1, 2]
    assert sum(times.itl.counts) <= 2
    assert times.output_tokens == 6
