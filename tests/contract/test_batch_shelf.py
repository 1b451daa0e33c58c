"""The shelves of files and batches behave the same: in Redis and in a folder."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_svc.batches.folder_shelf import FolderShelf
from gateway_svc.batches.lines import BATCH, FILE, UNCHECKED, LineAnswer, TakenChunk
from gateway_svc.batches.redis_shelf import RedisShelf
from svc_common.errors import UnavailableError
from tests.processes.redis_server import RedisServer

Shelf = RedisShelf | FolderShelf


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["redis", "folder"])
async def shelves(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> AsyncIterator[list[Shelf]]:
    """Two gateways' views of one empty shelf."""
    redis.flush()
    make = (lambda: RedisShelf(redis.url)) if request.param == "redis" else (lambda: FolderShelf(tmp_path))
    both: list[Shelf] = [make(), make()]
    yield both
    for shelf in both:
        await shelf.close()


async def test_documents(shelves: list[Shelf]) -> None:
    one, two = shelves
    for i in range(3):
        assert await one.create(FILE, f"a/file-{i}", b"%d" % i, 100.0 + i, 3)
    assert not await two.create(FILE, "a/file-3", b"3", 100.0, 3)
    assert await two.create(FILE, "b/file-3", b"3", 100.0, 3)
    assert await two.names(FILE, "a") == ["a/file-2", "a/file-1", "a/file-0"]
    assert await two.names(BATCH, "a") == []
    assert await one.load(["a/file-1", "a/file-9"]) == [(b"1", 0, {}), None]
    assert await two.swap("a/file-1", b"1", b"new", 500.0)
    assert not await one.swap("a/file-1", b"1", b"newer", 500.0)
    assert sorted(await one.due(101.5)) == ["a/file-0", "b/file-3"]
    await one.drop(FILE, "a/file-0")
    assert await two.load(["a/file-0"]) == [None]
    assert await two.names(FILE, "a") == ["a/file-2", "a/file-1"]
    assert await two.due(101.5) == ["b/file-3"]


async def test_parts(shelves: list[Shelf]) -> None:
    one, two = shelves
    assert not await one.add("a/file-0", b"lost", 4)
    await one.create(FILE, "a/file-0", b"", time.time() + 100, 10)
    assert all([await one.add("a/file-0", bytes([i]), 10) for i in range(5)])
    assert await two.load(["a/file-0"]) == [(b"", 50, {})]
    assert await two.parts("a/file-0", 1, 3) == [b"\1", b"\2", b"\3"]
    assert await two.parts("a/file-0", 5, 3) == []
    await two.drop(FILE, "a/file-0")
    assert await one.parts("a/file-0", 0, 3) == []


async def test_each_line_has_one_answer(shelves: list[Shelf]) -> None:
    """Two gateways answer the same chunks in random order, without leases, and one of them is late."""
    one, two = shelves
    for name in ("a/file-out", "a/file-err"):
        await one.create(FILE, name, b"", time.time() + 100, 10)
    await one.create(BATCH, "a/batch-1", b"doc", time.time() + 100, 10)
    assert await two.working() == ["a/batch-1"]
    assert await two.take("a/batch-1", 60.0) == TakenChunk(UNCHECKED, 1)
    await two.open("a/batch-1", 3)
    await one.open("a/batch-1", 9)  # the first one counts
    rng = random.Random(7)
    puts = [(chunk, line, shelf) for chunk in range(3) for line in range(20) for shelf in shelves]
    rng.shuffle(puts)
    for chunk, line, shelf in puts:
        answer = LineAnswer(line, "succeeded" if line % 3 else "errored", b"%d.%d" % (chunk, line), 1)
        await shelf.put("a/batch-1", chunk, answer, "a/file-out" if line % 3 else "a/file-err")
    found = await two.parts("a/file-out", 0, 1000) + await two.parts("a/file-err", 0, 1000)
    assert sorted(found) == sorted(b"%d.%d" % (chunk, line) for chunk in range(3) for line in range(20))
    assert await two.load(["a/batch-1"]) == [(b"doc", 0, {"succeeded": 39, "errored": 21})]
    for chunk in range(3):
        taken = await one.take("a/batch-1", 60.0)
        assert (taken.chunk, taken.left, taken.answered) == (chunk, 3 - chunk, set(range(20)))
        await one.finish("a/batch-1", chunk)
        await two.put("a/batch-1", chunk, LineAnswer(0, "succeeded", b"late", 1), "a/file-out")
    assert await one.take("a/batch-1", 60.0) == TakenChunk(None, 0)
    assert b"late" not in await two.parts("a/file-out", 0, 1000)
    await one.close_batch("a/batch-1")
    assert await two.working() == []


async def test_leases(shelves: list[Shelf]) -> None:
    one, two = shelves
    await one.create(BATCH, "a/batch-1", b"", time.time() + 100, 10)
    await one.open("a/batch-1", 2)
    chunks = {(await one.take("a/batch-1", 60.0)).chunk, (await two.take("a/batch-1", 0.05)).chunk}
    assert chunks == {0, 1}
    deadline = time.monotonic() + 10
    while (chunk := (await one.take("a/batch-1", 60.0)).chunk) is None:
        assert time.monotonic() < deadline
    await two.keep([("a/batch-1", chunk)], 60.0)
    assert await two.take("a/batch-1", 60.0) == TakenChunk(None, 2)
    await one.keep([("a/batch-1", chunk)], 0)
    assert await two.take("a/batch-1", 60.0) == TakenChunk(chunk, 2)


async def test_redis_that_does_not_answer_is_an_error(redis: RedisServer) -> None:
    shelf = RedisShelf("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError, match="Redis, which keeps files and batches"):
        await shelf.load(["a/file-1"])
    await shelf.close()
