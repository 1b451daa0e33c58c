"""Resume over real gRPC: two gateways, a fake scheduler each, and a real Redis with the records."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2 as spb
from quire.v1 import types_pb2 as types
from quire_client import PromptEmbeddings

from gateway_svc.pipeline import sessions
from gateway_svc.records.fields import Update
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from tests.processes.redis_server import RedisServer
from tests.unit.gateway.fakes import (
    ABORTED,
    EOS,
    LENGTH,
    STOP,
    FakeScheduler,
    Result,
    TestGateway,
    digest_of,
    make_info,
    refused,
    rest,
    until,
)
from tests.unit.gateway.tokenizer_kinds import byte_level

TOKENIZER = byte_level()
TEXT = "Hello wörld 😀, and more"
CALL_TIMEOUT_S = 60.0
HIDDEN = 8


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


IDS = encode(TEXT)


class Recorded:
    """A gateway with records, in front of its own fake scheduler."""

    def __init__(self, bundle: bytes, redis_url: str) -> None:
        self.scheduler = FakeScheduler(make_info(bundle, hidden_size=HIDDEN), bundle)
        self.recorder = OutputRecorder(RecordStore(RedisFields(redis_url)))

    async def __aenter__(self) -> Recorded:
        await self.scheduler.start()
        self.gateway = await TestGateway([self.scheduler.address], recorder=self.recorder).__aenter__()
        await self.gateway.ready()
        self.recorder.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.__aexit__()
        await self.recorder.close()
        await self.scheduler.stop()

    def resume(self, request_id: str, *after: int) -> grpc.aio.UnaryStreamCall:
        positions = [pb.ResumePosition(index=i, num_tokens=count) for i, count in enumerate(after)]
        request = pb.ResumeRequest(request_id=request_id, after=positions)
        return self.gateway.stub.Resume(request, timeout=CALL_TIMEOUT_S)

    async def resumed(self, request_id: str, *after: int) -> Result:
        return Result([event async for event in self.resume(request_id, *after)])


@pytest.fixture
async def first(bundle: bytes, redis_server: RedisServer) -> AsyncIterator[Recorded]:
    redis_server.flush()
    async with Recorded(bundle, redis_server.url) as running:
        yield running


@pytest.fixture
async def second(bundle: bytes, redis_server: RedisServer, first: Recorded) -> AsyncIterator[Recorded]:
    async with Recorded(bundle, redis_server.url) as running:
        yield running


async def stored(recorder: OutputRecorder, request_id: str, num_tokens: int, *, sample: int = 0) -> None:
    """Wait until the record of a request has this much output."""
    async with asyncio.timeout(30.0):
        while True:
            record = await recorder.records.load(request_id)
            if record is not None and len(record.outputs[sample]) >= num_tokens:
                return
            await asyncio.sleep(0.01)


async def is_finished(first: Recorded) -> None:
    """Wait until the end of the request is in its record."""
    async with asyncio.timeout(30.0):
        while (record := await first.recorder.records.load("r")) is None or not record.is_finished:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def finished_at(first: Recorded, ids: Sequence[int], reason: int = LENGTH, **options: object) -> Result:
    """A complete answer on the first gateway, whose end is in the record."""
    first.scheduler.play(ids, reason)
    result = await first.gateway.collect(request_id="r", resumable=True, **options)
    await is_finished(first)
    return result


async def test_a_finished_answer_is_served_from_its_record(first: Recorded, second: Recorded) -> None:
    whole = await finished_at(first, IDS, sampling=types.SamplingParams(temperature=0.5))
    for after in range(len(IDS) + 1):
        again = await second.resumed("r", after)
        assert again.ids() == IDS[after:]
        assert TEXT.endswith(again.text())
        assert again.finished[0].output_digest == digest_of(IDS)
        assert again.finished[0].usage == whole.finished[0].usage
        assert again.accepted == whole.accepted
    assert (await second.resumed("r")).text() == TEXT
    assert second.scheduler.submits == []


async def test_the_record_of_a_request_has_its_prompt_embeddings(first: Recorded, second: Recorded) -> None:
    prompt = pb.Prompt(embeddings=PromptEmbeddings.of(np.ones((20, HIDDEN), np.float32)).data)
    call = first.gateway.generate(request_id="r", resumable=True, prompt=prompt)
    await until(lambda: first.scheduler.submits)
    first.scheduler.send(first.scheduler.submits[0].handle, IDS[:5])
    await stored(first.recorder, "r", 5)
    second.scheduler.play(IDS)
    assert (await second.resumed("r", 2)).ids() == IDS[2:]
    (sent,), (again,) = first.scheduler.submits, second.scheduler.submits
    assert len(sent.inputs) == 1
    assert list(again.inputs) == list(sent.inputs)
    assert again.prompt_token_ids == sent.prompt_token_ids
    call.cancel()


async def test_the_former_run_cannot_write_after_another_gateway_has_resumed(first: Recorded, second: Recorded) -> None:
    call = first.gateway.generate(request_id="r", resumable=True)
    await until(lambda: first.scheduler.submits)
    first.scheduler.send(first.scheduler.submits[0].handle, IDS[:2])
    await stored(first.recorder, "r", 2)
    other = second.resume("r")
    await until(lambda: second.scheduler.submits)
    first.scheduler.send(first.scheduler.submits[0].handle, [9, 9, 9], offset=2)
    second.scheduler.finish(second.scheduler.submits[0].handle, ids=IDS[2:], offset=2)
    assert Result(await rest(other)).ids() == IDS
    await stored(second.recorder, "r", len(IDS))
    record = await second.recorder.records.load("r")
    assert record is not None
    assert list(record.outputs[0]) == IDS
    call.cancel()


async def test_output_that_is_not_in_the_record_is_computed_again_and_skipped(
    first: Recorded, second: Recorded
) -> None:
    first.recorder.begin = lambda recording: None  # type: ignore[method-assign]  # writes no output
    call = first.gateway.generate(request_id="r", resumable=True)
    await until(lambda: first.scheduler.submits)
    second.scheduler.play(IDS)
    again = await second.resumed("r", 7)
    assert not second.scheduler.submits[0].continuation.samples
    assert (again.ids(), again.finished[0].output_digest) == (IDS[7:], digest_of(IDS))
    assert TEXT.endswith(again.text())
    call.cancel()


async def test_every_kind_of_end_is_kept(first: Recorded, second: Recorded) -> None:
    whole = await finished_at(first, [*IDS, 1], EOS)
    assert (await second.resumed("r")).text() == whole.text() == TEXT
    cut = await finished_at(first, IDS, stop=types.StopParams(stop=["and"]))
    again = await second.resumed("r", 3)
    assert (again.finished[0].reason, again.finished[0].stop) == (STOP, "and")
    assert cut.text().endswith(again.text())
    assert cut.ids() == [*IDS[:3], *again.ids()]
    assert second.scheduler.submits == []


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("last", "reason"), [(1, EOS), (77, STOP)])
async def test_a_stop_string_before_the_token_that_ended_the_sample_is_found_again(
    first: Recorded, second: Recorded, last: int, reason: int, *, is_late: bool
) -> None:
    """The scheduler has the last token before the gateway has found the stop string, or before it hears of that."""
    conditions = types.StopParams(stop=["more"], stop_token_ids=[77])
    if is_late:
        first.scheduler.on_submit = lambda submit: first.scheduler.send(submit.handle, IDS)
        first.scheduler._take_cancel = lambda cancel: first.scheduler.finish(  # type: ignore[method-assign]
            cancel.handle, reason, ids=[last], offset=len(IDS)
        )
    else:
        first.scheduler.play([*IDS, last], reason)
    cut = await first.gateway.collect(request_id="r", resumable=True, stop=conditions)
    await is_finished(first)
    again = await second.resumed("r")
    assert (again.text(), again.ids()) == (cut.text(), cut.ids()) == (TEXT.removesuffix("more"), IDS)
    assert again.finished[0] == cut.finished[0]


async def test_an_aborted_request_stays_aborted(first: Recorded, second: Recorded) -> None:
    call = first.gateway.generate(request_id="r", resumable=True)
    await until(lambda: first.scheduler.submits)
    first.scheduler.send(first.scheduler.submits[0].handle, IDS[:3])
    await stored(first.recorder, "r", 3)
    await first.gateway.stub.Abort(pb.AbortRequest(request_ids=["r"]))
    await rest(call)
    await is_finished(first)
    again = await second.resumed("r")
    assert (again.finished[0].reason, again.ids()) == (ABORTED, IDS[:3])


@pytest.mark.parametrize(
    ("request_id", "after", "code", "words"),
    [
        ("unknown", [], grpc.StatusCode.NOT_FOUND, "no record of request 'unknown'"),
        ("a b", [], grpc.StatusCode.INVALID_ARGUMENT, "must be 1 to 64 characters"),
        ("r", [(0, 1), (0, 2)], grpc.StatusCode.INVALID_ARGUMENT, "after[1].index is 0, the index of an earlier"),
        ("r", [(1, 1)], grpc.StatusCode.INVALID_ARGUMENT, "after[0].index is 1; must be from 0 to 0"),
        ("r", [(0, 1000)], grpc.StatusCode.INVALID_ARGUMENT, "is 1000; must be at most"),
    ],
)
async def test_invalid_positions_are_refused(
    first: Recorded, request_id: str, after: list[tuple[int, int]], code: grpc.StatusCode, words: str
) -> None:
    await finished_at(first, IDS)
    positions = [pb.ResumePosition(index=i, num_tokens=count) for i, count in after]
    call = first.gateway.stub.Resume(pb.ResumeRequest(request_id=request_id, after=positions))
    error = await refused(call)
    assert error.code() is code
    assert words in (error.details() or "")


async def test_an_answer_that_was_cut_off_is_continued_only_after_it_was_resumed(
    first: Recorded, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may have more of it than is stored."""
    monkeypatch.setattr(sessions, "LEASE_S", 0.2)
    await finished_at(first, IDS)
    record = await first.recorder.records.load("r")
    assert record is not None
    killed = RecordStore(RedisFields(redis_server.url, lease_s=0.05))
    await killed.create("r", record.content, "run")
    await killed.write([Update("r", "run", {(0, 0): record.outputs[0][:5].tobytes()})])
    await killed.close()
    turn = pb.GenerateRequest(session_id="r", prompt=pb.Prompt(tokens=types.TokenIds(ids=[9])))
    await asyncio.sleep(0.1)  # its lease has expired
    error = await refused(first.gateway.generate(turn))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "was cut off before all its output was stored" in (error.details() or "")
    for copying in (
        first.gateway.sessions.Fork(spb.ForkRequest(session_id="r")),
        first.gateway.sessions.Rewind(spb.RewindRequest(session_id="r", num_tokens=2)),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="was cut off"):
            await copying
    first.scheduler.play(IDS)
    assert (await first.resumed("r", 7)).ids() == IDS[7:]
    await first.gateway.collect(turn)
    assert list(array("I", first.scheduler.submits[-1].prompt_token_ids))[-len(IDS) - 1 :] == [*IDS, 9]


async def test_a_resumable_request_is_refused_while_redis_does_not_answer(
    first: Recorded, redis_server: RedisServer
) -> None:
    redis_server.stop()
    try:
        error = await refused(first.gateway.generate(resumable=True))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        first.scheduler.play(IDS)
        assert (await first.gateway.collect()).ids() == IDS
    finally:
        redis_server.start()
