"""Rates and quantiles of an interval, from the counters of successive statuses. Times are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quire_client.plain import Result
from quire_client.types import SchedulerStatus, Status

RATE_S = 2.0
QUANTILE_S = 30.0


@dataclass(frozen=True, slots=True)
class Rates(Result):
    """Rates of all schedulers. None: nothing happened in the interval, or there is no earlier status yet."""

    output_tokens_per_s: float = 0.0
    ended_per_s: float = 0.0
    steps_per_s: float = 0.0
    first_token_p50_s: float | None = None
    first_token_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    schedulers: tuple[SchedulerStatus, ...]

    def by_address(self) -> dict[str, SchedulerStatus]:
        return {scheduler.address: scheduler for scheduler in self.schedulers if scheduler.connected}


class RateMeter:
    """Keeps the statuses of the last QUANTILE_S. A scheduler that has restarted counts from its restart."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def add(self, status: Status, at: float) -> Rates:
        """Add a status that was read at time `at`. Returns the current rates."""
        self._samples.append(_Sample(at, status.schedulers))
        while len(self._samples) > 2 and self._samples[1].at <= at - QUANTILE_S:
            self._samples.popleft()
        recent = next((s for s in reversed(self._samples) if s.at <= at - RATE_S), self._samples[0])
        counts = self._first_tokens()
        return Rates(
            output_tokens_per_s=self._rate(recent, "output_tokens"),
            ended_per_s=self._rate(recent, "finished"),
            steps_per_s=self._rate(recent, "steps"),
            first_token_p50_s=quantile(*counts, 0.5),
            first_token_p95_s=quantile(*counts, 0.95),
        )

    def _rate(self, before: _Sample, name: str) -> float:
        last = self._samples[-1]
        if last.at <= before.at:
            return 0.0
        earlier = before.by_address()
        changes = (
            int(getattr(scheduler, name)) - int(getattr(earlier[address], name))
            for address, scheduler in last.by_address().items()
            if address in earlier
        )
        return sum(max(0, change) for change in changes) / (last.at - before.at)

    def _first_tokens(self) -> tuple[Sequence[int], Sequence[float]]:
        """Counts of the interval by bucket, of all schedulers, and the bounds of the buckets."""
        earlier, total, bounds = self._samples[0].by_address(), list[int](), tuple[float, ...]()
        for address, scheduler in self._samples[-1].by_address().items():
            now = scheduler.first_token
            before = earlier[address].first_token if address in earlier else None
            if before is None or sum(before.counts) > sum(now.counts) or len(before.counts) != len(now.counts):
                continue
            changes = [a - b for a, b in zip(now.counts, before.counts, strict=True)]
            total = [a + b for a, b in zip(total, changes, strict=True)] if total else changes
            bounds = now.bounds_s
        return total, bounds


def quantile(counts: Sequence[int], bounds: Sequence[float], fraction: float) -> float | None:
    """The quantile of durations in buckets, interpolated within its bucket; None without durations."""
    rank = fraction * sum(counts)
    if not rank:
        return None
    for i, count in enumerate(counts[: len(bounds)]):
        if rank <= count:
            low = bounds[i - 1] if i else 0.0
            return low + (bounds[i] - low) * rank / count
        rank -= count
    return bounds[-1]
