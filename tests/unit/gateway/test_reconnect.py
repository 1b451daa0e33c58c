"""A lost scheduler causes a pause: requests resume with their Continuation, exactly once, or end in bounded time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.models import ServedModel, model_part
from gateway_svc.schedulers import attach_stream, dispatcher
from gateway_svc.text.bundle import ModelText
from svc_common import calls as server_calls
from svc_common.channels import MAX_MESSAGE_BYTES
from tests.unit.gateway.fakes import (
    EOS,
    LENGTH,
    STOP,
    FakeScheduler,
    TestGateway,
    digest_of,
    make_info,
    refused,
    rest,
    until,
)
from tests.unit.gateway.tokenizer_kinds import byte_level

TOKENIZER = byte_level()
NO_MESSAGE = b"\xff\xff\xff"
UNAVAILABLE, RESOURCE_EXHAUSTED, ALREADY_EXISTS, INVALID_ARGUMENT = 14, 8, 6, 3


def encode_chars(text: str) -> list[int]:
    return [id_ for char in text for id_ in TOKENIZER.encode(char, add_special_tokens=False).ids]


async def read_tokens(call: Any, count: int) -> list[pb.GenerateResponse]:
    """Events up to this number of tokens."""
    events: list[pb.GenerateResponse] = []
    while sum(len(event.chunk.token_ids) for event in events) < count:
        events.append(await call.read())
    return events


def ids_of(events: list[pb.GenerateResponse]) -> list[int]:
    return [id_ for event in events for id_ in event.chunk.token_ids]


async def test_finished_samples_are_not_restarted(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(sampling=types.SamplingParams(n=3))
    await call.read()
    handle = scheduler.submits[0].handle
    scheduler.finish(handle, EOS, ids=[10, 1], sample=1)
    scheduler.send(handle, [20], sample=2)
    events = await read_tokens(call, 3)
    scheduler.play([20, 21, 22])
    scheduler.hang_up()
    events += await rest(call)
    continued = {s.index: s for s in scheduler.submits[1].continuation.samples}
    assert sorted(continued) == [1, 2]
    assert continued[1].finished
    ends = {event.finished.index: event.finished for event in events if event.HasField("finished")}
    assert {index: end.reason for index, end in ends.items()} == {0: LENGTH, 1: EOS, 2: LENGTH}
    assert ends[2].output_digest == digest_of([20, 21, 22])


async def test_a_sample_whose_stop_string_matched_ends_without_the_scheduler(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    scheduler.answers_cancels = False
    call = gateway.generate(stop=types.StopParams(stop=["b"]))
    await call.read()
    scheduler.send(scheduler.submits[0].handle, encode_chars("ab"))
    await until(lambda: scheduler.cancels)
    scheduler.hang_up()
    events = await rest(call)
    assert (events[-1].finished.reason, events[-1].finished.stop) == (STOP, "b")
    await until(lambda: scheduler.num_attached == 2)
    assert len(scheduler.submits) == 1


async def test_a_request_fails_when_no_scheduler_returns_in_time(scheduler: FakeScheduler) -> None:
    async with TestGateway([scheduler.address], patience_s=0.3) as gateway:
        await gateway.ready()
        call = gateway.generate()
        await call.read()
        await scheduler.stop()
        error = await refused(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "within 0.3 s" in error.details()
        assert not gateway.dispatcher.num_open


async def held(gateway: TestGateway, scheduler: FakeScheduler, num_calls: int) -> list[Any]:
    """Calls that began while the scheduler was away."""
    await scheduler.stop()
    await until(lambda: not gateway.clients[0].is_connected)
    calls = [gateway.generate() for _ in range(num_calls)]
    await until(lambda: gateway.dispatcher.num_open == num_calls)
    return calls


@pytest.mark.parametrize(("name", "limit"), [("MAX_HELD", 2), ("MAX_HELD_BYTES", 260)])
async def test_waiting_requests_are_bounded(
    gateway: TestGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(dispatcher, name, limit)
    first, _ = await held(gateway, scheduler, 2)
    error = await refused(gateway.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "is ready (not connected), and 2 requests wait for one" in error.details()
    assert error.trailing_metadata()["grpc-retry-pushback-ms"] == "1000"
    first.cancel()
    await until(lambda: gateway.dispatcher.num_open == 1)
    _third = gateway.generate()
    await until(lambda: gateway.dispatcher.num_open == 2)


async def test_a_waiting_request_fails_without_an_address(scheduler: FakeScheduler) -> None:
    async with TestGateway([scheduler.address], patience_s=0.1) as gateway:
        await gateway.ready()
        (call,) = await held(gateway, scheduler, 1)
        error = await refused(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no scheduler of model 'demo' accepted it within 0.1 s (not connected); retry later" in error.details()


async def test_a_scheduler_that_stops_gets_no_more_requests(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.answers_submits = False
    crossing = gateway.generate()
    await until(lambda: scheduler.submits)
    scheduler.say(welcome=scheduler_pb2.Welcome(info=scheduler.info, is_stopping=True))
    refusal = scheduler_pb2.Refusal(code=UNAVAILABLE, message="stopping")
    scheduler.say(submit_reply=scheduler_pb2.SubmitReply(handle=scheduler.submits[0].handle, refusal=refusal))
    await until(lambda: not gateway.clients[0].serves("demo", "r1"))
    later = gateway.generate()
    await until(lambda: gateway.dispatcher.num_open == 2)
    await scheduler.stop()
    assert len(scheduler.submits) == 1
    scheduler.answers_submits = True
    scheduler.play([10])
    await scheduler.start()
    assert [ids_of(await rest(call)) for call in (crossing, later)] == [[10]] * 2


@pytest.mark.parametrize("code", [UNAVAILABLE, RESOURCE_EXHAUSTED, ALREADY_EXISTS])
async def test_a_temporary_refusal_after_a_break_is_retried(
    gateway: TestGateway, scheduler: FakeScheduler, code: int
) -> None:
    call = gateway.generate()
    await call.read()
    scheduler.refusals.append(scheduler_pb2.Refusal(code=code, message="not yet"))
    scheduler.play([10, 11])
    scheduler.hang_up()
    assert ids_of(await rest(call)) == [10, 11]
    assert len(scheduler.submits) == 3


async def test_a_permanent_refusal_after_a_break_ends_the_stream(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    call = gateway.generate()
    await call.read()
    scheduler.refusals.append(scheduler_pb2.Refusal(code=INVALID_ARGUMENT, message="too big now"))
    scheduler.hang_up()
    error = await refused(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "too big now")


async def test_another_model_revision_ends_the_stream(
    gateway: TestGateway, scheduler: FakeScheduler, bundle: bytes
) -> None:
    call = gateway.generate()
    await call.read()
    scheduler.info = make_info(bundle, revision="r2")
    scheduler.hang_up()
    error = await refused(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "revision" in error.details()


async def test_a_continuation_keeps_its_revision(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    """Even after its gateway is lost with its state."""
    call = gateway.generate()
    assert (await call.read()).accepted.revision == "r1"
    call.cancel()
    other = gateway.generate(continuation=types.Continuation(revision="r0"))
    error = await refused(other)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "serves revision r1 of model 'demo', but the request began on revision r0" in error.details()
    same = gateway.generate(continuation=types.Continuation(revision="r1"))
    assert (await same.read()).accepted.revision == "r1"


@pytest.mark.parametrize(
    ("began", "continues"),
    [
        ("r1", True),  # before the updates
        ("r1@2.w2", True),
        ("r1@3.w3", True),
        ("r1@3.w4", False),  # updated to other weights
        ("r1@4.w4", False),
        ("r1@", True),
        ("r1@x.w3", False),
        ("r0@2.w2", False),
        ("r1+00@2.w2", False),  # with an adapter
        ("r1~00", False),  # with other chat templates
    ],
)
def test_a_continuation_goes_on_with_the_same_or_newer_weights(began: str, continues: bool) -> None:
    model = ServedModel(make_info(weight_version=3, weights_revision="w3"), ModelText(None))
    assert model.revision == "r1@3.w3"
    assert (model_part(began), model.continues(began)) == (began[:2], continues)
    other = replace(model, text=ModelText(None, templates_digest="t"))
    assert (other.revision, other.continues(model.revision)) == ("r1~t@3.w3", False)


async def test_a_malformed_message_ends_the_attach_stream_only(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate()
    await call.read()
    scheduler.play([10])
    scheduler.say(deltas=scheduler_pb2.Deltas(handles=b"\1\0\0"))
    assert ids_of(await rest(call)) == [10]


async def test_a_request_too_large_for_a_message_affects_no_other(
    gateway: TestGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attach_stream.MAX_SUBMIT_BYTES < MAX_MESSAGE_BYTES
    monkeypatch.setattr(attach_stream, "MAX_SUBMIT_BYTES", 500)
    other = gateway.generate()
    await other.read()
    error = await refused(gateway.generate(prompt=pb.Prompt(tokens=types.TokenIds(ids=[5] * 200))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a message to a scheduler holds at most 500" in error.details()
    scheduler.finish(scheduler.submits[0].handle, ids=[10])
    assert ids_of(await rest(other)) == [10]
    assert (len(scheduler.submits), scheduler.num_attached) == (1, 1)
    await until(lambda: not gateway.dispatcher.num_open)


async def test_a_request_too_large_to_move_affects_no_other(
    gateway: TestGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_stream, "MAX_SUBMIT_BYTES", 200)
    grown, other = gateway.generate(sampling=types.SamplingParams(n=2)), gateway.generate()
    await grown.read()
    await other.read()
    handle = next(s.handle for s in scheduler.submits if s.sampling.n == 2)
    scheduler.send(handle, [300] * 60)
    scheduler.send(handle, [300] * 60, sample=1)
    await read_tokens(grown, 120)
    scheduler.play([10])
    scheduler.hang_up()
    error = await refused(grown)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ids_of(await rest(other)) == [10]
    assert scheduler.num_attached == 2
    await until(lambda: not gateway.dispatcher.num_open)


async def test_a_message_with_too_many_fields_ends_the_link_of_its_scheduler_only(
    bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request moves to the other scheduler, whose own request is not affected."""
    monkeypatch.setattr(server_calls, "MAX_STREAM_FIELDS", 1000)
    pair = [FakeScheduler(make_info(bundle), bundle) for _ in range(2)]
    for epoch, fake in enumerate(pair):
        fake.scheduler_epoch = 100 + epoch
        await fake.start()
    async with TestGateway([fake.address for fake in pair]) as gateway:
        await gateway.ready()
        prompts = [pb.Prompt(tokens=types.TokenIds(ids=[i])) for i in range(20)]
        calls = [gateway.generate(prompt=prompt) for prompt in prompts]
        await until(lambda: sum(len(fake.submits) for fake in pair) == 20 and all(fake.submits for fake in pair))
        hostile, good = pair
        num_moved = len(hostile.submits)
        hostile.say(deltas=scheduler_pb2.Deltas(finished=[scheduler_pb2.SampleFinished()] * 40_000))
        await until(lambda: len(good.submits) + len(hostile.submits) == 20 + num_moved)
        for fake in pair:
            for submit in fake.submits[num_moved:] if fake is hostile else fake.submits:
                fake.finish(submit.handle, ids=[7])
        assert [ids_of(await rest(call)) for call in calls] == [[7]] * 20
        await until(lambda: hostile.num_attached == 2)
        assert good.num_attached == 1
    for fake in pair:
        await fake.stop()


class GarblingScheduler:
    """Sends only undecodable messages after its first Welcome, and undecodable bundles."""

    def __init__(self, info: types.ModelInfo) -> None:
        self.num_attached = 0
        self._welcome = scheduler_pb2.Welcome(scheduler_epoch=1, info=info, ready_workers=1)
        handlers = {
            "Attach": grpc.stream_stream_rpc_method_handler(self._attach),
            "GetBundle": grpc.unary_stream_rpc_method_handler(self._get_bundle),
        }
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("quire.internal.v1.SchedulerService", handlers),)
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def _attach(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.num_attached += 1
        yield scheduler_pb2.AttachResponse(welcome=self._welcome).SerializeToString()
        if self.num_attached == 1:
            yield NO_MESSAGE
        async for _ in requests:
            pass

    async def _get_bundle(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield NO_MESSAGE


async def test_undecodable_messages_end_the_stream_or_are_reported() -> None:
    garbling = GarblingScheduler(make_info(b"some bundle"))
    await garbling.server.start()
    async with TestGateway([garbling.address]) as gateway:
        await until(lambda: garbling.num_attached == 2)
        await until(lambda: "a piece of the bundle is empty or cannot be decoded" in gateway.clients[0].problem)
    await garbling.server.stop(None)


# -- continuations that clients send -----------------------------------------------------------------------------------


def continuation(*outputs: list[int], finished: tuple[int, ...] = ()) -> types.Continuation:
    samples = [
        types.SampleState(index=i, output_token_ids=ids, finished=i in finished) for i, ids in enumerate(outputs)
    ]
    return types.Continuation(samples=samples)


SEEDED = types.SamplingParams(seed=3)


@pytest.mark.parametrize("cut", range(14))
async def test_text_and_offsets_continue_at_the_position_of_the_client(
    gateway: TestGateway, scheduler: FakeScheduler, cut: int
) -> None:
    ids = encode_chars("wörld 😀 ENx END.")
    scheduler.on_submit = lambda submit: (
        [scheduler.send(submit.handle, [id_], offset=i) for i, id_ in enumerate(ids)] and None
    )
    stop = types.StopParams(stop=["END"])
    whole = await gateway.collect(sampling=SEEDED, stop=stop)
    first_part = [event for event in whole.chunks if event.offset + len(event.token_ids) <= cut]
    have = [id_ for chunk in first_part for id_ in chunk.token_ids]
    text = "".join(chunk.text for chunk in first_part)

    scheduler.on_submit = lambda submit: scheduler.send(submit.handle, ids[len(have) :], offset=len(have))
    result = await gateway.collect(sampling=SEEDED, stop=stop, continuation=continuation(have))
    assert have + result.ids() == whole.ids()
    assert text + result.text() == whole.text() == "wörld 😀 ENx "
    result.check_offsets(start=len(have), text_start=len(text.encode()))
    assert result.finished[0].output_digest == whole.finished[0].output_digest
    assert result.finished[0].usage.output_tokens == len(whole.ids())


@pytest.mark.parametrize("num_known", [0, 3, 5, 7])
async def test_stop_strings_are_ignored_before_min_tokens(
    gateway: TestGateway, scheduler: FakeScheduler, num_known: int
) -> None:
    ids = encode_chars("ab" * 8)
    scheduler.play(ids)
    stop = types.StopParams(stop=["ab"], min_tokens=7)
    result = await gateway.collect(stop=stop, sampling=SEEDED, continuation=continuation(ids[:num_known]))
    assert ids[:num_known] + result.ids() == ids[:8]
    assert (result.finished[0].reason, result.finished[0].stop) == (STOP, "ab")


async def test_a_continuation_with_tokens_after_min_tokens_and_a_stop_string_is_refused(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    stop = types.StopParams(stop=["ab"], min_tokens=7)
    known = continuation(encode_chars("ab" * 4 + "a"))
    error = await refused(gateway.generate(stop=stop, sampling=SEEDED, continuation=known))
    assert "which ends at position 7; remove the ids after position 7" in error.details()


async def test_a_continuation_with_tokens_after_its_stop_string_is_refused(
    gateway: TestGateway, scheduler: FakeScheduler
) -> None:
    request = {"stop": types.StopParams(stop=["b"]), "continuation": continuation(encode_chars("abc"))}
    error = await refused(gateway.generate(sampling=SEEDED, **request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'b'" in error.details()
