"""Routes: the choice of a target, what stays with its target, shadows, and the table in a file and in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.limits.buckets import LimitsFile
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.records.fields import MemoryFields
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.store import RecordStore
from gateway_svc.schedulers import routes
from gateway_svc.schedulers.routes import FileTable, ModelRoutes, RedisTable, RoutesError, choose, conversation_key
from svc_common.errors import ServiceError, UnavailableError
from svc_common.redis.server import RedisServer as Server
from tests.processes.redis_server import RedisServer
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, make_bundle, make_info, refused, until
from tests.unit.gateway.test_sessions import chat, tokens

MODELS = ("one", "two", "three")


def route(name: str, targets: Mapping[str, int], shadow: str = "") -> pb.Route:
    return pb.Route(name=name, targets=targets, shadow=shadow)


async def put(table: ModelRoutes, name: str, **targets: int) -> None:
    await table.set(route(name, targets), lambda _: True)


class Split:
    """A gateway in front of one scheduler per model; all answer token 7 unless a test says otherwise."""

    def __init__(self, gateway: TestGateway, schedulers: dict[str, FakeScheduler]) -> None:
        self.gateway = gateway
        self.schedulers = schedulers

    async def set(self, name: str, shadow: str = "", **targets: int) -> None:
        await self.gateway.admin.SetRoute(pb.SetRouteRequest(route=route(name, targets, shadow)))

    async def target(self, **options: Any) -> str:
        """The target that answers."""
        accepted = (await self.gateway.collect(**{"model": "prod", **options})).accepted
        assert accepted.model == options.get("model", "prod")
        return accepted.target

    def counts(self) -> dict[str, int]:
        return {model: len(scheduler.submits) for model, scheduler in self.schedulers.items()}


@pytest.fixture
async def split(tmp_path: Path) -> AsyncIterator[Split]:
    async with AsyncExitStack() as closing:
        recorder = OutputRecorder(RecordStore(MemoryFields(8 << 20)))
        (tmp_path / "limits.toml").write_text('[owners.narrow]\nmodels = ["prod"]')

        async def admit(*_: Any) -> None:
            current_caller.set(Caller(owners[0]))

        owners = [""]
        bundle, schedulers = make_bundle(), {}
        for name in MODELS:
            scheduler = schedulers[name] = FakeScheduler(make_info(bundle, model=name, revision=f"r-{name}"), bundle)
            scheduler.play([7])
            await scheduler.start()
            closing.push_async_callback(scheduler.stop)
        table = ModelRoutes(FileTable(tmp_path / "routes.json"))
        gateway = await closing.enter_async_context(
            TestGateway(
                [scheduler.address for scheduler in schedulers.values()],
                recorder=recorder,
                routes=table,
                admit=admit,
                limits=KeyLimits(LimitsFile(tmp_path / "limits.toml")),
                max_streams=4,
                patience_s=0.5,
            )
        )
        table.start()
        closing.push_async_callback(table.close)
        recorder.start()
        closing.push_async_callback(recorder.close)
        await gateway.ready()
        running = Split(gateway, schedulers)
        running.owners = owners  # type: ignore[attr-defined]
        yield running


# -- the choice --------------------------------------------------------------------------------------------------------


def pick(row: pb.Route, conversation: str, models: Sequence[str] = MODELS) -> str:
    return choose(row, pb.GenerateRequest(scheduling=pb.SchedulingParams(conversation=conversation)), models)


def test_shares_follow_the_weights_and_changes_move_few_conversations() -> None:
    before, after = route("prod", {"one": 90, "two": 9, "three": 1}), route("prod", {"one": 80, "two": 19, "three": 1})
    keys = [f"conversation {i}" for i in range(10_000)]
    chosen = {key: pick(before, key) for key in keys}
    shares = Counter(chosen.values())
    assert all(
        abs(shares[model] / 10_000 - part) < 0.005 for model, part in zip(MODELS, (0.9, 0.09, 0.01), strict=True)
    )
    moves = Counter((chosen[key], pick(after, key)) for key in keys)
    moved = {pair: count for pair, count in moves.items() if pair[0] != pair[1]}
    assert all(source != "two" and target != "one" for source, target in moved)
    assert abs(sum(moved.values()) / 10_000 - 0.1) < 0.01
    lost = [key for key in keys if pick(before, key, ("one", "three")) != chosen[key]]
    assert lost == [key for key in keys if chosen[key] == "two"], "only conversations of a lost target move"
    assert {pick(route("prod", {"one": 0, "two": 1}), key) for key in keys[:100]} == {"two"}
    assert pick(route("prod", {"one": 0, "two": 1}), "key", ("one",)) == ""


def test_turns_of_a_conversation_have_one_key() -> None:
    first = pb.GenerateRequest(prompt=chat(("system", "It is 10:00."), ("user", "Hello")))
    second = pb.GenerateRequest(
        prompt=chat(("system", "It is 10:01."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Go on"))
    )
    other = pb.GenerateRequest(prompt=chat(("user", "Hello!")))
    assert conversation_key(first) == conversation_key(second) != conversation_key(other)
    named = [pb.GenerateRequest(prompt=tokens(i), scheduling=pb.SchedulingParams(conversation="c")) for i in (1, 2)]
    assert conversation_key(named[0]) == conversation_key(named[1])
    assert conversation_key(pb.GenerateRequest(prompt=tokens(1))) != conversation_key(
        pb.GenerateRequest(prompt=tokens(2))
    )


async def test_a_target_whose_schedulers_are_away_is_skipped_and_none_left_is_an_error(split: Split) -> None:
    await split.set("prod", one=1, two=1)
    prompts = [tokens(i) for i in range(5, 25)]
    before = [await split.target(prompt=prompt) for prompt in prompts]
    await split.schedulers["one"].stop()
    await until(lambda: not split.gateway.clients[0].is_ready)
    assert {await split.target(prompt=prompt) for prompt in prompts} == {"two"}
    await split.schedulers["one"].start()
    await split.gateway.ready()
    assert [await split.target(prompt=prompt) for prompt in prompts] == before
    split.gateway.clients[:2] = []
    error = await refused(split.gateway.generate(model="prod"))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "no target of model 'prod' is served now (one, two); retry later",
    )


# -- what has begun ----------------------------------------------------------------------------------------------------


async def test_records_sessions_and_streams_stay_with_their_target(split: Split) -> None:
    gateway = split.gateway
    await split.set("prod", one=1)
    await gateway.collect(model="prod", prompt=tokens(5), resumable=True, request_id="a")
    began = await gateway.collect(model="prod", prompt=chat(("user", "Hello")), resumable=True, request_id="b")
    hangs = split.schedulers["one"]
    hangs.on_submit = lambda submit: hangs.send(submit.handle, [7])
    stream = aiter(gateway.generate(model="prod", prompt=tokens(5), resumable=True, request_id="c"))
    revision = (await anext(stream)).accepted.revision
    await anext(stream)
    await split.set("prod", two=1)
    hangs.finish(hangs.submits[-1].handle, ids=[8], offset=1)
    assert [event async for event in stream][-1].HasField("finished"), "a flip ends no stream"
    hangs.play([7])
    assert await split.target() == "two"
    for model in ("", "prod", "one"):
        turn = await gateway.collect(model=model, session_id="a", prompt=tokens(6), resumable=True)
        assert (turn.accepted.model, turn.accepted.target) == ("prod", "one")
    resumed = [event async for event in gateway.stub.Resume(pb.ResumeRequest(request_id="a"))]
    assert (resumed[0].accepted.model, resumed[0].accepted.target) == ("prod", "one")
    continued = pb.GenerateRequest(model="prod", prompt=tokens(5), request_id="d")
    continued.continuation.revision = revision
    assert (await gateway.collect(continued)).accepted.target == "one", "by the revision of the stream"
    await split.set("prod")
    assert (await refused(gateway.generate(continued))).code() == grpc.StatusCode.NOT_FOUND
    assert (await gateway.collect(session_id="b", prompt=chat(("user", "x")))).accepted.model == "prod"
    assert began.accepted.target == "one"


async def test_a_session_whose_target_is_gone_moves_if_its_messages_can_be_read_again(split: Split) -> None:
    gateway = split.gateway
    await split.set("prod", one=1)
    await gateway.collect(model="prod", prompt=tokens(5), resumable=True, request_id="a")
    await gateway.collect(model="prod", prompt=chat(("user", "Hello")), resumable=True, request_id="b")
    await split.set("prod", two=1)
    del gateway.clients[0]
    assert (await gateway.collect(session_id="b", prompt=chat(("user", "x")))).accepted.target == "two"
    error = await refused(gateway.generate(session_id="a", prompt=tokens(6)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the tokens of the session are those of 'one'" in str(error.details())


async def test_a_key_for_a_name_permits_its_targets_only_by_that_name(split: Split) -> None:
    await split.set("prod", one=1)
    split.owners[0] = "narrow"  # type: ignore[attr-defined]
    assert await split.target(request_id="a", resumable=True) == "one"
    assert (await refused(split.gateway.generate(model="one"))).code() == grpc.StatusCode.PERMISSION_DENIED
    crafted = pb.GenerateRequest(model="prod", prompt=tokens(5))
    crafted.continuation.revision = "r-three"
    assert (await refused(split.gateway.generate(crafted))).code() == grpc.StatusCode.UNAVAILABLE
    assert split.counts()["three"] == 0
    await split.set("prod", two=1)
    assert (await split.gateway.collect(session_id="a", prompt=tokens(6))).accepted.target == "one"
    crafted.continuation.revision = "r-one"
    assert await split.target(prompt=crafted.prompt, continuation=crafted.continuation) == "one"


# -- shadows -----------------------------------------------------------------------------------------------------------


async def test_a_shadow_gets_copies_of_whole_new_requests_and_never_answers(split: Split) -> None:
    gateway, shadow = split.gateway, split.schedulers["three"]
    shadow.on_submit = lambda submit: None  # hangs
    await split.set("prod", "three", one=1)
    sampling = types.SamplingParams(seed=3, n=2)
    asked = pb.GenerateRequest(model="prod", prompt=tokens(5, 6), resumable=True, request_id="a", sampling=sampling)
    assert (await gateway.collect(asked)).ids() == [7]
    await gateway.collect(model="prod", session_id="a", prompt=tokens(5))
    await until(lambda: split.counts()["three"] == 1)
    copy, own = shadow.submits[0], split.schedulers["one"].submits[0]
    assert (copy.prompt_token_ids, copy.sampling.seed, copy.sampling.n) == (own.prompt_token_ids, 3, 2)
    assert (copy.priority, own.priority) == (1000, 0)
    assert copy.request_id != own.request_id
    assert len(gateway.streams) == 0, "a copy takes no room of requests"


async def test_copies_that_fail_or_find_no_room_harm_nothing(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, shadow = split.gateway, split.schedulers["three"]
    monkeypatch.setattr(routes, "MAX_SHADOWS", 2)
    shadow.answers_submits = False
    await split.set("prod", "three", one=1)
    for i in range(5, 10):
        assert await split.target(prompt=tokens(i)) == "one"
    ends = gateway.streams.metrics.models["three"].ends
    assert ends["dropped"] == 3
    await shadow.stop()
    await until(lambda: ends["failed"] == 2)
    assert await split.target() == "one"
    gateway.clients.remove(gateway.clients[2])
    assert await split.target() == "one"
    await until(lambda: ends["dropped"] == 4)


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (route("", {"one": 1}), "route.name is ''"),
        (route("x\n", {"one": 1}), "printable"),
        (route("x", {"": 1}), "must be 1 to 32 names"),
        (route("x", {}, "one"), "there is no route 'x'; routes: 'prod'"),
        (route("x", {"one": 0, "two": 0}), "not all 0"),
        (route("x", {"one": 1_000_001}), "from 0 to 1000000"),
        (route("x", {"one": 1}, "one"), "none the shadow"),
        (route("x", {"prod": 1}), "model 'prod' is not served here"),
        (route("x", {"one": 1, "own": 1}), "model 'own' is not served here"),
        (route("x", {"nope": 1}), "model 'nope' is not served here; served models: 'one', 'prod', 'three', 'two'"),
        (route("x", {"one": 1}, "nope"), "model 'nope' is not served here"),
        (route("two", {"three": 1}), "'two' is a route; name its targets"),
    ],
)
async def test_routes_that_are_not_possible_are_refused(split: Split, given: pb.Route, words: str) -> None:
    await split.set("prod", one=1, two=1)
    with pytest.raises(grpc.aio.AioRpcError, match=words.replace("'", ".")) as caught:
        await split.gateway.admin.SetRoute(pb.SetRouteRequest(route=given))
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    listed = await split.gateway.admin.ListRoutes(pb.ListRoutesRequest())
    assert list(listed.routes) == [route("prod", {"one": 1, "two": 1})]


async def test_a_file_is_written_and_followed_and_a_bad_one_is_ignored(split: Split, tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    await split.set("prod", one=3)
    assert json.loads(path.read_text()) == {"routes": [{"name": "prod", "targets": {"one": 3}}]}
    path.write_text("{")
    await asyncio.sleep(1.1)
    assert await split.target() == "one"
    path.write_text('{"routes": [{"name": "prod", "targets": {"two": 1}}]}')
    await until(lambda: split.gateway.directory.routes.rows["prod"].targets == {"two": 1})
    assert await split.target() == "two"
    with pytest.raises(grpc.aio.AioRpcError, match="there is no route 'nope'; routes: 'prod'"):
        await split.set("nope")
    path.write_text('{"routes": [{"name": "a", "targets": {"b": 1}}, {"name": "b", "targets": {"c": 1}}]}')
    with pytest.raises(RoutesError, match="'b' is a route"):
        ModelRoutes(FileTable(path))
    with pytest.raises(ServiceError, match="cannot be changed"):
        await put(ModelRoutes(FileTable(Path("/proc/routes.json"))), "x", one=1)
    with pytest.raises(ServiceError, match="--redis or --routes"):
        await put(ModelRoutes(), "x", one=1)


@contextlib.asynccontextmanager
async def tables(url: str, count: int) -> AsyncIterator[list[ModelRoutes]]:
    found = [ModelRoutes(RedisTable(Server(url), "test")) for _ in range(count)]
    for table in found:
        table.start()
    try:
        yield found
    finally:
        for table in found:
            await table.close()


async def test_gateways_share_a_table_that_outlives_redis(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "POLL_S", 0.02)
    redis_server.stop()
    redis_server.start()
    async with tables(redis_server.url, 2) as (first, second):
        await asyncio.gather(put(first, "r0", m=1), put(second, "r1", m=1))
        await until(lambda: set(first.rows) == set(second.rows) == {"r0", "r1"})
        with pytest.raises(ServiceError, match="'r1' is a route"):
            await put(first, "x", r1=1)
        redis_server.stop()
        with pytest.raises(UnavailableError, match="Redis, which keeps the routes"):
            await put(first, "x", m=1)
        await asyncio.sleep(0.1)
        assert set(first.rows) == {"r0", "r1"}
        redis_server.start()  # empty
        await put(second, "r0")
        await until(lambda: set(first.rows) == set(second.rows) == {"r1"})
    async with tables(redis_server.url, 1) as (later,):
        await until(lambda: set(later.rows) == {"r1"})


async def test_before_the_table_is_read_an_unknown_name_is_retried(split: Split) -> None:
    split.gateway.directory.routes.is_read = False
    await split.gateway.directory.routes.close()
    assert (await refused(split.gateway.generate(model="prod"))).code() == grpc.StatusCode.UNAVAILABLE
    assert await split.target(model="one") == ""
