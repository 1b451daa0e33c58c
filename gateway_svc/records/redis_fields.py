"""The fields of records in Redis (commands of 6.2): one hash per record, which expires after its last write.

<namespace>:record:<id>   the fields of store.py, and
  run, lease, size        run that writes the record, end of its lease (ms, server's clock), bytes of all values
  keep                    end of its pin (ms); until then the record has no time to live, so volatile-lru keeps it
  refs                    number of copies that share it
<namespace>:pins:<owner>, <namespace>:pinned
                          sorted sets of record ids by the end of the pin, of one owner and of all; without time to live
<namespace>:sessions:<owner>
                          sorted set of record ids by the time when a session was listed
<namespace>:records:<owner>
                          set of the record ids of an owner whose records are limited
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.records.fields import (
    LEASE_S,
    MAX_BYTES,
    MAX_LISTED,
    NO_LIMITS,
    TTL_S,
    Lifetime,
    RecordLimits,
    Update,
    owner_of,
)
from svc_common.errors import RecordsUnavailableError
from svc_common.redis.connect import answer_of, connect
from svc_common.redis.server import Availability, RedisServer

RETRY_S = 1.0
OWN = (b"run", b"lease", b"size", b"keep", b"refs")
LIST_TTL_S = 604_800
SHARED = b"shared"

MAX_SWEPT = 64  # ended pins that one call looks at

# `expire` renews a record and the one that it shares; `drop` deletes it, and that one with its last copy.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function renew(key, ttl, keep)
  keep = math.max(keep, tonumber(redis.call('HGET', key, 'keep')) or 0)
  if keep > now then
    redis.call('PERSIST', key)
  else
    redis.call('PEXPIRE', key, ttl)
  end
  return keep
end
local function expire(ttl)
  local keep = renew(KEYS[1], ttl, 0)
  local shared = redis.call('HGET', KEYS[1], 'shared')
  if shared and redis.call('EXISTS', shared) == 1 then
    redis.call('HSET', shared, 'keep', renew(shared, ttl, keep))
  end
end
local function drop(key)
  local shared = redis.call('HGET', key, 'shared')
  if shared and redis.call('EXISTS', shared) == 1 and redis.call('HINCRBY', shared, 'refs', -1) <= 0 then
    redis.call('DEL', shared)
  end
  return redis.call('DEL', key)
end
"""
# KEYS: record, pins of its owner, all pins, records of its owner. ARGV: id, request, run, key of the shared record or
# empty, limits of bytes and of records (-1: none), prefix of keys. Returns 1, or 0 if a limit is reached or the
# shared record has ended.
CREATE = f"""{NOW}
if ARGV[4] ~= '' and redis.call('EXISTS', ARGV[4]) == 0 then return 0 end
if redis.call('HEXISTS', KEYS[1], 'refs') == 1 then return 1 end -- another gateway has just stored the same
local most_bytes, most = tonumber(ARGV[5]), tonumber(ARGV[6])
if most_bytes >= 0 or most >= 0 then
  local bytes, number = #ARGV[2], 1
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    local size = redis.call('HGET', ARGV[7] .. id, 'size')
    if not size then
      redis.call('SREM', KEYS[4], id)
    elseif id ~= ARGV[1] then
      bytes, number = bytes + size, number + 1
    end
  end
  if (most_bytes >= 0 and bytes > most_bytes) or (most >= 0 and number > most) then return 0 end
  redis.call('SADD', KEYS[4], ARGV[1])
end
drop(KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'request', ARGV[2], 'run', ARGV[3], 'lease', 0, 'size', #ARGV[2])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'shared', ARGV[4])
  redis.call('HINCRBY', ARGV[4], 'refs', 1)
end
return 1"""
# KEYS: record, pins of its owner, all pins. ARGV: id. Returns 0 if there is no record.
DELETE = f"""{NOW}
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return drop(KEYS[1])"""
# Gives records whose pin has ended a time to live. KEYS: all pins. ARGV: prefix of keys, time to live in ms.
SWEEP = f"""{NOW}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], 0, now, 'LIMIT', 0, {MAX_SWEPT})) do
  redis.call('ZREM', KEYS[1], id)
  local key = ARGV[1] .. id
  for _, kept in ipairs({{key, redis.call('HGET', key, 'shared') or ''}}) do
    if redis.call('EXISTS', kept) == 1 then renew(kept, ARGV[2], 0) end
  end
end
return 0"""
# ARGV: run, lease in ms (0 ends the lease), time to live in ms, limit of bytes, then pairs of field and value. Output
# above the limit is not stored. Returns 0 if another run has claimed the record, or if it does not exist.
WRITE = f"""{NOW}
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return 0 end
local lease = tonumber(ARGV[2])
redis.call('HSET', KEYS[1], 'lease', lease > 0 and now + lease or 0)
local size = tonumber(redis.call('HGET', KEYS[1], 'size')) or 0
for i = 5, #ARGV, 2 do
  local total = size + #ARGV[i + 1] - redis.call('HSTRLEN', KEYS[1], ARGV[i])
  if total <= tonumber(ARGV[4]) or string.sub(ARGV[i], 1, 2) == 'e:' then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    size = total
  end
end
redis.call('HSET', KEYS[1], 'size', size)
expire(ARGV[3])
return 1"""
# ARGV: run, lease in ms, time to live in ms, 1 to end the lease of another run. Returns 1 if the run has the record
# now, 0 if another run has a lease, -1 if there is no record.
CLAIM = f"""{NOW}
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
local lease = tonumber(redis.call('HGET', KEYS[1], 'lease')) or 0
if ARGV[4] == '0' and lease > now and redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'lease', now + ARGV[2])
expire(ARGV[3])
return 1"""
# Stores an object unless the record has one. ARGV: object, time to live in ms. Returns the stored object; nil if there
# is no record.
PUT_OBJECT = f"""{NOW}
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('HSETNX', KEYS[1], 'object', ARGV[1])
expire(ARGV[2])
return redis.call('HGET', KEYS[1], 'object')"""
# KEYS: record, pins of its owner, all pins. ARGV: id, time of the pin in ms (0 ends it), time to live in ms, limit of
# pins. Returns 0 if the owner has as many other pins.
PIN = f"""{NOW}
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], 0, now)
local pin = tonumber(ARGV[2])
local others = redis.call('ZCARD', KEYS[2]) - (redis.call('ZSCORE', KEYS[2], ARGV[1]) and 1 or 0)
if pin > 0 and others >= tonumber(ARGV[4]) then return 0 end
for _, pins in ipairs({{KEYS[2], KEYS[3]}}) do
  if pin == 0 then redis.call('ZREM', pins, ARGV[1]) else redis.call('ZADD', pins, now + pin, ARGV[1]) end
end
redis.call('HSET', KEYS[1], 'keep', pin > 0 and now + pin or 0)
expire(ARGV[3])
return 1"""
# KEYS: list of an owner, another record. ARGV: id, id of the other record, largest number of ids, time to live in ms.
ENLIST = f"""{NOW}
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -ARGV[3] - 1)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'next', ARGV[1]) end"""


class RedisFields:
    """Records that all gateways with this Redis share, with the methods of MemoryFields. They raise
    RecordsUnavailableError if it does not answer. Raises ValueError for a malformed URL.
    """

    def __init__(
        self,
        server: RedisServer | str,
        *,
        namespace: str = "quire",
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = 1.0,
        lease_s: float = LEASE_S,
    ) -> None:
        self.max_bytes = max_bytes
        self._redis = connect(server, timeout_s)
        self._server = Availability("request records are kept")
        self._prefix = f"{namespace}:record:"
        self._pins, self._lists = f"{namespace}:pins:", f"{namespace}:sessions:"
        self._pinned, self._records = f"{namespace}:pinned", f"{namespace}:records:"
        self._ttl_ms = int(ttl_s * 1000)
        self._timeout_s = timeout_s
        self._lease_ms = int(lease_s * 1000)

    async def close(self) -> None:
        await self._redis.aclose()

    async def create(
        self, record_id: str, request: bytes, run: str, *, shared_id: str = "", limits: RecordLimits = NO_LIMITS
    ) -> bool:
        key, shared = self._key(record_id), self._key(shared_id) if shared_id else ""
        bounds = (-1 if limit is None else limit for limit in limits)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.eval(SWEEP, 1, self._pinned, self._prefix, self._ttl_ms)
        keys = *self._pin_keys(record_id), self._records + owner_of(record_id)
        pipeline.eval(CREATE, 4, *keys, record_id, request, run, shared, *bounds, self._prefix)
        pipeline.eval(CLAIM, 1, key, run, self._lease_ms, self._ttl_ms, 0)
        return bool((await self._call(pipeline.execute()))[1])

    def _pin_keys(self, record_id: str) -> tuple[str, str, str]:
        return self._key(record_id), self._pins + owner_of(record_id), self._pinned

    async def claim(self, record_id: str, run: str, *, by_force: bool) -> bool:
        call = self._redis.eval(CLAIM, 1, self._key(record_id), run, self._lease_ms, self._ttl_ms, int(by_force))
        return bool(await self._call(call) == 1)

    async def write(self, updates: Sequence[tuple[Update, Mapping[str, bytes]]]) -> list[bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for update, fields in updates:
            lease_ms = 0 if update.releases else self._lease_ms
            pairs = [part for pair in fields.items() for part in pair]
            key = self._key(update.record_id)
            pipeline.eval(WRITE, 1, key, update.run, lease_ms, self._ttl_ms, self.max_bytes, *pairs)
        return [bool(answer) for answer in await self._call(pipeline.execute())]

    async def put_object(self, record_id: str, value: bytes) -> bytes | None:
        found: bytes | None = await self._call(
            self._redis.eval(PUT_OBJECT, 1, self._key(record_id), value, self._ttl_ms)
        )
        return found

    async def delete(self, record_id: str) -> bool:
        return bool(await self._call(self._redis.eval(DELETE, 3, *self._pin_keys(record_id), record_id)))

    async def load(self, record_id: str) -> tuple[Mapping[str, bytes], bool]:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._key(record_id))
        pipeline.time()
        found, now = await self._call(pipeline.execute())
        has_run = int(found.get(b"lease", b"0")) > _ms(now)
        if SHARED in found:
            found[SHARED] = found[SHARED].removeprefix(self._prefix.encode())
        return {name.decode(): value for name, value in found.items() if name not in OWN}, has_run

    async def is_open(self, record_id: str) -> bool:
        return int(await self._call(self._redis.hget(self._key(record_id), "lease")) or b"0") > 0

    async def pin(self, record_id: str, ttl_s: float, limit: int) -> bool:
        keys = self._pin_keys(record_id)
        call = self._redis.eval(PIN, 3, *keys, record_id, int(ttl_s * 1000), self._ttl_ms, limit)
        return bool(await self._call(call))

    async def num_pinned(self) -> dict[str, int]:
        now = _ms(await self._call(self._redis.time()))
        ids = await self._call(self._redis.zrangebyscore(self._pinned, now, "+inf"))
        return Counter(owner_of(record_id.decode()) for record_id in ids)

    async def lifetimes(self, record_ids: Sequence[str]) -> list[Lifetime | None]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for record_id in record_ids:
            pipeline.pttl(self._key(record_id))
            pipeline.hget(self._key(record_id), "keep")
        now, *found = await self._call(pipeline.execute())
        return [
            self._lifetime(ttl_ms, int(keep or b"0") - _ms(now))
            for ttl_ms, keep in zip(found[::2], found[1::2], strict=True)
        ]

    def _lifetime(self, ttl_ms: int, keep_ms: int) -> Lifetime | None:
        """A pinned record has no time to live (-1) until its pin ends. -2: there is no record."""
        kept_s = max(0, keep_ms) / 1000
        if ttl_ms == -1:
            return Lifetime(kept_s + self._ttl_ms / 1000, kept_s)
        return None if ttl_ms < 0 else Lifetime(ttl_ms / 1000, kept_s)

    async def enlist(self, owner: str, record_id: str, instead_of: str) -> None:
        keys = self._lists + owner, self._key(instead_of)
        call = self._redis.eval(ENLIST, 2, *keys, record_id, instead_of, MAX_LISTED, int(LIST_TTL_S * 1000))
        await self._call(call)

    async def listed(self, owner: str) -> list[str]:
        found = await self._call(self._redis.zrange(self._lists + owner, 0, -1, desc=True))
        return [name.decode() for name in found]

    def _key(self, record_id: str) -> str:
        return self._prefix + record_id

    async def _call(self, call: Any) -> Any:
        return await answer_of(
            call,
            self._server,
            "the records of requests",
            RecordsUnavailableError,
            timeout_s=self._timeout_s,
            retry_after_s=RETRY_S,
        )


def _ms(time: tuple[int, int]) -> int:
    """The server's clock, from its answer to TIME."""
    seconds, micros = time
    return seconds * 1000 + micros // 1000
