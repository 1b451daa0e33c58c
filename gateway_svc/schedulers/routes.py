"""Routes: names of models that stand for others. The table, the choice of a target, and copies for shadow targets.

A target is a model or an adapter by its own name, never another route, so a choice is one step and rows form no cycles.
The target of a conversation is chosen by weighted rendezvous hashing (Schindelhauer and Schomaker, 2005). So gateways
agree without a state, each target gets its part of the conversations, and a change of weights moves hardly more of them
than it must. What has begun is not chosen again: records and sessions name their target, and a stream that its client
continues has the revision of its target.

Redis loses its data when it restarts without persistence, so each gateway keeps the newest table that it has read, and
stores it again where it reads an older one. While Redis does not answer, the last table stays in force.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from quire.v1 import inference_pb2 as pb
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gateway_svc.callers.caller import current_caller, current_entry
from gateway_svc.request.field_errors import invalid
from request_fields.fields import DRAFT_FIELDS, LAST_PRIORITY
from svc_common.config import SettingError
from svc_common.errors import NotConfiguredError, NotFoundError, ServiceError, UnavailableError
from svc_common.redis.connect import answer_of, connect
from svc_common.redis.server import Availability, RedisServer
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

POLL_S = TIMEOUT_S = 1.0
LOST_S = 3 * POLL_S  # other gateways store a table that Redis has lost within this time after its start
TRIES = 5  # attempts to change a table that other gateways change too
MAX_ROUTES, MAX_TARGETS, MAX_NAME_CHARS, MAX_WEIGHT = 256, 32, 128, 1_000_000
MAX_SHADOWS, MAX_SHADOW_BYTES = 64, 64 << 20  # limits of the copies of one gateway that wait or run
NOT_COPIED = ("request_id", "resumable", "receipt", "session_id", "session_sample", "output", *DRAFT_FIELDS)

Rows = dict[str, pb.Route]
Routable = pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest
# Stores a version of the table in place of the expected one. KEYS: a hash. ARGV: expected and new version, the table.
PUT = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'table', ARGV[3])
return 1
"""


class RoutesError(SettingError):
    """The table cannot be used."""


def check_rows(rows: Mapping[str, pb.Route]) -> None:
    """Raise InvalidRequestError if a row, or the table as a whole, is not possible."""
    if len(rows) > MAX_ROUTES:
        raise invalid("route", f"is one too many; at most {MAX_ROUTES} are possible: remove one")
    for name, route in rows.items():
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise invalid("route.name", f"is {name[:MAX_NAME_CHARS]!r}; use 1 to {MAX_NAME_CHARS} printable characters")
        models = dict(route.targets)
        if not 0 < len(models) <= MAX_TARGETS or not models.keys().isdisjoint(("", route.shadow)):
            words = f"of {name!r} must be 1 to {MAX_TARGETS} names, none the shadow"
        elif max(models.values()) > MAX_WEIGHT or not any(models.values()):
            words = f"of {name!r} have weights {[*models.values()]}; from 0 to {MAX_WEIGHT}, not all 0"
        elif routes := ({*models, route.shadow} - {name, ""}) & rows.keys():
            words = f"of {name!r} are not possible: {min(routes)!r} is a route; name its targets"
        else:
            continue
        raise invalid("route.targets", words)


def conversation_key(request: Routable) -> bytes:
    """What all turns of a conversation have in common: the name that it has, else the first message of the user, else
    the whole input. The system message may change from turn to turn.
    """
    if isinstance(request, pb.GenerateRequest):
        if named := request.session_id or request.scheduling.conversation:
            return named.encode()
        messages = request.prompt.chat.messages
        first: Any = next((one for one in messages if one.role == "user"), request.prompt)
    else:
        first = next(iter(request.inputs if isinstance(request, pb.EmbedRequest) else request.pairs), request)
    return bytes(first.SerializeToString(deterministic=True))


def choose(route: pb.Route, request: Routable, models: Collection[str]) -> str:
    """The target for a conversation, one of `models`: that with the largest weight / -ln(uniform hash). Empty if none
    of these has a weight.
    """
    able = [model for model in models if route.targets[model]]
    if len(able) < 2:
        return "".join(able)
    key = xxh3_128_digest(f"{current_caller.get().owner}/{route.name}/".encode() + conversation_key(request))

    def rank(model: str) -> float:
        uniform = ((xxh3_64_intdigest(key + model.encode()) >> 12) + 0.5) / (1 << 52)  # in (0, 1)
        return route.targets[model] / -math.log(uniform)

    return max(able, key=rank)


# -- the table ---------------------------------------------------------------------------------------------------------


def table_of(rows: Rows) -> pb.ListRoutesResponse:
    return pb.ListRoutesResponse(routes=[rows[name] for name in sorted(rows)])


def rows_of(data: bytes) -> Rows:
    """The rows of a table in JSON. Raises RoutesError."""
    try:
        rows = {route.name: route for route in json_format.Parse(data or b"{}", pb.ListRoutesResponse()).routes}
        check_rows(rows)
    except (json_format.ParseError, UnicodeDecodeError, ServiceError) as error:
        raise RoutesError(f"this is not a table of routes: {error}") from None
    return rows


class FileTable:
    """The table in a file. Its version is the time of the last change. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[int, bytes]:
        """The version and the table; an empty one if there is no file."""
        return (self._path.stat().st_mtime_ns, self._path.read_bytes()) if self._path.exists() else (0, b"")

    async def load(self) -> tuple[int, bytes]:
        return self.read()

    async def store(self, expected: int, data: bytes) -> bool:
        """Store a table in place of this version. False if there is another one."""
        if self.read()[0] != expected:
            return False
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.write_bytes(data)
        new.replace(self._path)
        return True

    async def may_be_lost(self) -> bool:
        """A file is not lost."""
        return False

    async def close(self) -> None:
        """There is nothing to close."""


class RedisTable:
    """The table of a deployment in Redis. Its version is a time in ms. Raises UnavailableError."""

    def __init__(self, server: RedisServer, namespace: str) -> None:
        self._redis = connect(server, TIMEOUT_S)
        self.close = self._redis.aclose
        self._server = Availability("routes follow the table in Redis", "the last table of routes stays in force")
        self._key = f"{namespace}:routes"
        self._last = 0, b""

    async def load(self) -> tuple[int, bytes]:
        """The version and the table."""
        found, data = await self._call(self._redis.hmget(self._key, "version", "table"))
        version = int(found or 0)
        if version < self._last[0]:
            await self._put(version, *self._last)
        elif version:
            self._last = version, data
        return self._last

    async def store(self, expected: int, data: bytes) -> bool:
        """Store a table in place of this version. False if there is another one."""
        return await self._put(expected, max(expected + 1, time.time_ns() // 1_000_000), data)

    async def may_be_lost(self) -> bool:
        """Whether Redis has started so recently that another gateway may have the table that it lacks."""
        return int((await self._call(self._redis.info("server")))["uptime_in_seconds"]) < LOST_S

    async def _put(self, expected: int, version: int, data: bytes) -> bool:
        return bool(await self._call(self._redis.eval(PUT, 1, self._key, expected, version, data)))

    async def _call(self, call: Any) -> Any:
        return await answer_of(
            call, self._server, "the routes", UnavailableError, timeout_s=TIMEOUT_S, retry_after_s=POLL_S
        )


class ModelRoutes:
    """The table of this gateway. `rows` is one dictionary for the life of the gateway, read by other parts.

    Raises RoutesError or OSError for a file that cannot be used.
    """

    def __init__(self, table: FileTable | RedisTable | None = None) -> None:
        self.rows: Rows = rows_of(table.read()[1]) if isinstance(table, FileTable) else {}
        self.is_read = not isinstance(table, RedisTable)
        self._table = table
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the changes of other gateways until `close`."""
        if self._table is not None:
            self._keeper = asyncio.create_task(self._keep(self._table))

    async def close(self) -> None:
        if self._keeper is not None and self._table is not None:
            await cancel(self._keeper)
            await self._table.close()

    async def set(self, route: pb.Route, serves: Callable[[str], object]) -> None:
        """Set a row; remove it, if it has no targets. Its former targets that are served stay with weight 0, for what
        began there. Raises ServiceError.
        """
        if self._table is None:
            raise NotConfiguredError("this gateway keeps no routes; start the gateways with --redis or --routes FILE")
        try:
            for _ in range(TRIES):
                version, data = await self._table.load()
                rows = _changed(rows_of(data), route, serves)
                text = json_format.MessageToJson(table_of(rows), preserving_proto_field_name=True)
                if await self._table.store(version, text.encode()):
                    self._replace(rows)
                    return
        except (OSError, ValueError) as error:
            raise NotConfiguredError(f"the table of routes cannot be changed: {error}") from None
        raise UnavailableError("other gateways change the routes at this moment; retry", retry_after_s=POLL_S)

    def _replace(self, rows: Rows) -> None:
        self.rows.clear()
        self.rows.update(rows)

    async def _keep(self, table: FileTable | RedisTable) -> None:
        problem = ""
        while True:
            try:
                version, data = await table.load()
                self._replace(rows_of(data))
                self.is_read = self.is_read or version > 0 or not await table.may_be_lost()
                problem = ""
            except (ServiceError, ValueError, OSError) as error:
                if str(error) != problem:
                    log.warning("keeping the previous routes: %s", error)
                problem = str(error)
            await asyncio.sleep(POLL_S)


def _changed(rows: Rows, route: pb.Route, serves: Callable[[str], object]) -> Rows:
    before = rows.pop(route.name, None)
    if not route.targets and before is None:
        known = ", ".join(map(repr, sorted(rows))) or "none"
        raise NotFoundError(f"there is no route {route.name[:MAX_NAME_CHARS]!r}; routes: {known}", field="route.name")
    if route.targets:
        former = {model: 0 for model in before.targets if model != route.shadow and serves(model)} if before else {}
        rows[route.name] = pb.Route(name=route.name, targets=former | dict(route.targets), shadow=route.shadow)
    check_rows(rows)
    return rows


# -- shadows -----------------------------------------------------------------------------------------------------------


class Shadows:
    """Sends copies of requests to shadow targets, at the lowest priority, with `generate`.

    A request waits for none of this: `offer` makes a task or drops the copy, at once, and no result or error leaves the
    task. At most MAX_SHADOWS copies wait or run, and one prompt at a time is read.
    """

    def __init__(
        self,
        rows: Mapping[str, pb.Route],
        generate: Callable[[pb.GenerateRequest], AsyncGenerator[pb.GenerateResponse, None]],
        on_drop: Callable[[str], None],
    ) -> None:
        self._rows = rows
        self._generate = generate
        self._on_drop = on_drop
        self._reading = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], int] = {}  # bytes of each copy

    def offer(self, alias: str, request: pb.GenerateRequest) -> None:
        """A request of this route was sent."""
        route, num_bytes = self._rows.get(alias), request.ByteSize()
        if route is None or not route.shadow:
            return
        if len(self._tasks) >= MAX_SHADOWS or sum(self._tasks.values()) + num_bytes > MAX_SHADOW_BYTES:
            self._on_drop(route.shadow)
            return
        copy: Any = pb.GenerateRequest()
        copy.CopyFrom(request)
        for name in NOT_COPIED:
            copy.ClearField(name)
        copy.model, copy.joins_events, copy.scheduling.priority = route.shadow, True, LAST_PRIORITY
        copy.output.text = copy.output.token_ids = False
        context = contextvars.copy_context()
        context.run(current_entry.set, None)
        task = asyncio.get_running_loop().create_task(self._run(copy), context=context)
        self._tasks[task] = num_bytes
        task.add_done_callback(self._tasks.pop)

    async def _run(self, copy: pb.GenerateRequest) -> None:
        try:
            async with aclosing(self._generate(copy)) as events:
                async with self._reading:
                    await anext(events, None)
                async for _ in events:
                    pass
        except NotFoundError:
            self._on_drop(copy.model)
        except ServiceError as error:
            log.debug("a copy for shadow %s ended: %s", copy.model, error)
        except Exception:
            log.exception("a copy for shadow %s failed", copy.model)
