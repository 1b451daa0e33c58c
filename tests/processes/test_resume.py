"""Resume with real services: a client that has only the id of its request continues it on another gateway."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient, Delta, InvalidRequest, RequestNotFound
from quire_client.demo import demo_model_dir

from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, wait_idle

OPTIONS: dict[str, Any] = {"prompt": "What does", "max_tokens": 400, "ignore_eos": True, "seed": 5, "temperature": 0.9}


class Running:
    """One scheduler, one worker, Redis, and gateways that a test may kill."""

    def __init__(self, stack: Stack, redis: RedisServer) -> None:
        self.stack = stack
        self.redis = redis
        self.scheduler = stack.start_scheduler("--redis", redis.url)
        stack.start_worker(self.scheduler, demo_model_dir(), "--kv-cache-memory", "64M")

    def start_gateway(self, *flags: str) -> Service:
        return self.stack.start_gateway(self.scheduler, flags=("--redis", self.redis.url, *flags))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        yield Running(stack, redis)


async def read(stream: Any, num_tokens: int) -> list[Delta]:
    """Deltas until there are at least this many tokens."""
    deltas: list[Delta] = []
    while sum(len(delta.token_ids) for delta in deltas) < num_tokens:
        deltas.append(await anext(stream))
    return deltas


async def test_a_client_with_only_the_id_continues_after_its_gateway_was_killed(running: Running) -> None:
    first, second = running.start_gateway(), running.start_gateway()
    async with (
        await running.stack.connect(first) as client,
        await running.stack.connect(second) as other,
    ):
        expected = await other.generate(**OPTIONS)
        async with client.stream(**OPTIONS, resumable=True, request_id="r", resume=False) as stream:
            begun = await read(stream, 100)
            first.kill()
        token_ids = [id_ for delta in begun for id_ in delta.token_ids]
        text = "".join(delta.text for delta in begun)

        # The stream breaks again, without a kill, when the client has a part of the rest.
        async with other.resume("r", after=len(token_ids)) as stream:
            part = await read(stream, 100)
        token_ids += [id_ for delta in part for id_ in delta.token_ids]
        text += "".join(delta.text for delta in part)
        async with other.resume("r", after=len(token_ids)) as stream:
            rest = await stream.result()
        assert token_ids + list(rest.token_ids) == list(expected.token_ids)
        assert text + rest.text == expected.text
        assert rest.usage.output_tokens == 400

        # Finished: served from the record, as a whole.
        async with other.resume("r") as stream:
            whole = await stream.result()
        assert (whole.token_ids, whole.text, whole.seed) == (expected.token_ids, expected.text, 5)
        await wait_idle(running.stack, other)


async def test_resume_takes_over_a_request_that_still_runs(running: Running) -> None:
    first, second = running.start_gateway(), running.start_gateway()
    async with (
        await running.stack.connect(first) as client,
        await running.stack.connect(second) as other,
    ):
        expected = await other.generate(**OPTIONS, n=2)
        async with client.stream(**OPTIONS, n=2, resumable=True, request_id="r", resume=False) as stream:
            await read(stream, 20)
            async with other.resume("r", after={0: 3, 1: 10}) as resumed:
                result = await resumed.result()
            for sample, whole, after in zip(result.samples, expected.samples, (3, 10), strict=True):
                assert sample.token_ids == whole.token_ids[after:]
                assert whole.text.endswith(sample.text)
        await wait_idle(running.stack, other)


async def test_records_belong_to_the_owner_of_the_key(running: Running, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "team-a").write_text("key-a")
    (keys / "team-b").write_text("key-b")
    gateway = running.start_gateway("--api-keys", str(keys))
    gateway.wait_ready()
    async with (
        await AsyncClient.connect(gateway.address, api_key="key-a") as client,
        await AsyncClient.connect(gateway.address, api_key="key-b") as stranger,
    ):
        while not await client.models():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.05)
        whole = await client.generate(**OPTIONS, resumable=True, request_id="r")
        with pytest.raises(RequestNotFound):
            async with stranger.resume("r"):
                pass
        async with client.resume("r") as stream:
            assert (await stream.result()).token_ids == whole.token_ids


async def test_records_are_encrypted_limited_and_expire(running: Running, tmp_path: Path) -> None:
    key_file = tmp_path / "record-keys"
    key_file.write_bytes(base64.b64encode(os.urandom(32)))
    flags = ("--record-key-file", str(key_file), "--max-record-bytes", "3K", "--record-ttl-s", "50")
    gateway = running.start_gateway(*flags)
    async with await running.stack.connect(gateway) as client:
        whole = await client.generate(**OPTIONS, resumable=True, request_id="r")
        with running.redis.client() as redis:
            assert 0 < redis.pttl("quire:record:r") <= 50_000
            assert b"What does" not in b"".join(redis.hgetall("quire:record:r").values())
        async with client.resume("r", after=10) as stream:
            assert (await stream.result()).token_ids == whole.token_ids[10:]
        with pytest.raises(InvalidRequest, match="--max-record-bytes"):
            await client.generate("word " * 900, max_tokens=1, resumable=True)


async def test_no_stream_goes_on_with_other_defaults(tmp_path: Path) -> None:
    """Two deployments of one checkpoint, of which one has another generation_config.json: a stream whose
    gateway is lost waits for a gateway of its own deployment."""
    folder = shutil.copytree(demo_model_dir(), tmp_path / "model" / demo_model_dir().name)
    (folder / "generation_config.json").write_text('{"temperature": 1.6}')
    options: dict[str, Any] = {"prompt": "What does", "max_tokens": 300, "ignore_eos": True, "seed": 5}
    with Stack(tmp_path) as stack:
        gateways = []
        for model in (demo_model_dir(), folder):
            scheduler = stack.start_scheduler()
            stack.start_worker(scheduler, model, "--kv-cache-memory", "64M")
            gateways.append(stack.start_gateway(scheduler))
        async with await stack.connect(gateways[0]) as client, await stack.connect(gateways[1]) as other:
            answers = [(await one.generate(**options)).token_ids for one in (client, other)]
        assert answers[0][:100] != answers[1][:100]
        async with (
            await AsyncClient.connect([gateway.address for gateway in gateways], timeout_s=120.0) as client,
            client.stream(**options) as stream,
        ):
            begun = [id_ for delta in await read(stream, 100) for id_ in delta.token_ids]
            own = [answer[:100] for answer in answers].index(tuple(begun[:100]))
            gateways[own].kill()
            gateways[own].start()
            rest = [id_ async for delta in stream for id_ in delta.token_ids]
        assert (*begun, *rest) == answers[own]
