"""Counts of one owner: two buckets (requests, tokens) and the open streams, in this process or in Redis.

A bucket fills at its rate. A request is admitted if both buckets are above zero. Its largest cost is taken, so a bucket
can become negative. The unused part is returned when the request ends. So the average never exceeds the rate, and a
request larger than a bucket still runs. Generic cell rate algorithm: a bucket is stored as the time when it is full.
"""

from __future__ import annotations

import asyncio
import math
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from svc_common.config import SettingError
from svc_common.redis.connect import call_errors, connect
from svc_common.redis.server import Availability, RedisServer
from svc_common.security.tls import Reread


class LimitsError(SettingError):
    """The file cannot be used; the message names the table and the setting."""


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """The limits of one owner. None: no limit."""

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_streams: int | None = None
    max_rows: int | None = None
    record_bytes: int | None = None
    max_records: int | None = None
    min_priority: int | None = None
    models: frozenset[str] | None = None

    @property
    def is_counted(self) -> bool:
        """Whether requests must be counted."""
        return not (self.requests_per_s is self.tokens_per_min is self.max_streams is self.max_rows is None)


NO_LIMITS = OwnerLimits()
RANGES = {
    "requests_per_s": (0.001, 1e6), "tokens_per_min": (1, 1e12), "max_streams": (1, 10**6), "max_rows": (1, 10**6),
    "record_bytes": (1, 2**50), "max_records": (1, 10_000), "min_priority": (-1000, 1000),
}  # fmt: skip
WHOLE = ("max_streams", "max_rows", "record_bytes", "max_records", "min_priority")


class LimitsFile:
    """The file of --key-limits: a table of limits per owner, read again when it changes.

        [default]                     # owners without a table of their own
        requests_per_s = 20
        tokens_per_min = 200_000      # prompt and output tokens
        max_streams = 50              # open requests
        max_rows = 64                 # samples and beams of open requests
        record_bytes = 268_435_456    # all stored requests and sessions (docs/sessions.md)
        max_records = 10_000
        min_priority = 0
        models = ["llama", "qwen"]

        [owners.team-a]               # overrides these settings; the others are from [default]
        tokens_per_min = 2_000_000

    An invalid new version is logged, and the previous limits stay in force.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = Reread(lambda: read_limits(path), "limits", clock)

    def of(self, owner: str) -> OwnerLimits:
        default, owners = self._file()
        return owners.get(owner, default)


def read_limits(path: Path) -> tuple[OwnerLimits, dict[str, OwnerLimits]]:
    """The default limits, and those of the named owners. Raises LimitsError."""
    where = f"--key-limits {path}"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LimitsError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    owners = tables.pop("owners", {})
    default = _checked(tables.pop("default", {}), f"{where}: [default]")
    if tables or not isinstance(owners, dict):
        raise LimitsError(f"{where}: {', '.join(tables) or 'owners'} is not a table; use [default] and [owners.NAME]")
    return OwnerLimits(**default), {
        owner: OwnerLimits(**default | _checked(table, f"{where}: [owners.{owner}]")) for owner, table in owners.items()
    }


def _checked(table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise LimitsError(f"{where} is not a table")
    return {name: _value(name, value, where) for name, value in table.items()}


def _value(name: str, value: Any, where: str) -> Any:
    if name == "models":
        if not isinstance(value, list) or not all(isinstance(model, str) for model in value):
            raise LimitsError(f"{where}: models is not a list of names")
        return frozenset(value)
    if name not in RANGES:
        known = ", ".join(field.name for field in fields(OwnerLimits))
        raise LimitsError(f"{where}: {name} is not a limit; there are {known}")
    low, high = RANGES[name]
    kinds = (int,) if name in WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or not low <= value <= high:
        noun = "a whole number" if name in WHOLE else "a number"
        raise LimitsError(f"{where}: {name} is {value!r}; must be {noun} from {low:g} to {high:g}")
    return value


REQUEST_BURST_S = 1.0  # a bucket's size is its rate times this time; a full bucket admits any request
TOKEN_BURST_S = 2.0
STREAM_TTL_S = 30.0  # after a gateway dies, its streams are counted for this long
NAMES = ("requests_per_s", "tokens_per_min", "max_streams", "max_rows")


@dataclass(frozen=True, slots=True)
class Take:
    """One request: its stream, and its largest number of tokens. Without a stream id, none is opened. `num_requests` is
    0 if the request was counted when it arrived.
    """

    stream_id: str  # ROWS:ID; see `rows_of`
    num_tokens: int
    num_requests: int = 1


def rows_of(stream_id: str) -> int:
    """How many rows of workers a stream may have: its samples or beams."""
    num_rows, separator, _ = stream_id.partition(":")
    return int(num_rows) if separator and num_rows.isdecimal() else 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request is admitted; if not, which limit was reached and when to retry."""

    limit: str = ""
    retry_after_s: float = 0.0


ADMITTED = Verdict()


def rates(limits: OwnerLimits) -> tuple[float, float]:
    """Requests and tokens per second; 0: no limit."""
    return limits.requests_per_s or 0.0, (limits.tokens_per_min or 0.0) / 60


@dataclass(slots=True)
class _Counts:
    full_at: list[float] = field(default_factory=lambda: [0.0, 0.0])
    streams: set[str] = field(default_factory=set)


class LocalBuckets:
    """Counts requests of all owners, in this process only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Counts] = defaultdict(_Counts)

    async def take(self, owner: str, limits: OwnerLimits, take: Take) -> Verdict:
        now, counts = self._clock(), self._counts[owner]
        for i, (rate, burst_s) in enumerate(zip(rates(limits), (REQUEST_BURST_S, TOKEN_BURST_S), strict=True)):
            wait_s = counts.full_at[i] - now - burst_s
            if rate and wait_s > 0 and (i or take.num_requests):
                return Verdict(NAMES[i], wait_s)
        opens = bool(take.stream_id)
        if opens and limits.max_streams is not None and len(counts.streams) >= limits.max_streams:
            return Verdict(NAMES[2], 1.0)
        num_rows = sum(map(rows_of, {*counts.streams, take.stream_id})) if opens and limits.max_rows is not None else 0
        if limits.max_rows is not None and num_rows > limits.max_rows:
            return Verdict(NAMES[3], 1.0)
        for i, (rate, cost) in enumerate(zip(rates(limits), (take.num_requests, take.num_tokens), strict=True)):
            if rate and cost:
                counts.full_at[i] = max(counts.full_at[i], now) + cost / rate
        if opens:
            counts.streams.add(take.stream_id)
        return ADMITTED

    async def give_back(self, owner: str, limits: OwnerLimits, stream_id: str, num_tokens: int) -> None:
        """End a stream and return its unused tokens."""
        counts = self._counts[owner]
        counts.streams.discard(stream_id)
        if rate := rates(limits)[1]:
            counts.full_at[1] -= num_tokens / rate
        if not counts.streams and max(counts.full_at) <= self._clock():
            del self._counts[owner]

    async def keep(self, streams: list[tuple[str, str]]) -> None:
        """Renew the counts of open streams (owner, id), more often than every STREAM_TTL_S. Those here need none."""

    async def close(self) -> None:
        """There is nothing to close."""


# KEYS: the two buckets, the streams. Times are seconds on Redis' clock. ARGV: request rate, token rate, cost in tokens,
# limit of streams (-1: none), stream id or empty, the three constants, cost in requests, limit of rows (-1: none).
# Returns 0 and 0 if the request is admitted, else the number of the limit and the wait in ms.
TAKE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local rates = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local bursts = {tonumber(ARGV[6]), tonumber(ARGV[7])}
local costs = {tonumber(ARGV[9]), tonumber(ARGV[3])}
local full = {}
for i = 1, 2 do
  full[i] = tonumber(redis.call('GET', KEYS[i]) or '0')
  local wait = full[i] - now - bursts[i]
  if rates[i] > 0 and wait > 0 and (i == 2 or costs[1] > 0) then return {i, math.ceil(wait * 1000)} end
end
local opens = ARGV[5] ~= ''
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
if opens and tonumber(ARGV[4]) >= 0 and redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[4]) then return {3, 1000} end
if opens and tonumber(ARGV[10]) >= 0 then
  local rows = tonumber(string.match(ARGV[5], '^(%d+):') or '1')
  for _, id in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
    if id ~= ARGV[5] then rows = rows + tonumber(string.match(id, '^(%d+):') or '1') end
  end
  if rows > tonumber(ARGV[10]) then return {4, 1000} end
end
for i = 1, 2 do
  if rates[i] > 0 and costs[i] > 0 then
    local at = math.max(full[i], now) + costs[i] / rates[i]
    redis.call('SET', KEYS[i], string.format('%.6f', at), 'PX', math.ceil((at - now) * 1000) + 60000)
  end
end
if opens then
  redis.call('ZADD', KEYS[3], now + ARGV[8], ARGV[5])
  redis.call('EXPIRE', KEYS[3], 600)
end
return {0, 0}"""
# KEYS: the bucket of tokens, the streams. ARGV: stream id, seconds to subtract from the time when the bucket is full.
GIVE_BACK = """
redis.call('ZREM', KEYS[2], ARGV[1])
local at = redis.call('GET', KEYS[1])
if at and tonumber(ARGV[2]) > 0 then
  redis.call('SET', KEYS[1], string.format('%.6f', tonumber(at) - ARGV[2]), 'KEEPTTL')
end
return 0"""
# KEYS: streams of owners. ARGV: time to live in seconds, then the id for each key.
KEEP = """
local time = redis.call('TIME')
for i = 1, #KEYS do
  redis.call('ZADD', KEYS[i], 'XX', time[1] + ARGV[1], ARGV[i + 1])
  redis.call('EXPIRE', KEYS[i], 600)
end
return 0"""


class RedisBuckets:
    """Counts in Redis, for all gateways, with the methods of LocalBuckets. While Redis does not answer, each process
    counts on its own.

    Raises ValueError for a malformed URL.
    """

    def __init__(self, server: RedisServer | str, *, namespace: str = "quire", timeout_s: float = 0.25) -> None:
        self._redis = connect(server, timeout_s)
        self._timeout_s = timeout_s
        self._prefix = f"{namespace}:limits:"
        self._local = LocalBuckets()
        self._server = Availability(
            "limits of owners hold for all gateways together",
            loss="limits of owners are counted by each gateway process",
        )

    async def take(self, owner: str, limits: OwnerLimits, take: Take) -> Verdict:
        # This process counts too, so that its counts are not empty when Redis stops.
        own = await self._local.take(owner, limits, take)
        most = -1 if limits.max_streams is None else limits.max_streams
        arguments = (
            *rates(limits),
            take.num_tokens,
            most,
            take.stream_id,
            REQUEST_BURST_S,
            TOKEN_BURST_S,
            STREAM_TTL_S,
            take.num_requests,
            -1 if limits.max_rows is None else limits.max_rows,
        )
        answer = await self._call(self._redis.eval(TAKE, 3, *self._keys(owner), *arguments))
        if answer is None:
            return own
        number, wait_ms = answer
        if not number:
            return ADMITTED
        if own is ADMITTED and take.stream_id:
            await self._local.give_back(owner, limits, take.stream_id, take.num_tokens)
        return Verdict(NAMES[number - 1], wait_ms / 1000)

    async def give_back(self, owner: str, limits: OwnerLimits, stream_id: str, num_tokens: int) -> None:
        await self._local.give_back(owner, limits, stream_id, num_tokens)
        rate = rates(limits)[1]
        sooner_s = num_tokens / rate if rate else 0.0
        _, tokens, streams = self._keys(owner)
        await self._call(self._redis.eval(GIVE_BACK, 2, tokens, streams, stream_id, sooner_s))

    async def keep(self, streams: list[tuple[str, str]]) -> None:
        if streams:
            keys = [self._keys(owner)[2] for owner, _ in streams]
            ids = [stream_id for _, stream_id in streams]
            await self._call(self._redis.eval(KEEP, len(keys), *keys, STREAM_TTL_S, *ids))

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, owner: str) -> tuple[str, str, str]:
        # The braces keep the keys of one owner on one node of a cluster.
        return tuple(f"{self._prefix}{{{owner}}}:{kind}" for kind in ("requests", "tokens", "streams"))  # type: ignore[return-value]

    async def _call(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await answer
        except call_errors() as error:
            self._server.went_down(error)
            return None
        self._server.came_up()
        return result
