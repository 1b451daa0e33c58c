"""Search in the prefix index in Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prefix_index.changes import Holder
from prefix_index.keys import entry_key, epoch_of_owner, holder_of, worker_key

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
