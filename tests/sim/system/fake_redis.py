"""A Redis that can be slow, down, flushed or restored from an old snapshot. Knows the commands that RedisPrefixIndex
and RedisPrefixReader use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from prefix_index.redis_index import CLAIM_REVISION, FORGET_WORKER, NEXT_EPOCH, RAISE_COUNTER, WRITE_WEIGHTS

Value = bytes | set[bytes] | dict[str, bytes]


class RedisServer:
    """The data; one server for all schedulers and gateways. Keys do not expire, because a run is short."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.data: dict[bytes, Value] = {}
        self.is_away = False
        self.delay_s = 0.0003
        self.num_commands = 0
        self._snapshot: dict[bytes, Value] = {}

    def flush(self) -> None:
        self.data.clear()

    def save(self) -> None:
        """Take a snapshot for a later restart."""
        self._snapshot = {key: value if isinstance(value, bytes) else value.copy() for key, value in self.data.items()}

    def restart_with_old_data(self) -> None:
        self.data = {key: value if isinstance(value, bytes) else value.copy() for key, value in self._snapshot.items()}

    async def ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """One round trip. Raises ConnectionError while the server is away."""
        await asyncio.sleep(self.delay_s * (0.5 + self._rng.random()))
        if self.is_away:
            raise RedisConnectionError("connection refused")
        answers = [self._run(*command) for command in commands]
        await asyncio.sleep(self.delay_s)
        return answers

    def _run(self, name: str, key: Any, *args: Any) -> Any:
        self.num_commands += 1
        key = key.encode() if isinstance(key, str) else key
        command: Callable[..., Any] = getattr(self, f"_{name}")
        return command(key, *args)

    def _get(self, key: bytes) -> Any:
        return self.data.get(key)

    def _set(self, key: bytes, value: Any, nx: bool = False) -> bool | None:
        if nx and key in self.data:
            return None
        self.data[key] = _bytes(value)
        return True

    def _smembers(self, key: bytes) -> set[bytes]:
        return set(self.data.get(key, set()))  # type: ignore[arg-type]

    def _sadd(self, key: bytes, member: bytes) -> None:
        self.data.setdefault(key, set()).add(member)  # type: ignore[union-attr]

    def _srem(self, key: bytes, member: bytes) -> None:
        self.data.get(key, set()).discard(member)  # type: ignore[union-attr]

    def _hget(self, key: bytes, field: str) -> bytes | None:
        return self.data.get(key, {}).get(field)  # type: ignore[union-attr]

    def _hset(self, key: bytes, mapping: dict[str, str]) -> None:
        self.data.setdefault(key, {}).update({name: _bytes(value) for name, value in mapping.items()})  # type: ignore[union-attr]

    def _hmget(self, key: bytes, *fields: str) -> list[bytes | None]:
        return [self._hget(key, field) for field in fields]

    def _pexpire(self, key: bytes, ms: int) -> None:
        pass

    def _hdel(self, key: bytes, field: str) -> None:
        self.data.get(key, {}).pop(field, None)  # type: ignore[union-attr, call-arg, arg-type]

    def _eval(self, key: bytes, script: str, *args: str) -> Any:
        if script == CLAIM_REVISION:  # the simulated workers have one revision
            self._hset(key, {args[0]: args[1]})
            return b""
        if script == NEXT_EPOCH:
            value = self._counter(key) + 1
            self.data[key] = b"%d" % value
            return value
        if script == WRITE_WEIGHTS:
            if int(self._hget(key, "version") or b"0") < int(args[0]):
                self._hset(key, {"version": args[0], "record": args[1]})
            return self._hget(key, "record")
        if script == RAISE_COUNTER:
            self.data[key] = b"%d" % max(self._counter(key), int(args[0]))
            return 0
        if script != FORGET_WORKER:
            raise ValueError("a script that this server does not know")
        if [self._hget(key, "epoch"), self._hget(key, "owner")] == [args[0].encode(), args[1].encode()]:
            del self.data[key]
        return 0

    def _counter(self, key: bytes) -> int:
        return int(self.data.get(key, b"0"))  # type: ignore[arg-type]


class RedisClient:
    """The used part of redis.asyncio.Redis."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def pipeline(self, transaction: bool = True) -> Pipeline:
        return Pipeline(self._server)

    async def eval(self, script: str, num_keys: int, key: str, *args: str) -> int:
        return (await self._server.ask([("eval", key, script, *args)]))[0]

    async def hmget(self, key: str, *fields: str) -> list[bytes | None]:
        return (await self._server.ask([("hmget", key, *fields)]))[0]

    async def info(self, section: str) -> dict[str, Any]:
        await self._server.ask([])
        return {}

    async def ping(self) -> bool:
        await self._server.ask([])
        return True

    async def aclose(self) -> None:
        pass


class Pipeline:
    """Commands that are sent together."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._commands: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Pipeline]:
        if name.startswith("_"):
            raise AttributeError(name)

        def add(*args: Any, **kwargs: Any) -> Pipeline:
            self._commands.append((name, *args, *kwargs.values()))
            return self

        return add

    def eval(self, script: str, num_keys: int, key: str, *args: str) -> Pipeline:
        self._commands.append(("eval", key, script, *args))
        return self

    async def execute(self) -> list[Any]:
        commands, self._commands = self._commands, []
        return await self._server.ask(commands)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
