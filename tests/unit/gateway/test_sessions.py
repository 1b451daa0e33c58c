"""Sessions over real gRPC: two gateways with the same records, in front of schedulers whose tokens are a function of
prompt, seed, sample and position, as those of workers.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
import xxhash
from quire.internal.v1 import record_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2 as spb
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.pipeline import sessions
from gateway_svc.records.fields import MemoryFields, Update
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.store import RecordStore, StoredRecord
from svc_common.errors import UnavailableError
from tests.unit.gateway.fakes import (
    FakeScheduler,
    Result,
    TestGateway,
    make_bundle,
    make_info,
    refused,
    rest,
    until,
)
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

TOKENIZER = byte_level()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}<assistant>"
)
FIRST_ID, NUM_IDS = 10, 200  # ids of output; none of them ends it
PROMPT = [11, 12, 13]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def token(submit: scheduler_pb2.Submit, sample: int, position: int) -> int:
    key = (
        submit.prompt_token_ids + bytes(submit.adapter_digest) + f"{submit.sampling.seed} {sample} {position}".encode()
    )
    return FIRST_ID + xxhash.xxh3_64_intdigest(key) % NUM_IDS


def output_of(submit: scheduler_pb2.Submit, sample: int = 0) -> list[int]:
    return [token(submit, sample, i) for i in range(submit.stop.max_tokens)]


class Deterministic(FakeScheduler):
    """Computes the tokens of every request, in two messages per sample."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_submit = self.compute
        self.stops_at: int | None = None  # tokens after which all requests hang

    def compute(self, submit: scheduler_pb2.Submit) -> None:
        have = {sample.index: sample for sample in submit.continuation.samples}
        for sample in range(submit.sampling.n):
            if sample in have and have[sample].finished:
                continue
            start, ids = len(have[sample].output_token_ids) if sample in have else 0, output_of(submit, sample)
            if self.stops_at is not None:
                self.send(submit.handle, ids[start : self.stops_at], offset=start, sample=sample)
            else:
                self.finish(submit.handle, ids=ids[start:], offset=start, sample=sample)

    @property
    def prompt(self) -> list[int]:
        """The newest prompt."""
        return list(array("I", self.submits[-1].prompt_token_ids))


class Served:
    """Two gateways; the second one continues what the first one began."""

    def __init__(self, gateways: list[TestGateway], schedulers: list[Deterministic], recorder: OutputRecorder) -> None:
        self.first, self.second = gateways
        self.schedulers = schedulers
        self.records = recorder.records

    @property
    def sessions(self) -> Any:
        return self.second.sessions

    async def ask(self, gateway: TestGateway | None = None, **options: Any) -> Result:
        options.setdefault("stop", types.StopParams(max_tokens=8))
        return await (gateway or self.first).collect(resumable=True, **options)

    async def resumed(self, session_id: str, *after: int) -> Result:
        positions = [pb.ResumePosition(index=i, num_tokens=count) for i, count in enumerate(after)]
        call = self.second.stub.Resume(pb.ResumeRequest(request_id=session_id, after=positions), timeout=30)
        return Result(await rest(call))


@asynccontextmanager
async def serve(template: str = TEMPLATE, **settings: Any) -> AsyncIterator[Served]:
    bundle = make_bundle(bundle_files(byte_level(), chat_template=template))
    recorder = OutputRecorder(RecordStore(MemoryFields(8 << 20)))
    async with AsyncExitStack() as closing:
        schedulers, gateways = [], []
        for _ in range(2):
            scheduler = Deterministic(make_info(bundle), bundle)
            await scheduler.start()
            closing.push_async_callback(scheduler.stop)
            gateway = TestGateway([scheduler.address], recorder=recorder, **settings)
            gateways.append(await closing.enter_async_context(gateway))
            schedulers.append(scheduler)
            await gateway.ready()
        recorder.start()
        closing.push_async_callback(recorder.close)
        yield Served(gateways, schedulers, recorder)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve() as running:
        yield running


def tokens(*ids: int) -> pb.Prompt:
    return pb.Prompt(tokens=types.TokenIds(ids=ids))


def chat(*messages: tuple[str, str], **settings: Any) -> pb.Prompt:
    return pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages], **settings))


# -- new input --------------------------------------------------------------------------------------------------------


async def test_a_turn_has_its_own_values_for_the_fields_that_it_sets(served: Served) -> None:
    sampling = types.SamplingParams(seed=7, temperature=0.5, n=3, json_object=True, banned_token_ids=[9])
    stop = types.StopParams(max_tokens=4, stop=["END"])
    await served.ask(prompt=tokens(*PROMPT), sampling=sampling, stop=stop, request_id="a")
    served.schedulers[0].on_submit = lambda submit: served.schedulers[0].finish(submit.handle)
    await served.ask(
        session_id="a", session_sample=2, prompt=tokens(5), sampling=types.SamplingParams(seed=0, regex="[a-z]*"),
        stop=types.StopParams(stop=["A", "B"]),
    )  # fmt: skip
    submit = served.schedulers[0].submits[-1]
    assert (submit.sampling.seed, submit.sampling.temperature, submit.sampling.n) == (0, 0.5, 1)
    assert (submit.sampling.regex, submit.sampling.json_object, submit.sampling.json_schema) == ("[a-z]*", False, "")
    assert list(submit.sampling.banned_token_ids) == [9]
    assert submit.stop.max_tokens > 4, "max_tokens belong to a turn"


async def test_tools_and_calls_of_a_chat_are_those_of_its_session() -> None:
    template = TEMPLATE + "{% if tools %}{% endif %}{#<tool_call>{'name': 1, 'arguments': 1}</tool_call>#}"
    tools = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
    async with serve(template) as served:
        scheduler = served.schedulers[0]
        call = 'Wait.<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
        answers = iter([encode(call), encode("done"), encode("done")])
        scheduler.on_submit = lambda submit: scheduler.finish(submit.handle, ids=next(answers))
        output = pb.OutputParams(parse_chat=True)
        stop = types.StopParams(max_tokens=60)
        first = await served.ask(
            prompt=chat(("user", "Go"), tools_json=tools), output=output, stop=stop, request_id="a"
        )
        calls = [part.tool_call for chunk in first.chunks for part in chunk.parts if part.HasField("tool_call")]
        assert [call.name for call in calls][:1] == ["look"], "the format is found in the template"
        fork = (await served.sessions.Fork(spb.ForkRequest(session_id="a"))).sessions[0].session_id
        for base in ("a", fork):
            result = chat(("tool", "here"))
            result.chat.messages[0].tool_call_id = calls[0].id
            await served.ask(session_id=base, prompt=result, stop=stop)
            words = f'<user>Go<assistant>Wait.[{calls[0].id} look {{"at": 1}}]<tool>here'
            assert TOKENIZER.decode(scheduler.prompt).startswith(words)


# -- values -----------------------------------------------------------------------------------------------------------


async def test_a_checkpoint_keeps_what_a_running_request_has(served: Served) -> None:
    served.schedulers[0].stops_at = 5
    call = served.first.generate(
        request_id="a", resumable=True, prompt=tokens(*PROMPT), sampling=types.SamplingParams(seed=3),
        stop=types.StopParams(max_tokens=9),
    )  # fmt: skip
    received: list[int] = []
    while len(received) < 5:
        received += (await call.read()).chunk.token_ids

    async def checkpoint() -> spb.Session:
        response: spb.CheckpointResponse = await served.sessions.Checkpoint(spb.CheckpointRequest(session_id="a"))
        return response.session

    while not (session := await checkpoint()).samples[0].num_tokens:
        pass
    got = await served.sessions.GetSession(spb.GetSessionRequest(session_id="a"))
    assert got.session.is_running
    assert not session.is_running
    whole = output_of(served.schedulers[0].submits[0])
    assert received == whole[:5]
    again = await served.resumed(session.session_id, 0)
    assert again.ids() == whole
    assert not call.done(), "the request runs on"
    branch = await served.ask(served.second, session_id=session.session_id, prompt=tokens(99))
    assert served.schedulers[1].prompt[-1] == 99
    assert len(branch.ids()) == 8
    call.cancel()


async def test_a_new_turn_waits_for_the_end_of_the_one_before(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEASE_S", 0.2)
    served.schedulers[0].stops_at = 2
    call = served.first.generate(request_id="a", resumable=True, stop=types.StopParams(max_tokens=9))
    await until(lambda: served.schedulers[0].submits)
    load, loads = RecordStore.load, list[str]()

    async def counted(self: RecordStore, record_id: str) -> StoredRecord | None:
        loads.append(record_id)
        return await load(self, record_id)

    monkeypatch.setattr(RecordStore, "load", counted)
    error = await refused(served.second.generate(session_id="a", prompt=tokens(5)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "is being computed" in str(error.details())
    assert len(loads) == 1, "while it waits, it reads the lease only"
    call.cancel()


async def test_an_answer_ends_when_its_record_has_the_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RecordStore.write

    async def late(self: RecordStore, updates: Sequence[Update]) -> list[bool]:
        await asyncio.sleep(0.05)
        return await write(self, updates)

    monkeypatch.setattr(RecordStore, "write", late)
    await served.ask(request_id="a", prompt=tokens(*PROMPT))
    got = await served.sessions.GetSession(spb.GetSessionRequest(session_id="a"))
    assert [(s.num_tokens, s.is_finished) for s in got.session.samples] == [(8, True)]


async def test_an_end_that_could_not_be_written_is_written_later(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the next turn would take a part of the output for all of it."""
    write, is_down = RecordStore.write, True

    async def failing(self: RecordStore, updates: Sequence[Update]) -> list[bool]:
        if is_down:
            raise UnavailableError("Redis does not answer")
        return await write(self, updates)

    monkeypatch.setattr(RecordStore, "write", failing)
    first = await served.ask(request_id="a", prompt=tokens(*PROMPT))
    is_down = False
    await served.ask(session_id="a", prompt=tokens(9))
    assert served.schedulers[0].prompt == [*PROMPT, *first.ids(), 9]


async def test_pins_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_PINS", 2)
    for name in "abc":
        await served.ask(request_id=name)
    for name in ("a", "b", "a"):
        response = await served.sessions.Pin(spb.PinRequest(session_id=name, ttl_s=10_000))
        assert response.session.pinned_for_s == pytest.approx(10_000, abs=60)
        assert response.session.expires_in_s >= response.session.pinned_for_s
    with pytest.raises(grpc.aio.AioRpcError, match="2 sessions are pinned") as caught:
        await served.sessions.Pin(spb.PinRequest(session_id="c", ttl_s=10))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    response = await served.sessions.Pin(spb.PinRequest(session_id="a", ttl_s=0))
    assert response.session.pinned_for_s == 0
    await served.sessions.Pin(spb.PinRequest(session_id="c", ttl_s=10))


async def test_the_session_of_another_owner_does_not_exist() -> None:
    """Each way to use an id: no call may tell more than that there is no such session."""

    async def admit(method: str, context: Any) -> None:
        current_caller.set(Caller(owner=dict(context.invocation_metadata()).get("owner", "")))

    async with serve(admit=admit) as served:
        mine, other = [("owner", "mine")], [("owner", "other")]
        request = pb.GenerateRequest(request_id="a", resumable=True, prompt=tokens(*PROMPT))
        request.stop.max_tokens = 4
        assert len(await rest(served.first.stub.Generate(request, metadata=mine))) > 1
        await served.sessions.Pin(spb.PinRequest(session_id="a", ttl_s=100), metadata=mine)
        status = await served.first.stub.GetStatus(pb.GetStatusRequest())
        assert (status.pinned_sessions, list(status.pins_by_owner)) == (1, [pb.OwnerPins(owner="mine", num_sessions=1)])
        fork = await served.sessions.Fork(spb.ForkRequest(session_id="a"), metadata=mine)
        session_id = fork.sessions[0].session_id
        found = await served.sessions.ListSessions(spb.ListSessionsRequest(), metadata=mine)
        assert [session.session_id for session in found.sessions] == [session_id]
        for caller in (other, []):
            errors = await refusals(served, session_id, caller)
            assert errors == [(grpc.StatusCode.NOT_FOUND, f"there is no record of request {session_id!r}")] * len(
                errors
            )
            found = await served.sessions.ListSessions(spb.ListSessionsRequest(), metadata=caller)
            assert not found.sessions
        assert await served.sessions.GetSession(spb.GetSessionRequest(session_id=session_id), metadata=mine)


async def refusals(served: Served, session_id: str, caller: Any) -> list[tuple[grpc.StatusCode, str]]:
    """How each call with this id is refused."""
    stub, one = served.sessions, {"session_id": session_id}
    calls = [
        stub.Checkpoint(spb.CheckpointRequest(**one), metadata=caller),
        stub.Fork(spb.ForkRequest(**one, n=2), metadata=caller),
        stub.Rewind(spb.RewindRequest(**one, num_tokens=1), metadata=caller),
        stub.Pin(spb.PinRequest(**one, ttl_s=5), metadata=caller),
        stub.GetSession(spb.GetSessionRequest(**one), metadata=caller),
        stub.DeleteSession(spb.DeleteSessionRequest(**one), metadata=caller),
        rest(served.second.stub.Generate(pb.GenerateRequest(session_id=session_id, prompt=tokens(5)), metadata=caller)),
        rest(served.second.stub.Resume(pb.ResumeRequest(request_id=session_id), metadata=caller)),
    ]
    found = []
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        found.append((caught.value.code(), str(caught.value.details()).split(":")[0]))
    return found


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"prompt": chat(("user", "x"))}, "the prompt of the session is tokens"),
        ({"prompt": tokens(5), "session_id": "none"}, "there is no record of request 'none'"),
        ({"prompt": tokens(5), "session_id": "a/b"}, "session_id is 'a/b'; must be 1 to 64 characters"),
        ({"prompt": tokens(5), "session_id": "x" * 65}, "session_id"),
        ({}, "prompt is not set"),
        ({"prompt": tokens(*[5] * 300)}, "max_model_len"),
        ({"prompt": tokens(*[5] * 250)}, "max_model_len"),
    ],
    ids=["chat", "unknown", "form", "long", "nothing", "long_prompt", "long_together"],
)
async def test_what_cannot_be_continued_is_refused(served: Served, turn: dict[str, Any], message: str) -> None:
    await served.ask(request_id="a")
    request = pb.GenerateRequest(**{"session_id": "a", **turn})
    error = await refused(served.second.generate(request))
    assert message in str(error.details())


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"prompt": tokens(5), "output": pb.OutputParams(logprobs=0)}, "output is not stored"),
        ({"prompt": tokens(5), "sampling": types.SamplingParams(best_of=2, n=1)}, "output is not stored"),
        ({"prompt": pb.Prompt(embeddings=b"x")}, "whose prompt is embeddings"),
        ({"prompt": pb.Prompt(audio=pb.Audio(data=b"x"))}, "whose prompt is audio"),
        ({"prompt": tokens(5), "model": "other"}, "the tokens of the session are those of 'other'"),
    ],
    ids=["logprobs", "best_of", "embeddings", "audio", "model"],
)
async def test_records_without_tokens_or_output_are_not_continued(
    served: Served, kept: dict[str, Any], message: str
) -> None:
    content = record_pb2.RequestRecord(request=pb.GenerateRequest(**kept), prompt_token_ids=b"\5\0\0\0")
    await served.records.create("a", content, "run")
    await served.records.write([Update("a", "run", releases=True)])
    error = await refused(served.second.generate(session_id="a", model="demo", prompt=tokens(5)))
    assert message in str(error.details())


@pytest.mark.parametrize(
    ("call", "request_", "message"),
    [
        ("Rewind", spb.RewindRequest(session_id="a", num_tokens=9), "num_tokens is 9; must be at most 8"),
        ("Fork", spb.ForkRequest(session_id="a", n=65), "n is 65; must be from 1 to 64"),
        ("Pin", spb.PinRequest(session_id="a", ttl_s=-1), "ttl_s is -1.0; must be from 0 to 604800"),
        ("Pin", spb.PinRequest(session_id="a", ttl_s=float("nan")), "ttl_s is nan"),
        ("GetSession", spb.GetSessionRequest(), "session_id is ''"),
    ],
)
async def test_calls_with_wrong_values_are_refused(served: Served, call: str, request_: Any, message: str) -> None:
    await served.ask(request_id="a")
    await until_finished(served, "a")
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await getattr(served.sessions, call)(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def until_finished(served: Served, request_id: str) -> None:
    while (record := await served.records.load(request_id)) is None or not record.is_finished:
        pass


async def test_output_that_does_not_fit_in_the_record_is_not_left_out(served: Served) -> None:
    content = record_pb2.RequestRecord(
        request=pb.GenerateRequest(model="demo", prompt=tokens(5)), prompt_token_ids=b"\5\0\0\0"
    )
    await served.records.create("a", content, "run")
    end = record_pb2.SampleEnd(num_output=300).SerializeToString()
    await served.records.write([Update("a", "run", {(0, 0): b"\6\0\0\0" * 2}, {0: end}, releases=True)])
    error = await refused(served.first.generate(session_id="a", prompt=tokens(9)))
    assert "output does not fit in its record" in str(error.details())
    with pytest.raises(grpc.aio.AioRpcError, match="output does not fit in its record"):
        await served.sessions.Fork(spb.ForkRequest(session_id="a"))
    back = await served.sessions.Rewind(spb.RewindRequest(session_id="a", num_tokens=2))
    await served.ask(session_id=back.session.session_id, prompt=tokens(9))
    assert served.schedulers[0].prompt == [5, 6, 6, 9]
