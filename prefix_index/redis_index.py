"""The scheduler's side of the prefix index in Redis: one task writes the cached prefixes of the scheduler's workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from prefix_index.index import Holder, PrefixChanges, PrefixIndex, RemoteHolder
from prefix_index.keys import (
    MAX_SCHEDULER_EPOCH,
    entry_key,
    epoch_key,
    generation_key,
    member_of,
    revisions_key,
    weights_key,
    worker_key,
)
from prefix_index.reader import PrefixSearch
from svc_common.redis.connect import call_errors, connect, warn_of_eviction
from svc_common.redis.server import Availability, RedisServer

log = logging.getLogger(__name__)

# Reads a key whose value may be anything. `counter` is the decimal number, or nil.
READ_COUNTER = """
local found = redis.pcall('GET', KEYS[1])
local digits = type(found) == 'string' and #found < 17 and string.match(found, '^%d+$')
local counter = digits and tonumber(digits)
"""
# Increments a counter. If the value is not a counter, returns the value as a string and leaves it unchanged.
NEXT_EPOCH = f"""{READ_COUNTER}
if not found or (counter and counter < {MAX_SCHEDULER_EPOCH}) then return redis.call('INCR', KEYS[1]) end
return type(found) == 'string' and string.sub(found, 1, 64) or 'not a string'"""
# Raises a counter to ARGV[1], but never lowers it. Replaces a value that is not a counter.
RAISE_COUNTER = f"""{READ_COUNTER}
if not counter or counter >= {MAX_SCHEDULER_EPOCH} or counter < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1])
end
return 0"""
# Deletes a worker's record unless it belongs to another epoch or scheduler.
FORGET_WORKER = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
if found[1] == ARGV[1] and found[2] == ARGV[2] then return redis.call('DEL', KEYS[1]) end
return 0"""

# Records that ARGV[1] serves revision ARGV[2] for the next ARGV[3] milliseconds. If an owner, itself included, serves
# another revision now and ARGV[4] is 0, returns that revision instead; else an empty string.
CLAIM_REVISION = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local served = redis.call('HGETALL', KEYS[1])
for i = 1, #served, 2 do
  local revision, until_ms = string.match(served[i + 1], '^(%S+) (%d+)$')
  if not until_ms or tonumber(until_ms) < now then
    redis.call('HDEL', KEYS[1], served[i])
  elseif revision ~= ARGV[2] and ARGV[4] == '0' then
    return revision
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%d', now + ARGV[3]))
redis.call('PERSIST', KEYS[1]) -- volatile-lru must not evict it; another claim removes what has ended
return ''"""

# Records ARGV[2] as the weights of version ARGV[1], unless a version that is not lower is recorded. Returns what is.
WRITE_WEIGHTS = """
local version = redis.call('HGET', KEYS[1], 'version')
if version and tonumber(version) >= tonumber(ARGV[1]) then return redis.call('HGET', KEYS[1], 'record') end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'record', ARGV[2])
return ARGV[2]"""

Entry = tuple[Holder, bytes]


class RedisPrefixIndex(PrefixIndex):
    """The index that several schedulers share. One task calls Redis. `publish` and similar methods only fill its queue.

    `snapshot` returns all cached prefixes of this scheduler's workers. They are published again after an outage that
    lost data, after a flush, and before entries expire. Raises ValueError for a malformed URL.
    """

    is_shared = True

    def __init__(
        self,
        server: RedisServer | str,
        *,
        owner: str,
        snapshot: Callable[[], Iterable[PrefixChanges]],
        namespace: str = "quire",
        timeout_s: float = 0.25,
        lease_ttl_s: float = 15.0,
        entry_ttl_s: float = 1800.0,
        max_pending: int = 1 << 16,
        batch_size: int = 512,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._redis = connect(server, timeout_s)
        self._server = Availability("the prefix index is shared")
        self.scheduler_address = ""  # host:port of this scheduler, for the others
        self._owner = owner
        self._search = PrefixSearch(self._redis, namespace)
        self._snapshot = snapshot
        self._prefix = namespace
        self._timeout_s = timeout_s
        self._lease_ttl_s = lease_ttl_s
        self._entry_ttl_s = entry_ttl_s
        self._max_pending = max_pending
        self._limit = max_pending
        self._batch_size = batch_size
        self._max_backoff_s = max_backoff_s
        self._pending: dict[Entry, bool] = {}  # to write: the newest state per entry, cached or not
        self._addresses: dict[Holder, str] = {}
        self._dirty: dict[Holder, bool] = {}  # records to write (True) or to delete
        self._revision: tuple[str, str] | None = None  # model and revision of this scheduler's workers
        self._released: tuple[str, str] | None = None  # to delete
        self._epoch_floor = 0
        self._has_warned_epoch = False
        self._generation: bytes | None = None
        self._needs_snapshot = False
        self._refresh_at = 0.0
        self._renew_at = 0.0
        self._renews_revision = False
        self._is_closed = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the server answers."""
        return self._server.is_up

    @property
    def num_errors(self) -> int:
        """Number of calls that the server did not answer."""
        return self._server.num_errors

    @property
    def num_pending(self) -> int:
        """Number of entries that are not written yet."""
        return len(self._pending)

    def start(self) -> None:
        """Start the task that calls the server. Call it once, on the event loop."""
        self._refresh_at = asyncio.get_running_loop().time() + self._entry_ttl_s / 3
        self._task = asyncio.create_task(self._run())

    # -- methods for the scheduler; only async methods wait ------------------------------------------------------------

    def publish(self, changes: Sequence[PrefixChanges]) -> None:
        for change in changes:
            for digest, is_cached in change.blocks:
                entry = (change.holder, digest)
                self._pending.pop(entry, None)
                self._pending[entry] = is_cached
        if len(self._pending) > self._limit:
            self._pending.clear()
            self._needs_snapshot = True
        if changes:
            self._wake.set()

    def register_worker(self, worker_id: str, worker_epoch: int, address: str) -> None:
        holder = Holder(worker_id, worker_epoch)
        for stale in [h for h in self._addresses if h.worker_id == worker_id]:
            del self._addresses[stale]
        self._addresses[holder] = address
        self._dirty[holder] = True
        self._wake.set()

    def forget(self, worker_id: str, worker_epoch: int) -> None:
        holder = Holder(worker_id, worker_epoch)
        if self._addresses.pop(holder, None) is None:
            return
        self._dirty[holder] = False
        self._wake.set()

    def record_scheduler_epoch(self, epoch: int) -> None:
        if epoch < MAX_SCHEDULER_EPOCH:
            self._epoch_floor = max(self._epoch_floor, epoch)
        self._wake.set()

    def state(self) -> str:
        return "redis" if self._server.is_up else "redis (down)"

    async def close(self) -> None:
        # The flag is needed because the client swallows a cancellation while it connects.
        self._is_closed = True
        self._wake.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._redis.aclose()

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """The server's answer to a call; None if it does not come in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except call_errors() as error:
            self._server.went_down(error)
            return None

    async def claim_revision(self, model: str, revision: str, *, replaces: bool) -> str:
        claim = self._redis.eval(CLAIM_REVISION, 1, *self._claim(model, revision, replaces=replaces))
        other = bytes(await self._answer(claim) or b"").decode(errors="replace")
        if not other:
            self._revision = model, revision
        return other

    def _claim(self, model: str, revision: str, *, replaces: bool) -> tuple[str, ...]:
        ttl_ms = str(int(self._lease_ttl_s * 1000))
        return revisions_key(self._prefix, model), self._owner, revision, ttl_ms, str(int(replaces))

    async def read_weights(self, model: str, revision: str) -> str | None:
        found = await self._answer(self._redis.hmget(weights_key(self._prefix, model, revision), "record"))
        return None if found is None else bytes(found[0] or b"").decode(errors="replace")

    async def write_weights(self, model: str, revision: str, version: int, record: str) -> str | None:
        key = weights_key(self._prefix, model, revision)
        held = await self._answer(self._redis.eval(WRITE_WEIGHTS, 1, key, str(version), record))
        return None if held is None else bytes(held).decode(errors="replace")

    async def find_elsewhere(self, digests: Sequence[bytes]) -> list[RemoteHolder]:
        """The workers of other schedulers that hold leading blocks of a prefix; none if the server does not answer."""
        if not self.is_up:
            return []
        try:
            async with asyncio.timeout(4 * self._timeout_s):
                held = await self._search.leading_blocks(digests)
                schedulers = await self._search.schedulers(held, self._owner)
        except call_errors(ValueError) as error:
            self._server.went_down(error)
            self._wake.set()
            return []
        return [RemoteHolder(holder, address, held[holder]) for holder, address in schedulers.items()]

    def release_revision(self) -> None:
        self._released, self._revision = self._revision or self._released, None
        self._wake.set()

    async def next_scheduler_epoch(self) -> int:
        epoch = await self._answer(self._redis.eval(NEXT_EPOCH, 1, epoch_key(self._prefix)))
        if isinstance(epoch, int):
            return epoch
        if epoch is not None:
            self._warn_bad_epoch(epoch)
        return 0

    def _warn_bad_epoch(self, found: bytes) -> None:
        if self._has_warned_epoch:
            return
        self._has_warned_epoch = True
        log.error(
            "redis key %s is %r; must be a number from 0 to %d. It is read as 0 and the next lease overwrites it. "
            "Check which other program writes to this Redis, or use another --redis-namespace",
            epoch_key(self._prefix), found.decode(errors="replace"), MAX_SCHEDULER_EPOCH,
        )  # fmt: skip

    # -- the task that writes -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = 0.05
        while not self._is_closed:
            try:
                await self._write_all()
                backoff_s = 0.05
            except call_errors() as error:
                self._server.went_down(error)
                await asyncio.sleep(backoff_s * (0.5 + random.random()))
                backoff_s = min(self._max_backoff_s, backoff_s * 2)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_ttl_s / 3):
                    await self._wake.wait()

    async def _write_all(self) -> None:
        """Write until nothing is left. Makes at least one pass, to renew leases and to detect a flush."""
        self._wake.clear()
        self._plan_renewals()
        while True:
            await self._write_batch()
            if self._needs_snapshot:
                self._load_snapshot()
            if self._is_closed or not (self._pending or self._dirty):
                return

    def _plan_renewals(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._renew_at:
            self._renew_at = now + self._lease_ttl_s / 4
            self._renews_revision = self._revision is not None
            for holder in self._addresses:
                self._dirty.setdefault(holder, True)
        if now >= self._refresh_at:
            self._refresh_at = now + self._entry_ttl_s / 3
            self._needs_snapshot = True

    def _load_snapshot(self) -> None:
        """Queue everything again. The snapshot is newer than the pending entries."""
        self._needs_snapshot = False
        cached = {(held.holder, digest): True for held in self._snapshot() for digest, _ in held.blocks}
        self._pending |= cached
        self._limit = max(self._max_pending, 2 * len(cached))
        for holder in self._addresses:
            self._dirty.setdefault(holder, True)

    async def _write_batch(self) -> None:
        """Write one pipeline. If it fails, its entries return to the queue, unless the queue has newer states."""
        entries = dict(zip(self._pending, range(self._batch_size), strict=False))
        batch = {entry: self._pending.pop(entry) for entry in entries}
        records, self._dirty = self._dirty, {}
        try:
            async with asyncio.timeout(self._timeout_s * 4):
                generation = await self._execute(batch, records)
                if not self.is_up:
                    await warn_of_eviction(self._redis)
            self._server.came_up()
            self._check_generation(generation)
        except BaseException:
            self._pending = batch | self._pending
            self._dirty = records | self._dirty
            raise

    async def _execute(self, batch: dict[Entry, bool], records: dict[Holder, bool]) -> bytes | None:
        pipeline = self._redis.pipeline(transaction=False)
        # Known before the first entry is written: a server that loses the entries loses the generation too.
        pipeline.set(generation_key(self._prefix), f"{random.getrandbits(64):016x}", nx=True)
        pipeline.get(generation_key(self._prefix))
        floor, self._epoch_floor = self._epoch_floor, 0
        if floor:
            pipeline.eval(RAISE_COUNTER, 1, epoch_key(self._prefix), str(floor))
        self._add_revision(pipeline)
        for holder, is_here in records.items():
            self._add_record(pipeline, holder, is_here=is_here)
        for (holder, digest), is_cached in batch.items():
            key = entry_key(self._prefix, digest)
            if not is_cached:
                pipeline.srem(key, member_of(holder))
                continue
            pipeline.sadd(key, member_of(holder))
            pipeline.pexpire(key, int(self._entry_ttl_s * 1000))
        try:
            answers = await pipeline.execute()
        except BaseException:
            self.record_scheduler_epoch(floor)
            raise
        generation: bytes | None = answers[1]
        return generation

    def _add_revision(self, pipeline: Any) -> None:
        released, self._released = self._released, None
        if released is not None and self._revision is None:
            pipeline.hdel(revisions_key(self._prefix, released[0]), self._owner)
        if self._revision is not None and self._renews_revision:
            pipeline.eval(CLAIM_REVISION, 1, *self._claim(*self._revision, replaces=True))
        self._renews_revision = False

    def _add_record(self, pipeline: Any, holder: Holder, *, is_here: bool) -> None:
        key = worker_key(self._prefix, holder.worker_id)
        epoch = str(holder.worker_epoch)
        if not is_here:
            pipeline.eval(FORGET_WORKER, 1, key, epoch, self._owner)
            return
        address = self._addresses.get(holder)
        if address is None:
            return
        record = {"epoch": epoch, "address": address, "owner": self._owner, "scheduler": self.scheduler_address}
        pipeline.hset(key, mapping=record)
        pipeline.pexpire(key, int(self._lease_ttl_s * 1000))

    def _check_generation(self, found: bytes | None) -> None:
        """Detect data loss: a new generation means that the server lost its data since the last write."""
        if self._generation not in (None, found):
            log.warning("the prefix index was flushed; publishing everything again")
            self._needs_snapshot = True
        self._generation = found
