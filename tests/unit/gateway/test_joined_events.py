"""Events that are ready at the same time are one message for clients with joins_events. The events are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer import stream
from gateway_svc.answer.resuming import record_of
from gateway_svc.schedulers.submitter import Submitter
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, rest, u32, until

CALL_TIMEOUT_S = 60.0
NUM_SAMPLES = 3
IDS = [8, 9, 10]


def request(*, joins: bool, n: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(tokens=types.TokenIds(ids=[5, 6, 7])),
        request_id="r",
        sampling=types.SamplingParams(temperature=0.0, seed=1, n=n),
        joins_events=joins,
    )


def events_of(messages: Sequence[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """The events of messages, one by one."""
    events = []
    for message in messages:
        first = pb.GenerateResponse()
        first.CopyFrom(message)
        first.ClearField("following")
        events += [first, *message.following]
    return events


def kinds(message: pb.GenerateResponse) -> list[str | None]:
    return [event.WhichOneof("event") for event in (message, *message.following)]


def tokens(events: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token_id for event in events for token_id in event.chunk.token_ids]


async def answer(gateway: TestGateway, *, joins: bool) -> list[pb.GenerateResponse]:
    messages = await rest(gateway.generate(request(joins=joins)))
    await until(lambda: not gateway.num_open)
    return messages


async def test_joined_events_are_those_that_other_clients_get(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(IDS)
    joined, separate = await answer(gateway, joins=True), await answer(gateway, joins=False)
    assert kinds(joined[-1])[-2:] == ["chunk", "finished"]
    assert all(not message.following for message in separate)
    events = events_of(joined)
    assert [event.event_seq for event in events] == list(range(len(events)))
    assert tokens(events) == tokens(separate) == IDS
    assert events[0] == separate[0]
    assert events[-1].finished == separate[-1].finished


async def test_accepted_comes_alone_while_there_is_no_output(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    call = gateway.generate(request(joins=True, n=NUM_SAMPLES))
    async with asyncio.timeout(CALL_TIMEOUT_S):
        assert kinds(await call.read()) == ["accepted"]
        handle = scheduler.submits[0].handle
        scheduler.say(
            deltas=scheduler_pb2.Deltas(
                handles=u32([handle] * NUM_SAMPLES),
                sample_indices=u32(range(NUM_SAMPLES)),
                offsets=u32([0] * NUM_SAMPLES),
                token_ids=u32(IDS),
            )
        )
        message = await call.read()
    assert kinds(message) == ["chunk"] * NUM_SAMPLES, "the samples' tokens of one step are one message"
    assert tokens(events_of([message])) == IDS
    call.cancel()


def test_a_message_ends_with_the_event_that_reaches_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [pb.GenerateResponse(event_seq=i, chunk=pb.Chunk(token_ids=[1] * 50, offset=1)) for i in range(1, 6)]
    monkeypatch.setattr(stream, "JOINED_BYTES", 2 * events[0].ByteSize())
    messages = list(stream.joined(events))
    assert [1 + len(message.following) for message in messages] == [2, 2, 1]
    assert [event.event_seq for event in events_of(messages)] == list(range(1, 6))
    assert list(stream.joined([])) == []


async def test_a_record_does_not_keep_how_its_client_reads(
    gateway: TestGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client may resume the request."""
    plans: list[Any] = []
    prepare = Submitter.prepare

    async def keep(submitter: Submitter, plan: Any, **kwargs: Any) -> Any:
        plans.append(plan)
        return await prepare(submitter, plan, **kwargs)

    monkeypatch.setattr(Submitter, "prepare", keep)
    scheduler.play(IDS)
    await answer(gateway, joins=True)
    assert not record_of(request(joins=True), plans[0], b"").request.joins_events
