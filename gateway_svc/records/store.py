"""Records in Redis (commands of 6.2): one hash per record, which expires `ttl_s` after its last write.

    <namespace>:record:<id>
      request          RequestRecord
      object           the finished answer of an API, if that API stores one
      o:<i>:<offset>   output token ids of sample i from this position on, little-endian uint32
      e:<i>            SampleEnd
      run, lease, size run that writes the record, end of its lease (ms, server's clock), bytes of all values

A *run* is one execution of the request. Only the run that claimed the record last can write output. Its lease expires
if its gateway is killed. `request`, `object`, `o:` and `e:` may be encrypted.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from quire.internal.v1 import record_pb2 as pb

from gateway_svc.columns import u32_from_bytes
from gateway_svc.records.cipher import Cipher, NoCipher, UnreadableValueError
from svc_common.errors import InvalidRequestError, UnavailableError
from svc_common.redis.connect import call_errors, connect
from svc_common.redis.server import Availability, RedisServer

log = logging.getLogger(__name__)

LEASE_S = 3.0  # a run renews its lease every second
RETRY_S = 1.0
OUTPUT, END = "o:", "e:"

NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# ARGV: run, lease in ms (0 ends the lease), time to live in ms, limit of bytes, then pairs of field and value. Output
# above the limit is not stored. Returns 0 if another run has claimed the record, or if it does not exist.
WRITE = f"""{NOW}
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return 0 end
local lease = tonumber(ARGV[2])
redis.call('HSET', KEYS[1], 'lease', lease > 0 and now + lease or 0)
local size = tonumber(redis.call('HGET', KEYS[1], 'size')) or 0
for i = 5, #ARGV, 2 do
  local total = size + #ARGV[i + 1]
  if total <= tonumber(ARGV[4]) or string.sub(ARGV[i], 1, 2) == 'e:' then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    size = total
  end
end
redis.call('HSET', KEYS[1], 'size', size)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1"""
# ARGV: run, lease in ms, time to live in ms, 1 to end the lease of another run. Returns 1 if the run has the record
# now, 0 if another run has a lease, -1 if there is no record.
CLAIM = f"""{NOW}
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
local lease = tonumber(redis.call('HGET', KEYS[1], 'lease')) or 0
if ARGV[4] == '0' and lease > now and redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'lease', now + ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1"""
# Stores an object unless the record has one. ARGV: object, time to live in ms. Returns the stored object; nil if there
# is no record.
PUT_OBJECT = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('HSETNX', KEYS[1], 'object', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('HGET', KEYS[1], 'object')"""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A stored record. Output has no gaps; a sample's end is present only if all its output is present."""

    record_id: str
    content: pb.RequestRecord
    outputs: tuple[array[int], ...]
    ends: tuple[pb.SampleEnd | None, ...]
    stored_object: bytes
    has_run: bool  # a run has a lease

    @property
    def is_finished(self) -> bool:
        return all(end is not None for end in self.ends)


@dataclass(frozen=True, slots=True)
class Update:
    """New output of a run. `columns`: token ids by sample and output position."""

    record_id: str
    run: str
    columns: Mapping[tuple[int, int], bytes] = field(default_factory=dict)
    ends: Mapping[int, bytes] = field(default_factory=dict)
    releases: bool = False  # the run has ended


class RecordStore:
    """Reads and writes records. Methods raise UnavailableError if Redis does not answer.

    Raises ValueError for a malformed URL.
    """

    def __init__(
        self,
        server: RedisServer | str,
        *,
        namespace: str = "quire",
        ttl_s: float = 3600.0,
        max_bytes: int = 4 << 20,
        cipher: Cipher | None = None,
        timeout_s: float = 1.0,
        lease_s: float = LEASE_S,
    ) -> None:
        self._redis = connect(server, timeout_s)
        self._server = Availability("request records are kept")
        self._prefix = f"{namespace}:record:"
        self._ttl_ms = int(ttl_s * 1000)
        self._max_bytes = max_bytes
        self._cipher = cipher or NoCipher()
        self._timeout_s = timeout_s
        self._lease_ms = int(lease_s * 1000)

    async def close(self) -> None:
        await self._redis.aclose()

    async def answers(self) -> bool:
        """Whether Redis answers now."""
        try:
            await self._call(self._redis.ping())
        except UnavailableError:
            return False
        return True

    async def create(self, record_id: str, content: pb.RequestRecord, run: str) -> None:
        """Create or replace a record, and give its lease to this run.

        Raises InvalidRequestError if it is too large.
        """
        value = self._seal(content.SerializeToString(), record_id, "request")
        if len(value) > self._max_bytes:
            raise InvalidRequestError(
                f"the record of the request has {len(value)} bytes; at most {self._max_bytes} are allowed "
                "(--max-record-bytes): shorten the request, or do not ask for a record (resumable, store)",
                field="resumable",
            )
        key = self._key(record_id)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(key)
        pipeline.hset(key, mapping={"request": value, "run": run, "lease": 0, "size": len(value)})
        pipeline.eval(CLAIM, 1, key, run, self._lease_ms, self._ttl_ms, 0)
        await self._call(pipeline.execute())

    async def claim(self, record_id: str, run: str, *, by_force: bool) -> bool:
        """Give the lease to this run. False if another run has it or there is no record. `by_force`: end that lease."""
        call = self._redis.eval(CLAIM, 1, self._key(record_id), run, self._lease_ms, self._ttl_ms, int(by_force))
        return bool(await self._call(call) == 1)

    async def write(self, updates: Sequence[Update]) -> list[bool]:
        """Store output and renew leases. False for a run that has lost its record."""
        pipeline = self._redis.pipeline(transaction=False)
        for update in updates:
            pairs: list[Any] = []
            for (sample, offset), column in update.columns.items():
                pairs += self._pair(update.record_id, f"{OUTPUT}{sample}:{offset}", column)
            for sample, end in update.ends.items():
                pairs += self._pair(update.record_id, f"{END}{sample}", end)
            lease_ms = 0 if update.releases else self._lease_ms
            key = self._key(update.record_id)
            pipeline.eval(WRITE, 1, key, update.run, lease_ms, self._ttl_ms, self._max_bytes, *pairs)
        return [bool(answer) for answer in await self._call(pipeline.execute())]

    async def put_object(self, record_id: str, data: bytes) -> bytes:
        """Store the finished answer unless one is stored. Returns the stored one, or `data` if there is no record."""
        value = self._seal(data, record_id, "object")
        found = await self._call(self._redis.eval(PUT_OBJECT, 1, self._key(record_id), value, self._ttl_ms))
        try:
            return data if found is None else self._open(found, record_id, "object")
        except UnreadableValueError:
            return data

    async def delete(self, record_id: str) -> bool:
        """Delete a record. False if there is none."""
        return bool(await self._call(self._redis.delete(self._key(record_id))))

    async def load(self, record_id: str) -> StoredRecord | None:
        """The record; None if there is none, or if it cannot be read."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._key(record_id))
        pipeline.time()
        found, (seconds, micros) = await self._call(pipeline.execute())
        if b"request" not in found:
            return None
        try:
            return self._read(record_id, found, seconds * 1000 + micros // 1000)
        except (UnreadableValueError, DecodeError, ValueError) as error:
            log.error("record %s cannot be read: %s", record_id, error)
            return None

    def _read(self, record_id: str, found: Mapping[bytes, bytes], now_ms: int) -> StoredRecord:
        names = {name.decode(): value for name, value in found.items()}
        values = {name: self._open(names[name], record_id, name) for name in names if _is_sealed(name)}
        content = pb.RequestRecord.FromString(values["request"])
        num_samples = max(1, content.request.sampling.n)
        columns: list[dict[int, bytes]] = [{} for _ in range(num_samples)]
        for name in names:
            if name.startswith(OUTPUT):
                sample, offset = name.removeprefix(OUTPUT).split(":")
                columns[int(sample)][int(offset)] = values[name]
        outputs = tuple(map(_joined, columns))
        ends = [values.get(f"{END}{sample}") for sample in range(num_samples)]
        return StoredRecord(
            record_id,
            content,
            outputs,
            tuple(_end_of(end, output) for end, output in zip(ends, outputs, strict=True)),
            values.get("object", b""),
            int(names.get("lease", b"0")) > now_ms,
        )

    def _key(self, record_id: str) -> str:
        return self._prefix + record_id

    def _pair(self, record_id: str, name: str, data: bytes) -> tuple[str, bytes]:
        return name, self._seal(data, record_id, name)

    def _seal(self, data: bytes, record_id: str, name: str) -> bytes:
        return self._cipher.seal(data, f"{record_id} {name}".encode())

    def _open(self, value: bytes, record_id: str, name: str) -> bytes:
        return self._cipher.open(value, f"{record_id} {name}".encode())

    async def _call(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call
        except call_errors() as error:
            self._server.went_down(error)
            raise UnavailableError(
                "Redis, which keeps the records of requests, does not answer; retry later", retry_after_s=RETRY_S
            ) from None
        self._server.came_up()
        return answer


def _is_sealed(name: str) -> bool:
    return name in ("request", "object") or name.startswith((OUTPUT, END))


def _joined(columns: Mapping[int, bytes]) -> array[int]:
    """The output of one sample up to the first gap. Columns of several runs may overlap."""
    output = array("I")
    for offset in sorted(columns):
        if offset > len(output):
            break
        output.extend(u32_from_bytes(columns[offset])[len(output) - offset :])
    return output


def _end_of(data: bytes | None, output: array[int]) -> pb.SampleEnd | None:
    """The end of a sample, if all its output is known."""
    end = None if data is None else pb.SampleEnd.FromString(data)
    return end if end is not None and end.num_output == len(output) else None
