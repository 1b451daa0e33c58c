"""The lines of `quire top`, for a terminal of any size: pure functions of a status and its rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from quire_client.types import OpenRequest, SchedulerStatus, Status, WorkerStatus

from quire_cli.rates import Rates

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
