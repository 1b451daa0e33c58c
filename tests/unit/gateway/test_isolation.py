"""Isolation of tenants: the cache salts that schedulers get, over every way into the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb

from gateway_svc.callers.authenticator import ApiKeys, Authenticator, isolates_tenants
from gateway_svc.callers.caller import CallersError, tenant_salt
from gateway_svc.flags import make_parser
from gateway_svc.records.recorder import OutputRecorder
from gateway_svc.records.redis_fields import RedisFields
from gateway_svc.records.store import RecordStore
from tests.processes.redis_server import RedisServer
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, until
from tests.unit.gateway.test_http import HttpGateway

OWNERS = ("team-a", "team-b")
PROMPT = {"tokens": {"ids": list(range(5, 45))}}


@asynccontextmanager
async def isolating(scheduler: FakeScheduler, folder: Path, redis_url: str) -> AsyncIterator[TestGateway]:
    """A gateway with the keys `key-of-OWNER`."""
    for owner in OWNERS:
        (folder / owner).write_text(f"key-of-{owner}")
    recorder = OutputRecorder(RecordStore(RedisFields(redis_url)))
    admit = Authenticator(ApiKeys(folder)).admit
    async with TestGateway([scheduler.address], admit=admit, recorder=recorder, isolates_tenants=True) as gateway:
        await gateway.ready()
        recorder.start()
        yield gateway
        await recorder.close()


def key_of(owner: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer key-of-{owner}"),), "timeout": 60}


async def test_a_salt_belongs_to_one_tenant(
    scheduler: FakeScheduler, tmp_path: Path, redis_server: RedisServer
) -> None:
    scheduler.play([5])
    async with isolating(scheduler, tmp_path, redis_server.url) as gateway:
        for owner in OWNERS:
            for salt in ("", "own", ""):
                request = pb.GenerateRequest(prompt=PROMPT, scheduling={"cache_salt": salt, "tenant_id": "x"})
                async for _ in gateway.stub.Generate(request, **key_of(owner)):
                    pass
    salts = [submit.cache_salt for submit in scheduler.submits]
    assert salts == [tenant_salt(owner, salt) for owner in OWNERS for salt in ("", "own", "")]
    assert len(set(salts)) == 4


async def test_resumed_requests_keep_their_salt(
    scheduler: FakeScheduler, tmp_path: Path, redis_server: RedisServer
) -> None:
    other = FakeScheduler(scheduler.info, scheduler.bundle)
    await other.start()
    async with (
        isolating(scheduler, tmp_path, redis_server.url) as first,
        isolating(other, tmp_path, redis_server.url) as second,
    ):
        request = pb.GenerateRequest(request_id="r", prompt=PROMPT, scheduling={"cache_salt": "own"}, resumable=True)
        request.sampling.seed = 3
        calls = [first.stub.Generate(request, **key_of("team-a"))]
        await until(lambda: scheduler.submits)
        calls.append(second.stub.Resume(pb.ResumeRequest(request_id="r"), **key_of("team-a")))
        await until(lambda: other.submits)
        request.continuation.samples.add(index=0, output_token_ids=[7])
        calls.append(first.stub.Generate(request, **key_of("team-a")))
        await until(lambda: len(scheduler.submits) == 2)
        for call in calls:
            call.cancel()
    await other.stop()
    submits = [*scheduler.submits, *other.submits]
    assert [submit.cache_salt for submit in submits] == [tenant_salt("team-a", "own")] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/v1/responses", {"input": "hi", "background": True}),
    ],
)
async def test_requests_over_http_have_the_salt_of_their_tenant(
    scheduler: FakeScheduler, tmp_path: Path, redis_server: RedisServer, path: str, body: dict[str, Any]
) -> None:
    scheduler.play([5])
    async with isolating(scheduler, tmp_path, redis_server.url) as gateway:
        authenticator = Authenticator(ApiKeys(tmp_path))
        async with HttpGateway(gateway, authenticator) as http:
            headers = {"authorization": "Bearer key-of-team-b"}
            async with http.session.post(path, json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
            async with asyncio.timeout(30.0):
                await until(lambda: scheduler.submits)
    assert [submit.cache_salt for submit in scheduler.submits] == [tenant_salt("team-b", "")]


def test_salts_are_unambiguous() -> None:
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", ":b"), ("1:a", "b"), ("1", "1:ab"), ("a", ""), ("", "")]
    salts = {tenant_salt(owner, salt) for owner, salt in pairs}
    assert len(salts) == len(pairs)
    assert max(len(salt.encode()) for salt in salts) <= 128


@pytest.mark.parametrize(
    ("flags", "isolates"),
    [
        ([], False),
        (["--isolation=none"], False),
        (["--api-keys=k"], True),
        (["--api-keys=k", "--isolation=tenant"], True),
        (["--api-keys=k", "--isolation=none"], False),
    ],
)
def test_tenants_are_isolated_where_clients_have_keys(flags: list[str], isolates: bool) -> None:
    assert isolates_tenants(make_parser().parse_args(["--scheduler=a:1", *flags])) is isolates


def test_isolation_without_tenants_stops_the_start() -> None:
    with pytest.raises(CallersError, match="--isolation tenant needs --api-keys"):
        isolates_tenants(make_parser().parse_args(["--scheduler=a:1", "--isolation=tenant"]))
