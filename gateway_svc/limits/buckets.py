"""Counts of one owner: two buckets (requests, tokens) and the open streams, in this process or in Redis.

A bucket fills at its rate. A request is admitted if both buckets are above zero. Its largest cost is taken, so a bucket
can become negative. The unused part is returned when the request ends. So the average never exceeds the rate, and a
request larger than a bucket still runs. Generic cell rate algorithm: a bucket is stored as the time when it is full.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_svc.limits.settings import OwnerLimits
from svc_common.redis.connect import call_errors, connect
from svc_common.redis.server import Availability, RedisServer

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


class RateBuckets(Protocol):
    """Counts requests of all owners."""

    async def take(self, owner: str, limits: OwnerLimits, take: Take) -> Verdict: ...
    async def give_back(self, owner: str, limits: OwnerLimits, stream_id: str, num_tokens: int) -> None:
        """End a stream and return its unused tokens."""

    async def keep(self, streams: list[tuple[str, str]]) -> None:
        """Renew the counts of open streams (owner, id). Must be called more often than every STREAM_TTL_S."""

    async def close(self) -> None: ...


def rates(limits: OwnerLimits) -> tuple[float, float]:
    """Requests and tokens per second; 0: no limit."""
    return limits.requests_per_s or 0.0, (limits.tokens_per_min or 0.0) / 60


@dataclass(slots=True)
class _Counts:
    full_at: list[float] = field(default_factory=lambda: [0.0, 0.0])
    streams: set[str] = field(default_factory=set)


class LocalBuckets:
    """Counts in this process only."""

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
        counts = self._counts[owner]
        counts.streams.discard(stream_id)
        if rate := rates(limits)[1]:
            counts.full_at[1] -= num_tokens / rate
        if not counts.streams and max(counts.full_at) <= self._clock():
            del self._counts[owner]

    async def keep(self, streams: list[tuple[str, str]]) -> None:
        """Streams of this process need no renewal."""

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
    """Counts in Redis, for all gateways. While Redis does not answer, each process counts on its own.

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
