"""The executor of tool calls and its journals: a file and Redis."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from quire_client import ToolCall
from quire_client.executor import CallUnfinished, Executor, FileJournal, RedisJournal

from tests.processes.redis_server import RedisServer

CALL = ToolCall("call_1", "f", '{"x": 1}')
LINE = b'{"id": "call_1", "call": "[\\"f\\", \\"{\\\\\\"x\\\\\\": 1}\\"]"}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield redis.Redis.from_url(running.url)


@pytest.fixture(params=["file", "redis"])
def journal(request: pytest.FixtureRequest, tmp_path: Path, server: Any) -> FileJournal | RedisJournal:
    server.flushall()
    return FileJournal(tmp_path / "calls.jsonl") if request.param == "file" else RedisJournal(server)


def fail(call: ToolCall) -> str:
    raise OSError(f"no network for {call.name}")


def test_a_call_runs_once(journal: FileJournal | RedisJournal) -> None:
    calls: list[ToolCall] = []
    executor = Executor(journal)
    for _ in range(3):
        assert executor.run(CALL, lambda call: calls.append(call) or "sun") == "sun"  # type: ignore[func-returns-value]

    async def other(call: ToolCall) -> str:
        return f"rain {call.id}"

    assert asyncio.run(executor.run_async(CALL, other)) == "sun"
    assert asyncio.run(executor.run_async(ToolCall("call_2", "f", ""), other)) == "rain call_2"
    assert calls == [CALL]
    for changed in (ToolCall("call_1", "g", '{"x": 1}'), ToolCall("call_1", "f", '{"x": 2}')):
        with pytest.raises(ValueError, match="call id 'call_1' was used for"):
            executor.run(changed, fail)


def test_a_call_without_a_result_is_the_choice_of_the_user(journal: FileJournal | RedisJournal) -> None:
    with pytest.raises(OSError, match="no network"):
        Executor(journal).run(CALL, fail)
    with pytest.raises(CallUnfinished, match="call_1"):
        Executor(journal).run(CALL, fail)
    assert Executor(journal, reruns=True).run(CALL, lambda call: "again") == "again"
    assert Executor(journal).run(CALL, fail) == "again"


def test_a_claim_that_redis_got_twice_is_one_claim(server: Any) -> None:
    """The client sends SET again when the connection breaks before the answer."""

    class Twice:
        def set(self, *args: Any, **options: Any) -> Any:
            server.set(*args, **options)
            return server.set(*args, **options)

        get = server.get

    server.flushall()
    assert Executor(RedisJournal(Twice())).run(CALL, lambda call: "sun") == "sun"


@pytest.mark.parametrize("kept", range(len(LINE)))
def test_a_torn_line_is_no_claim(tmp_path: Path, kept: int) -> None:
    """The process was killed while it wrote the claim: the tool was not called."""
    path = tmp_path / "calls.jsonl"
    first = b'{"id": "call_0", "call": "c", "result": "r"}\n'
    path.write_bytes(first + LINE[:kept])
    assert Executor(FileJournal(path)).run(CALL, lambda call: "sun") == "sun"
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[:2] == [first, LINE]
    assert json.loads(lines[2])["result"] == "sun"
    assert len(lines) == 3


def run_all(path: Path, done: Path) -> None:
    """Run 60 calls in four threads, as one of several processes."""
    journal = FileJournal(path)

    def execute(call: ToolCall) -> str:
        with done.open("a") as file:
            file.write(f"{call.id}\n")
        return call.id

    def one(number: int) -> None:
        with suppress(CallUnfinished):  # another thread or process runs it
            Executor(journal).run(ToolCall(f"call_{number % 60}", "f", ""), execute)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(120)))


def test_processes_share_a_file(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    paths = tmp_path / "calls.jsonl", tmp_path / "done"
    processes = [spawn.Process(target=run_all, args=paths) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(paths[1].read_text().splitlines()) == sorted(f"call_{number}" for number in range(60))
