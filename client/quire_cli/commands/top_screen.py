"""The lines of `quire top`, for a terminal of any size: pure functions of a status and its rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from quire_client.plain import Result
from quire_client.types import OpenRequest, SchedulerStatus, Status, WorkerStatus

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


BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24
POOL_WIDTH = 24
MIN_REQUESTS = 3  # lines of the oldest requests that are kept when there are many workers


class Look(Enum):
    """How a line is shown in a terminal with attributes."""

    PLAIN = "plain"
    TITLE = "title"
    HEAD = "head"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the screen."""

    text: str
    look: Look = Look.PLAIN


@dataclass(frozen=True, slots=True)
class View:
    """State of the screen. `history`: output tokens per second, the newest last. `problem`: the last call failed."""

    target: str
    clock: str
    status: Status
    rates: Rates
    history: Sequence[float] = ()
    problem: str = ""


def screen(view: View, width: int, height: int, *, is_unicode: bool = True) -> list[Line]:
    """At most `height` lines of at most `width` characters."""
    width = max(width, 1)
    lines = [*_head(view, width, is_unicode=is_unicode), Line("")]
    room = max(0, height - len(lines))
    workers = _workers(view.status, is_unicode=is_unicode)
    requests = _requests(view.status)
    if len(workers) + 1 + len(requests) > room:
        kept = min(len(requests), 1 + MIN_REQUESTS)
        workers = _cut(workers, max(0, room - 1 - kept))
    lines += [*workers, Line(""), *requests]
    return [Line(line.text[:width], line.look) for line in lines[:height]]


def _cut(lines: list[Line], height: int) -> list[Line]:
    if len(lines) <= height or not height:
        return lines[:height]
    return [*lines[: height - 1], Line(f"  and {len(lines) - height + 1} more")]


def _head(view: View, width: int, *, is_unicode: bool) -> list[Line]:
    schedulers, rates = view.status.schedulers, view.rates
    models = ", ".join(sorted({s.model for s in schedulers if s.model})) or "no model yet"
    left = f"quire top  {view.target}  {models}"
    title = f"{left[: max(0, width - len(view.clock) - 2)]:<{max(0, width - len(view.clock) - 1)}} {view.clock}"
    waiting, most = _sum(schedulers, "num_waiting"), _sum(schedulers, "max_waiting")
    spark = sparkline(view.history, is_unicode=is_unicode)
    lines = [
        Line(title, Look.TITLE),
        Line(f"output  {count_text(rates.output_tokens_per_s):>7} tokens/s  {spark}"),
        Line(
            f"first   {seconds_text(rates.first_token_p50_s):>7} p50, {seconds_text(rates.first_token_p95_s)} p95 "
            "(to the first token, 30 s)"
        ),
        Line(
            f"queue   {waiting:>7} waiting of {most}, {_sum(schedulers, 'num_running')} running, "
            f"{count_text(_sum(schedulers, 'pending_tokens'))} prompt tokens pending"
        ),
        Line(
            f"cache   {_hits(schedulers):>7} of prompt tokens; ended {rates.ended_per_s:.1f}/s, steps "
            f"{rates.steps_per_s:.0f}/s, moved {_sum(schedulers, 'preemptions')}"
        ),
    ]
    lines += [Line(f"NOT CONNECTED: scheduler {s.address}", Look.BAD) for s in schedulers if not s.connected]
    return [*lines, Line(f"NO ANSWER: {view.problem}", Look.BAD)] if view.problem else lines


def _workers(status: Status, *, is_unicode: bool) -> list[Line]:
    head = f"{'WORKER':<22} {'STATE':<8} {'ROWS':>9}  {'BLOCKS: used, cached, free':<{POOL_WIDTH}}  {'USED':>4}"
    lines = [Line(head, Look.HEAD)]
    workers = [worker for scheduler in status.schedulers for worker in scheduler.workers]
    for worker in sorted(workers, key=lambda worker: worker.worker_id):
        rows = f"{worker.rows_used}/{worker.rows_total}"
        total = worker.blocks_used + worker.blocks_cached + worker.blocks_free
        used = f"{100 * worker.blocks_used / total:.0f}%" if total else "-"
        text = (
            f"{shortened(worker.worker_id, 22):<22} {worker.state:<8} {rows:>9}  "
            f"{pool_bar(worker, is_unicode=is_unicode)}  {used:>4}"
        )
        lines.append(Line(text, Look.PLAIN if worker.state == "ready" else Look.BAD))
    return lines if workers else [*lines, Line("no worker has registered yet")]


def _requests(status: Status) -> list[Line]:
    lines = [Line(f"{'OLDEST REQUEST':<30} {'AGE':>8} {'PROMPT':>8} {'OUTPUT':>8}  {'WORKER':<20}", Look.HEAD)]
    oldest = sorted((request for s in status.schedulers for request in s.slowest), key=lambda request: -request.age_s)
    return [*lines, *map(_request, oldest)] if oldest else [*lines, Line("no open request")]


def _request(request: OpenRequest) -> Line:
    where = shortened(request.worker_id, 20) or "waiting"
    name = shortened(request.request_id, 30)
    return Line(
        f"{name:<30} {seconds_text(request.age_s):>8} {request.prompt_tokens:>8} {request.output_tokens:>8}  {where}"
    )


# -- parts of lines --------------------------------------------------------------------------------------------------


def shortened(text: str, width: int) -> str:
    """The start and the end of a text that is too wide. Characters that are not printable become `?`."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= width else f"{text[: width // 2 - 1]}..{text[-(width - width // 2 - 1) :]}"


def pool_bar(worker: WorkerStatus, *, is_unicode: bool) -> str:
    """The used, cached and free blocks of a pool as one bar. A part that is not empty has at least one character."""
    parts = (worker.blocks_used, worker.blocks_cached, worker.blocks_free)
    total = sum(parts)
    if not total:
        return " " * POOL_WIDTH
    widths = [max(bool(part), round(POOL_WIDTH * part / total)) for part in parts]
    widths[widths.index(max(widths))] += POOL_WIDTH - sum(widths)
    return "".join(width * char for width, char in zip(widths, "█▒·" if is_unicode else "#=.", strict=True))


def sparkline(values: Sequence[float], *, is_unicode: bool) -> str:
    """The newest values as a row of bars."""
    shown = values[-SPARK_WIDTH:]
    highest = max(shown, default=0.0)
    if not is_unicode or highest <= 0:
        return ""
    return "".join(BARS[round((len(BARS) - 1) * value / highest)] for value in shown)


def seconds_text(seconds: float | None) -> str:
    """A duration with two or three digits."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def count_text(value: float) -> str:
    """A count with at most four digits."""
    for unit in ("", "k", "M"):
        if value < 9999.5:
            return f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}G"


def _sum(schedulers: Sequence[SchedulerStatus], name: str) -> int:
    return sum(getattr(scheduler, name) for scheduler in schedulers)


def _hits(schedulers: Sequence[SchedulerStatus]) -> str:
    asked = _sum(schedulers, "prefix_query_tokens")
    return f"{100 * _sum(schedulers, 'prefix_hit_tokens') / asked:.0f} %" if asked else "-"
