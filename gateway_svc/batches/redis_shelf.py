"""Files and batches in Redis (commands of 6.2), for all gateways. No key has a time to live, so Redis evicts none.

<namespace>:batches:item:<name>         hash: doc, bytes, and the answers by kind
                    parts:<name>        list
                    of:<kind>:<owner>   sorted set of names by creation (ms)
                    due                 sorted set of names by end (s)
                    work                set of batches
                    todo:<name>         sorted set of chunks by the end of their lease (ms)
                    done:<name>:<chunk> bitmap of the lines that have answers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.batches.lines import BATCH, SWEPT, UNCHECKED, LineAnswer, TakenChunk
from gateway_svc.records.fields import owner_of
from svc_common.errors import UnavailableError
from svc_common.redis.connect import answer_of, connect
from svc_common.redis.server import Availability, RedisServer

TIMEOUT_S = 5.0

# KEYS: item, names of its kind, due, work, chunks. ARGV: name, document, end, limit, chunk of a batch or empty.
CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], 'doc', ARGV[2])
redis.call('ZADD', KEYS[2], redis.call('TIME')[1] * 1000 + math.floor(redis.call('TIME')[2] / 1000), ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
if ARGV[5] ~= '' then
  redis.call('SADD', KEYS[4], ARGV[1])
  redis.call('ZADD', KEYS[5], 0, ARGV[5])
end
return 1"""
# KEYS: item, due. ARGV: name, old document, new one, end.
SWAP = """
if redis.call('HGET', KEYS[1], 'doc') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'doc', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
return 1"""
# KEYS: item, parts. ARGV: part, size.
ADD = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'bytes', ARGV[2])"""
# KEYS: chunks. ARGV: UNCHECKED, number of chunks.
OPEN = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return end
for chunk = 0, ARGV[2] - 1 do redis.call('ZADD', KEYS[1], 0, chunk) end"""
# KEYS: chunks of batches. ARGV: lease in ms, then a chunk of each, or the prefix of its bitmaps to take one.
LEASE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ends = tonumber(ARGV[1]) > 0 and now + ARGV[1] or 0
"""
TAKE = f"""{LEASE}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if found then redis.call('ZADD', KEYS[1], ends, found) end
return {{found or '', redis.call('ZCARD', KEYS[1]), found and redis.call('GET', ARGV[2] .. found) or ''}}"""
KEEP = f"{LEASE} for i, key in ipairs(KEYS) do redis.call('ZADD', key, 'XX', ends, ARGV[i + 1]) end"
# KEYS: item and parts of a file, chunks, bitmap, batch. ARGV: data, size, chunk, line, kind. A chunk that is not to do
# has all its answers.
PUT = f"""
if not redis.call('ZSCORE', KEYS[3], ARGV[3]) or redis.call('SETBIT', KEYS[4], ARGV[4], 1) == 1 then return end
redis.call('HINCRBY', KEYS[5], ARGV[5], 1)
{ADD}"""


class RedisShelf:
    """A shelf that all gateways with this Redis share. Methods are atomic. Raises ValueError for a malformed URL."""

    def __init__(self, server: RedisServer | str, *, namespace: str = "quire") -> None:
        self._redis = connect(server, TIMEOUT_S)
        self._server = Availability("files and batches are kept", "batches wait")
        self._prefix = f"{namespace}:batches:"

    async def close(self) -> None:
        await self._redis.aclose()

    async def create(self, kind: str, name: str, doc: bytes, expires_at: float, limit: int) -> bool:
        """Add an item, unless it exists. False if its owner has `limit` of this kind. A batch has the chunk UNCHECKED
        to do.
        """
        keys = f"item:{name}", f"of:{kind}:{owner_of(name)}", "due", "work", f"todo:{name}"
        return bool(await self._run(CREATE, keys, name, doc, expires_at, limit, UNCHECKED if kind == BATCH else ""))

    async def load(self, names: Sequence[str]) -> list[tuple[bytes, int, Mapping[str, int]] | None]:
        """Document, bytes of the parts, and answers by kind, of each item."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(f"{self._prefix}item:{name}")
        return [_item(found) if found else None for found in await self._call(pipeline.execute())]

    async def swap(self, name: str, old: bytes, new: bytes, expires_at: float) -> bool:
        """Replace a document. False if it is no longer `old`."""
        return bool(await self._run(SWAP, (f"item:{name}", "due"), name, old, new, expires_at))

    async def names(self, kind: str, owner: str) -> list[str]:
        """The items of an owner, the newest first."""
        return _names(await self._call(self._redis.zrange(f"{self._prefix}of:{kind}:{owner}", 0, -1, desc=True)))

    async def drop(self, kind: str, name: str) -> None:
        """Delete an item with all that belongs to it."""
        chunks = await self._call(self._redis.zrange(f"{self._prefix}todo:{name}", 0, -1))
        bitmaps = (f"done:{name}:{int(chunk)}" for chunk in chunks)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(*(self._prefix + key for key in (f"item:{name}", f"todo:{name}", f"parts:{name}", *bitmaps)))
        pipeline.zrem(f"{self._prefix}of:{kind}:{owner_of(name)}", name)
        pipeline.zrem(self._prefix + "due", name)
        pipeline.srem(self._prefix + "work", name)
        await self._call(pipeline.execute())

    async def due(self, now: float) -> list[str]:
        """Some items whose time has passed."""
        call = self._redis.zrangebyscore(self._prefix + "due", "-inf", now, start=0, num=SWEPT)
        return _names(await self._call(call))

    async def add(self, name: str, part: bytes, size: int) -> bool:
        """Append a part. False if there is no such file."""
        return bool(await self._run(ADD, (f"item:{name}", f"parts:{name}"), part, size))

    async def parts(self, name: str, start: int, count: int) -> list[bytes]:
        call = self._redis.lrange(f"{self._prefix}parts:{name}", start, start + count - 1)
        found: list[bytes] = await self._call(call)
        return found

    async def working(self) -> list[str]:
        """The batches whose end is not noted."""
        return _names(await self._call(self._redis.smembers(self._prefix + "work")))

    async def open(self, name: str, num_chunks: int) -> None:
        """Replace the chunk UNCHECKED, if it is still there, by the chunks of the input."""
        await self._run(OPEN, (f"todo:{name}",), UNCHECKED, num_chunks)

    async def take(self, name: str, lease_s: float) -> TakenChunk:
        """Lease a chunk that no gateway has."""
        bitmaps = f"{self._prefix}done:{name}:"
        chunk, left, bitmap = await self._run(TAKE, (f"todo:{name}",), int(1000 * lease_s), bitmaps)
        answered = (8 * i + bit for i, byte in enumerate(bitmap) for bit in range(8) if byte & (128 >> bit))
        return TakenChunk(int(chunk) if chunk else None, left, frozenset(answered))

    async def keep(self, chunks: Sequence[tuple[str, int]], lease_s: float) -> None:
        """Renew leases; 0 ends them."""
        await self._run(KEEP, [f"todo:{name}" for name, _ in chunks], int(1000 * lease_s), *(c for _, c in chunks))

    async def put(self, name: str, chunk: int, answer: LineAnswer, file: str) -> None:
        """Append the answer of a line without one to a file."""
        keys = f"item:{file}", f"parts:{file}", f"todo:{name}", f"done:{name}:{chunk}", f"item:{name}"
        await self._run(PUT, keys, answer.data, answer.size, chunk, answer.line, answer.kind)

    async def finish(self, name: str, chunk: int) -> None:
        """Note that all lines of a chunk have answers."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.zrem(f"{self._prefix}todo:{name}", chunk)
        pipeline.delete(f"{self._prefix}done:{name}:{chunk}")
        await self._call(pipeline.execute())

    async def close_batch(self, name: str) -> None:
        """Note that a batch has ended."""
        await self._call(self._redis.srem(self._prefix + "work", name))

    async def _run(self, script: str, keys: Sequence[str], *values: Any) -> Any:
        return await self._call(self._redis.eval(script, len(keys), *(self._prefix + key for key in keys), *values))

    async def _call(self, call: Any) -> Any:
        return await answer_of(
            call, self._server, "files and batches", UnavailableError, timeout_s=TIMEOUT_S, retry_after_s=1.0
        )


def _names(found: Sequence[bytes]) -> list[str]:
    return [name.decode() for name in found]


def _item(found: Mapping[bytes, bytes]) -> tuple[bytes, int, Mapping[str, int]]:
    counts = {kind.decode(): int(number) for kind, number in found.items() if kind not in (b"doc", b"bytes")}
    return found[b"doc"], int(found.get(b"bytes", 0)), counts
