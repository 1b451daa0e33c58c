"""The reader of the prefix index with a real Redis: it finds published entries and never delays its caller."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from prefix_index.keys import make_owner
from prefix_index.reader import RedisPrefixReader
from prefix_index.redis_index import RedisPrefixIndex
from tests.contract.test_prefix_index import W0, W1, cached, chain
from tests.processes.redis_server import RedisServer

DEADLINE_S = 60.0
SCHEDULER_A, SCHEDULER_B = 2**64 - 1, 9


@pytest.fixture
async def cleanup() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def reader(redis_server: RedisServer, cleanup: AsyncExitStack) -> RedisPrefixReader:
    redis_server.stop()
    redis_server.start()
    reader = RedisPrefixReader(redis_server.url, timeout_s=0.2, pause_s=0.05)
    reader.start()
    cleanup.push_async_callback(reader.close)
    await until(lambda: reader.is_up)
    return reader


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.005)


async def finds(reader: RedisPrefixReader, digests: list[bytes], expected: dict[int, int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await reader.lookup(digests) != expected:  # noqa: ASYNC110 - published by a task of another index
            await asyncio.sleep(0.005)


def publisher(server: RedisServer, cleanup: AsyncExitStack, scheduler_epoch: int) -> RedisPrefixIndex:
    owner = make_owner(f"host:{scheduler_epoch}", scheduler_epoch)
    index = RedisPrefixIndex(server.url, owner=owner, snapshot=list, lease_ttl_s=0.6)
    index.start()
    cleanup.push_async_callback(index.close)
    return index


async def test_lookup_gives_the_best_worker_of_each_scheduler(
    reader: RedisPrefixReader, redis_server: RedisServer, cleanup: AsyncExitStack
) -> None:
    digests = chain(100)
    first, second = (publisher(redis_server, cleanup, epoch) for epoch in (SCHEDULER_A, SCHEDULER_B))
    first.register_worker(*W0, "127.0.0.1:1")
    second.register_worker(*W1, "127.0.0.1:2")
    first.publish(cached(W0, digests[:70]))
    second.publish(cached(W1, digests[:2]))
    await finds(reader, digests, {SCHEDULER_A: 70, SCHEDULER_B: 2})
    first.forget(*W0)
    await finds(reader, digests, {SCHEDULER_B: 2})
    assert await reader.lookup([]) == {}


async def test_a_lost_server_causes_no_delay_until_it_returns(
    reader: RedisPrefixReader, redis_server: RedisServer, cleanup: AsyncExitStack
) -> None:
    digests = chain(3)
    redis_server.stop()
    await reader.lookup(digests)
    await until(lambda: not reader.is_up)
    for _ in range(1000):
        assert await reader.lookup(digests) == {}
    assert reader.num_errors < 100  # the first lookup and later pings
    redis_server.start()
    await until(lambda: reader.is_up)
    index = publisher(redis_server, cleanup, SCHEDULER_A)
    index.register_worker(*W0, "127.0.0.1:1")
    index.publish(cached(W0, digests))
    await finds(reader, digests, {SCHEDULER_A: 3})


async def test_a_frozen_server_gets_one_lookup(reader: RedisPrefixReader, redis_server: RedisServer) -> None:
    digests = chain(3)
    redis_server.signal(signal.SIGSTOP)
    try:
        for _ in range(100):
            assert await reader.lookup(digests) == {}
        assert reader.num_errors < 10  # the first lookup and later pings
        assert not reader.is_up
    finally:
        redis_server.signal(signal.SIGCONT)
    await until(lambda: reader.is_up)


async def test_a_malformed_url() -> None:
    with pytest.raises(ValueError):
        RedisPrefixReader("http://x")
