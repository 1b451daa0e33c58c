"""The gateway's side of the prefix index in Redis: quick lookups of the prefixes that schedulers have published."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prefix_index.index import Holder
from prefix_index.keys import entry_key, epoch_of_owner, holder_of, worker_key
from svc_common.redis.connect import call_errors, connect, warn_of_eviction
from svc_common.redis.server import Availability, RedisServer

if TYPE_CHECKING:
    import redis.asyncio

PROBES = 32  # positions per holder and round trip


class PrefixSearch:
    """Reads the index. Raises the Redis client's errors, and ValueError for a value that no scheduler wrote."""

    def __init__(self, client: redis.asyncio.Redis, namespace: str) -> None:
        self._redis = client
        self._prefix = namespace

    async def leading_blocks(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        """The number of leading blocks that each holder has.

        A holder of block i nearly always holds the blocks before it, so a few probes suffice: each round reads `PROBES`
        positions inside the open range of every holder, and the ranges shrink by that factor.
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
        return {p: {holder_of(m) for m in members} for p, members in zip(probes, answers, strict=True)}

    async def owners(self, holders: Iterable[Holder]) -> dict[Holder, int]:
        """The live holders, each with the epoch of the scheduler that leases it (0: unknown)."""
        found = await self._records(holders)
        return {holder: epoch_of_owner(owner) for holder, (owner, _) in found.items()}

    async def schedulers(self, holders: Iterable[Holder], but: str) -> dict[Holder, str]:
        """The live holders that another owner leases, each with the address of its scheduler, if that is known."""
        found = await self._records(holders)
        return {
            holder: scheduler.decode()
            for holder, (owner, scheduler) in found.items()
            if owner != but.encode() and scheduler
        }

    async def _records(self, holders: Iterable[Holder]) -> dict[Holder, tuple[bytes | None, bytes | None]]:
        """Owner and scheduler of the live holders."""
        asked = list(holders)
        if not asked:
            return {}
        pipeline = self._redis.pipeline(transaction=False)
        for holder in asked:
            pipeline.hmget(worker_key(self._prefix, holder.worker_id), "epoch", "owner", "scheduler")
        records = await pipeline.execute()
        return {
            holder: (owner, scheduler)
            for holder, (epoch, owner, scheduler) in zip(asked, records, strict=True)
            if epoch == b"%d" % holder.worker_epoch
        }


def _spread(low: int, high: int) -> list[int]:
    """Up to PROBES positions in [low, high), including `low`."""
    count = min(PROBES, high - low)
    return [low + (high - low) * i // count for i in range(count)]


def _narrow(holder: Holder, span: tuple[int, int], probes: list[int], held: dict[int, set[Holder]]) -> tuple[int, int]:
    """The range within `span` that the probes leave open."""
    low, high = span
    for probe in probes:
        if not low <= probe < high:
            continue
        if holder not in held[probe]:
            return low, probe
        low = probe + 1
    return low, high


PING_TIMEOUT_S = 1.0


class RedisPrefixReader:
    """Reads the index. No method raises when the server fails, and no method waits longer than `timeout_s`.

    While the server does not answer, the only calls are the pings of one task, every `pause_s`. Raises ValueError for a
    malformed URL.
    """

    def __init__(
        self, server: RedisServer | str, *, namespace: str = "quire", timeout_s: float = 0.02, pause_s: float = 1.0
    ) -> None:
        self._redis = connect(server, PING_TIMEOUT_S)
        self._server = Availability("replicas are chosen by cached prefixes")
        self._search = PrefixSearch(self._redis, namespace)
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._is_closed = False
        self._went_down = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the server answers."""
        return self._server.is_up

    @property
    def num_errors(self) -> int:
        """Number of calls that the server did not answer."""
        return self._server.num_errors

    def start(self) -> None:
        """Start the task that calls the server. Call it once, on the event loop."""
        self._task = asyncio.create_task(self._keep_up())

    async def lookup(self, digests: Sequence[bytes]) -> dict[int, int]:
        """For a chain of block digests, the number of leading digests that the best worker of each scheduler holds.

        The keys are the schedulers' epochs, as in Welcome. Empty if no worker holds any, or if no answer came in time.
        """
        if not digests or not self.is_up:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await self._search.leading_blocks(digests)
                owners = await self._search.owners(held)
        except call_errors(ValueError) as error:
            self._on_error(error)
            return {}
        best: dict[int, int] = {}
        for holder, epoch in owners.items():
            best[epoch] = max(best.get(epoch, 0), held[holder])
        return best

    async def close(self) -> None:
        """End the background task and the connection."""
        self._is_closed = True  # the client swallows a cancellation that reaches it while it connects
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._redis.aclose()

    async def _keep_up(self) -> None:
        while not self._is_closed:
            try:
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await self._redis.ping()
                    if not self.is_up:
                        await warn_of_eviction(self._redis)
            except call_errors() as error:
                self._on_error(error)
                await asyncio.sleep(self._pause_s)
                continue
            self._server.came_up()
            self._went_down.clear()
            await self._went_down.wait()
            await asyncio.sleep(self._pause_s)

    def _on_error(self, error: BaseException) -> None:
        self._server.went_down(error)
        self._went_down.set()
