"""Which worker holds which prefix, told to others: in memory, or in Redis for everybody.

An index is a hint for readers that do not own the pool. A scheduler never asks it about its own workers: its block
managers are exact. So an index may lag, forget or be gone without any effect on an answer.

In Redis (commands of 6.2):

    <namespace>:generation        string  written by whoever finds none; gone or changed means: flushed
    <namespace>:scheduler_epoch   string  counter of leases
    <namespace>:worker:<id>       hash    epoch, address, owner; expires when its scheduler stops renewing it
    <namespace>:prefix:<digest>   set     8 bytes of worker epoch + worker id; expires unless refreshed

An entry whose epoch is not that of the worker's record counts for nothing, so a restarted worker needs no clean-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """A worker in one life of its process."""

    worker_id: str
    worker_epoch: int


class PrefixEvent(Protocol):
    """A block became a cached prefix on a worker, or stopped being one."""

    @property
    def worker_id(self) -> str: ...
    @property
    def worker_epoch(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def is_cached(self) -> bool: ...


class PrefixIndex(Protocol):
    """Prefix digests and who holds them. No method raises because of a server, and none but `lookup` waits for one."""

    async def publish(self, events: Sequence[PrefixEvent]) -> None:
        """Blocks that became cached prefixes or ceased to be, in order."""

    async def lookup(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        """For a chain of block digests: how many of the leading ones each live worker holds. Nobody: empty."""

    def register_worker(self, worker_id: str, worker_epoch: int, address: str) -> None:
        """The worker is leased by this scheduler; entries of its other epochs count for nothing."""

    def forget(self, worker_id: str, worker_epoch: int) -> None:
        """The worker is lost or gone."""

    async def next_scheduler_epoch(self) -> int:
        """A number above those of all earlier leases, or 0: the worker counts."""

    def note_scheduler_epoch(self, epoch: int) -> None:
        """This epoch was granted: later ones must be above it."""

    def state(self) -> str:
        """For people: memory, redis, or redis (down)."""

    async def close(self) -> None:
        """Stop what runs in the background; entries expire by themselves."""


class MemoryPrefixIndex:
    """The index of a deployment with one scheduler and no Redis."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._held: dict[Holder, set[bytes]] = {}

    async def publish(self, events: Sequence[PrefixEvent]) -> None:
        for event in events:
            held = self._held.get(Holder(event.worker_id, event.worker_epoch))
            if held is None:
                continue
            if event.is_cached:
                held.add(event.digest)
            else:
                held.discard(event.digest)

    async def lookup(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        lengths = {holder: _leading(digests, held) for holder, held in self._held.items()}
        return {holder: length for holder, length in lengths.items() if length}

    def register_worker(self, worker_id: str, worker_epoch: int, address: str) -> None:
        stale = self._epochs.get(worker_id)
        if stale is not None and stale != worker_epoch:
            self.forget(worker_id, stale)
        self._epochs[worker_id] = worker_epoch
        self._held.setdefault(Holder(worker_id, worker_epoch), set())

    def forget(self, worker_id: str, worker_epoch: int) -> None:
        self._held.pop(Holder(worker_id, worker_epoch), None)
        if self._epochs.get(worker_id) == worker_epoch:
            del self._epochs[worker_id]

    async def next_scheduler_epoch(self) -> int:
        return 0

    def note_scheduler_epoch(self, epoch: int) -> None:
        """The workers count."""

    def state(self) -> str:
        return "memory"

    async def close(self) -> None:
        self._held.clear()


def _leading(digests: Sequence[bytes], held: set[bytes]) -> int:
    for i, digest in enumerate(digests):
        if digest not in held:
            return i
    return len(digests)


EPOCH_BYTES = 8
# Raises a counter to a value, never lowers it.
RAISE_COUNTER = """
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return 0"""
# Deletes a worker's record unless another epoch or scheduler has taken it over.
FORGET_WORKER = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
if found[1] == ARGV[1] and found[2] == ARGV[2] then return redis.call('DEL', KEYS[1]) end
return 0"""

Entry = tuple[Holder, bytes]


class RedisPrefixIndex:
    """The index that several schedulers share. One task speaks with Redis; everybody else only fills its queue.

    `snapshot` gives everything that this scheduler's pools hold: published again after an outage that lost something,
    after a flush, and before entries expire. Raises ValueError for a URL that cannot be one.
    """

    def __init__(
        self,
        url: str,
        *,
        owner: str,
        snapshot: Callable[[], Iterable[PrefixEvent]],
        namespace: str = "quire",
        timeout_s: float = 0.25,
        lease_ttl_s: float = 15.0,
        entry_ttl_s: float = 1800.0,
        max_pending: int = 1 << 16,
        batch_size: int = 512,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        self._owner = owner
        self._snapshot = snapshot
        self._prefix = namespace
        self._search = PrefixSearch(self._redis, namespace)
        self._timeout_s = timeout_s
        self._lease_ttl_s = lease_ttl_s
        self._entry_ttl_s = entry_ttl_s
        self._max_pending = max_pending
        self._limit = max_pending
        self._batch_size = batch_size
        self._max_backoff_s = max_backoff_s
        self._pending: dict[Entry, bool] = {}  # newest wish per entry: cached or not
        self._addresses: dict[Holder, str] = {}
        self._dirty: dict[Holder, bool] = {}  # records to write (True) or to delete
        self._epoch_floor = 0
        self._generation: bytes | None = None
        self._needs_snapshot = False
        self._refresh_at = 0.0
        self._renew_at = 0.0
        self._is_up = False
        self._has_warned = False
        self._is_closed = False
        self.num_errors = 0  # calls that the server did not answer
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """The server answers."""
        return self._is_up

    @property
    def num_pending(self) -> int:
        """Entries still to be written."""
        return len(self._pending)

    def start(self) -> None:
        """Begin to speak with the server; called once, on the event loop."""
        self._refresh_at = asyncio.get_running_loop().time() + self._entry_ttl_s / 3
        self._task = asyncio.create_task(self._run())

    # -- what callers do: nothing here waits ---------------------------------------------------------------------------

    async def publish(self, events: Sequence[PrefixEvent]) -> None:
        for event in events:
            entry = (Holder(event.worker_id, event.worker_epoch), event.digest)
            self._pending.pop(entry, None)
            self._pending[entry] = event.is_cached
        if len(self._pending) > self._limit:
            self._pending.clear()
            self._needs_snapshot = True
        if events:
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

    def note_scheduler_epoch(self, epoch: int) -> None:
        self._epoch_floor = max(self._epoch_floor, epoch)
        self._wake.set()

    def state(self) -> str:
        return "redis" if self._is_up else "redis (down)"

    async def close(self) -> None:
        # The client swallows a cancellation that meets it while it connects: hence the flag as well.
        self._is_closed = True
        self._wake.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._redis.aclose()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def next_scheduler_epoch(self) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                return int(await self._redis.incr(f"{self._prefix}:scheduler_epoch"))
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._went_down(error)
            return 0

    async def lookup(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        if not digests:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                lengths = await self._search.leading_blocks(digests)
                live = await self._search.owners(lengths)
                return {holder: lengths[holder] for holder in live}
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._went_down(error)
            return {}

    # -- the task that writes -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = 0.05
        while not self._is_closed:
            try:
                await self._write_all()
                backoff_s = 0.05
            except (RedisError, OSError, TimeoutError) as error:
                self._went_down(error)
                await asyncio.sleep(backoff_s * (0.5 + random.random()))
                backoff_s = min(self._max_backoff_s, backoff_s * 2)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_ttl_s / 3):
                    await self._wake.wait()

    async def _write_all(self) -> None:
        """Write until nothing is left; at least one pass, which renews leases and sees a flush."""
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
            for holder in self._addresses:
                self._dirty.setdefault(holder, True)
        if now >= self._refresh_at:
            self._refresh_at = now + self._entry_ttl_s / 3
            self._needs_snapshot = True

    def _load_snapshot(self) -> None:
        """Everything is to be written again; the snapshot is newer than what waits."""
        self._needs_snapshot = False
        cached = {(Holder(e.worker_id, e.worker_epoch), e.digest): True for e in self._snapshot()}
        self._pending |= cached
        self._limit = max(self._max_pending, 2 * len(cached))
        for holder in self._addresses:
            self._dirty.setdefault(holder, True)

    async def _write_batch(self) -> None:
        """One pipeline. What it holds goes back to the queue if it fails, behind newer wishes."""
        entries = dict(zip(self._pending, range(self._batch_size), strict=False))
        batch = {entry: self._pending.pop(entry) for entry in entries}
        records, self._dirty = self._dirty, {}
        try:
            async with asyncio.timeout(self._timeout_s * 4):
                generation = await self._execute(batch, records)
            self._came_up()
            # Until this server's generation is known, nobody would see that it was started again without the batch.
            await self._check_generation(generation)
        except BaseException:
            self._pending = batch | self._pending
            self._dirty = records | self._dirty
            raise

    async def _execute(self, batch: dict[Entry, bool], records: dict[Holder, bool]) -> bytes | None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(f"{self._prefix}:generation")
        floor, self._epoch_floor = self._epoch_floor, 0
        if floor:
            pipeline.eval(RAISE_COUNTER, 1, f"{self._prefix}:scheduler_epoch", str(floor))
        for holder, is_here in records.items():
            self._add_record(pipeline, holder, is_here=is_here)
        for (holder, digest), is_cached in batch.items():
            key = entry_key(self._prefix, digest)
            if not is_cached:
                pipeline.srem(key, _member(holder))
                continue
            pipeline.sadd(key, _member(holder))
            pipeline.pexpire(key, int(self._entry_ttl_s * 1000))
        try:
            answers = await pipeline.execute()
        except BaseException:
            self.note_scheduler_epoch(floor)
            raise
        generation: bytes | None = answers[0]
        return generation

    def _add_record(self, pipeline: Any, holder: Holder, *, is_here: bool) -> None:
        key = worker_key(self._prefix, holder.worker_id)
        epoch = str(holder.worker_epoch)
        if not is_here:
            pipeline.eval(FORGET_WORKER, 1, key, epoch, self._owner)
            return
        address = self._addresses.get(holder)
        if address is None:
            return
        pipeline.hset(key, mapping={"epoch": epoch, "address": address, "owner": self._owner})
        pipeline.pexpire(key, int(self._lease_ttl_s * 1000))

    async def _check_generation(self, found: bytes | None) -> None:
        """A generation that is gone or new says that the server lost its data since we wrote."""
        if found is not None and found == self._generation:
            return
        if found is None:
            found = await self._write_generation()
        if self._generation is not None:
            log.warning("the prefix index was flushed; publishing everything again")
            self._needs_snapshot = True
        self._generation = found

    async def _write_generation(self) -> bytes | None:
        key = f"{self._prefix}:generation"
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(key, f"{random.getrandbits(64):016x}", nx=True)
        pipeline.get(key)
        async with asyncio.timeout(self._timeout_s):
            _, found = await pipeline.execute()
        return found if isinstance(found, bytes) else None

    # -- state --------------------------------------------------------------------------------------------------------

    def _went_down(self, error: BaseException) -> None:
        self.num_errors += 1
        if self._is_up or not self._has_warned:
            log.warning("redis does not answer (%s); serving goes on without it", str(error) or type(error).__name__)
        self._is_up = False
        self._has_warned = True

    def _came_up(self) -> None:
        if not self._is_up:
            log.info("redis answers; the prefix index is shared")
        self._is_up = True


PROBES = 32


class PrefixSearch:
    """Questions to the index. Raises what the Redis client raises, and ValueError for what no index wrote."""

    def __init__(self, client: redis.asyncio.Redis, namespace: str) -> None:
        self._redis = client
        self._prefix = namespace

    async def leading_blocks(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        """Leading blocks per holder. Who holds block i nearly always holds those before it, so a few probes suffice:
        each round asks for `PROBES` places inside every holder's open range, and the ranges shrink by that factor.
        """
        ranges: dict[Holder, tuple[int, int]] = {}  # holds [0, low), does not hold block high
        probes = _spread(0, len(digests))
        is_first = True
        while probes:
            held = await self._members(digests, probes)
            if is_first:
                ranges = {holder: (0, len(digests)) for holder in held[0]}
                is_first = False
            ranges = {holder: _narrow(holder, span, probes, held) for holder, span in ranges.items()}
            probes = sorted({p for low, high in ranges.values() if low < high for p in _spread(low, high)})
        return {holder: low for holder, (low, _) in ranges.items() if low}

    async def _members(self, digests: Sequence[bytes], probes: list[int]) -> dict[int, set[Holder]]:
        pipeline = self._redis.pipeline(transaction=False)
        for probe in probes:
            pipeline.smembers(entry_key(self._prefix, digests[probe]))
        answers = await pipeline.execute()
        return {p: {_holder(m) for m in members} for p, members in zip(probes, answers, strict=True)}

    async def owners(self, holders: Iterable[Holder]) -> dict[Holder, int]:
        """Those that are alive, with the epoch of the scheduler that leases each (0: unknown)."""
        asked = list(holders)
        if not asked:
            return {}
        pipeline = self._redis.pipeline(transaction=False)
        for holder in asked:
            pipeline.hmget(worker_key(self._prefix, holder.worker_id), "epoch", "owner")
        records = await pipeline.execute()
        return {
            holder: _scheduler_epoch(owner)
            for holder, (epoch, owner) in zip(asked, records, strict=True)
            if epoch == b"%d" % holder.worker_epoch
        }


def make_owner(scheduler_id: str, scheduler_epoch: int) -> str:
    """How a scheduler's process signs the records of its workers."""
    return f"{scheduler_id}:{scheduler_epoch:016x}"


def _scheduler_epoch(owner: bytes | None) -> int:
    try:
        return int((owner or b"").rpartition(b":")[2], 16)
    except ValueError:
        return 0


def entry_key(namespace: str, digest: bytes) -> bytes:
    """The set of a digest's holders."""
    return b"%s:prefix:%s" % (namespace.encode(), digest)


def worker_key(namespace: str, worker_id: str) -> str:
    """The record of a worker."""
    return f"{namespace}:worker:{worker_id}"


def _spread(low: int, high: int) -> list[int]:
    """Up to PROBES places of [low, high), the first included."""
    count = min(PROBES, high - low)
    return [low + (high - low) * i // count for i in range(count)]


def _narrow(holder: Holder, span: tuple[int, int], probes: list[int], held: dict[int, set[Holder]]) -> tuple[int, int]:
    """The part of `span` that the probes inside it leave open."""
    low, high = span
    for probe in probes:
        if not low <= probe < high:
            continue
        if holder not in held[probe]:
            return low, probe
        low = probe + 1
    return low, high


def _member(holder: Holder) -> bytes:
    return holder.worker_epoch.to_bytes(EPOCH_BYTES, "little") + holder.worker_id.encode()


def _holder(member: bytes) -> Holder:
    return Holder(member[EPOCH_BYTES:].decode(), int.from_bytes(member[:EPOCH_BYTES], "little"))
