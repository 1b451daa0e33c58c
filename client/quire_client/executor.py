"""Runs each tool call once, by its id and a journal. docs/replay.md#tool-calls-exactly-once has the contract."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from quire_client.types import ToolCall


class CallUnfinished(Exception):
    """The call was begun and has no result: it runs elsewhere, or its process ended before the result was stored."""


class FileJournal:
    """A file with a JSON line per claim and result, each written through to the disk. Threads and processes of one
    machine may share it. Its content is kept in memory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        self._end = 0  # bytes that were read
        self._lock = threading.Lock()
        with self._locked():
            folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        os.fsync(folder)  # the name of a new file
        os.close(folder)

    def claim(self, call_id: str, call: str) -> dict[str, Any] | None:
        """Store that a call begins. If it was claimed before: its `call`, and its `result` if it has one."""
        with self._locked() as file:
            if call_id not in self._entries:
                _append(file, {"id": call_id, "call": call})
                return None
            return self._entries[call_id]

    def finish(self, call_id: str, call: str, result: str) -> None:
        """Store the result of a call."""
        with self._locked() as file:
            _append(file, {"id": call_id, "result": result})

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        with self._lock, open(self._path, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):  # its process was killed while it wrote
                    file.truncate(self._end)
                    break
                entry = json.loads(line)
                self._entries.setdefault(entry["id"], {}).update(entry)
                self._end += len(line)
            yield file


def _append(file: BinaryIO, entry: dict[str, str]) -> None:
    file.write(json.dumps(entry).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


class RedisJournal:
    """Keys in Redis. `redis`: a synchronous client of the package redis. `ttl_s`: lifetime of an entry; None: forever.

    A claim is as durable as Redis is configured to be.
    """

    def __init__(self, redis: Any, *, prefix: str = "quire:call:", ttl_s: int | None = None) -> None:
        self._redis, self._prefix, self._ttl_s = redis, prefix, ttl_s

    def claim(self, call_id: str, call: str) -> dict[str, Any] | None:
        mine = json.dumps({"call": call, "claim": uuid.uuid4().hex})
        if self._redis.set(self._prefix + call_id, mine, nx=True, ex=self._ttl_s):
            return None
        found = json.loads(self._redis.get(self._prefix + call_id) or json.dumps({"call": call}))
        return None if found == json.loads(mine) else dict(found)  # equal: the client has sent the claim twice

    def finish(self, call_id: str, call: str, result: str) -> None:
        self._redis.set(self._prefix + call_id, json.dumps({"call": call, "result": result}), ex=self._ttl_s)


class Executor:
    """Runs tool calls once each. `reruns`: run a call again that was begun and has no result (at least once); without
    it, such a call raises CallUnfinished (at most once).
    """

    def __init__(self, journal: FileJournal | RedisJournal, *, reruns: bool = False) -> None:
        self._journal = journal
        self._reruns = reruns

    def run(self, call: ToolCall, function: Callable[[ToolCall], str]) -> str:
        """The result of the call, from the journal or from `function`. Raises CallUnfinished, ValueError for
        an id that had another name or other arguments, what `function` raises (the call then has no result), and the
        errors of the journal.
        """
        known = self._begin(call)
        return self._end(call, function(call)) if known is None else known

    async def run_async(self, call: ToolCall, function: Callable[[ToolCall], Awaitable[str]]) -> str:
        """The same for a coroutine function."""
        known = await asyncio.to_thread(self._begin, call)
        return await asyncio.to_thread(self._end, call, await function(call)) if known is None else known

    def _begin(self, call: ToolCall) -> str | None:
        """The known result; None: run the call."""
        found = self._journal.claim(call.id, _text(call))
        if found is None:
            return None
        if found["call"] != _text(call):
            raise ValueError(f"call id {call.id!r} was used for {found['call']} and is used for {_text(call)}")
        if "result" not in found and not self._reruns:
            raise CallUnfinished(f"{call.id} ({call.name}) was begun and has no result; ask the tool by this id")
        return found.get("result")

    def _end(self, call: ToolCall, result: str) -> str:
        self._journal.finish(call.id, _text(call), result)
        return result


def _text(call: ToolCall) -> str:
    return json.dumps([call.name, call.arguments])
