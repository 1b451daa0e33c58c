"""Computes figures from the records of requests, and writes them as text. No clock, no I/O.

Latencies of a request, measured in the client:

- TTFT: from sending the request to the first chunk with a token.
- ITL: a chunk of k tokens that arrives a time g after the previous chunk counts as k gaps of g / k, so the mean is the
  time per token. The time g itself is reported as `pause`. Tokens of the first chunk have no gap.
- TPOT: the mean ITL of the request: (last chunk - first chunk) / (tokens after the first chunk).
- E2E: from sending the request to the end of the stream.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_cli.output import table

LATENCIES = ("ttft", "tpot", "itl", "pause", "e2e")
SLO_NAMES = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)
MAX_ERRORS_SHOWN = 5


LATENCY_NAMES = {
    "ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
    "pause": "pause between chunks", "e2e": "end to end",
}  # fmt: skip

LATE_MS = 50.0  # above this delay, the report warns that the client is too slow
BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Record:
    """The measurements of one request. Times are seconds since the start of the run."""

    sent_s: float
    end_s: float
    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0
    chunk_times: Sequence[float] = ()
    chunk_tokens: Sequence[int] = ()  # tokens of each chunk
    late_s: float = 0.0  # delay after the planned send time
    resumes: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times[0] - self.sent_s if self.chunk_times else None

    @property
    def tpot_s(self) -> float | None:
        num_later = sum(self.chunk_tokens[1:])
        return (self.chunk_times[-1] - self.chunk_times[0]) / num_later if num_later else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    def pauses(self) -> list[tuple[float, int]]:
        """(time since the previous chunk, number of tokens) of every chunk except the first."""
        gaps = (after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False))
        return list(zip(gaps, self.chunk_tokens[1:], strict=True))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles, in the unit of the values."""

    mean: float
    percentiles: Mapping[int, float]
    highest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Latencies are in milliseconds; None: not measured."""

    duration_s: float
    num_ok: int
    num_failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_chunks: int
    resumes: int
    latencies: Mapping[str, Distribution | None]
    send_delay_p99_ms: float
    errors: Mapping[str, int] = field(default_factory=dict)  # message -> count
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    num_good: int | None = None  # requests within every limit of the SLO

    @property
    def hit_rate(self) -> float:
        """Fraction of the input tokens that came from the prefix cache."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def goodput(self) -> float | None:
        """Requests per second within the SLO."""
        if self.num_good is None:
            return None
        return self.num_good / self.duration_s if self.duration_s else 0.0


def summarize(records: Iterable[Record], slo_ms: Mapping[str, float] | None = None) -> Summary:
    """Figures of all records. Latencies and tokens count successful requests only."""
    records = list(records)
    good = [record for record in records if not record.error]
    duration_s = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    input_tokens = sum(record.num_input for record in good)
    output_tokens = sum(record.num_output for record in good)
    slo_ms = slo_ms or {}
    return Summary(
        duration_s=duration_s,
        num_ok=len(good),
        num_failed=len(records) - len(good),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.num_cached for record in good),
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(input_tokens + output_tokens, duration_s),
        num_chunks=sum(len(record.chunk_times) for record in good),
        resumes=sum(record.resumes for record in good),
        latencies=_latencies(good),
        send_delay_p99_ms=1000 * percentile(sorted(r.late_s for r in records), 99) if records else 0.0,
        errors=dict(Counter(record.error for record in records if record.error).most_common(MAX_ERRORS_SHOWN)),
        slo_ms=slo_ms,
        num_good=sum(_meets(record, slo_ms) for record in good) if slo_ms else None,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of sorted values, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Iterable[float]) -> Distribution | None:
    """Mean and percentiles of the values; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {percent: percentile(ordered, percent) for percent in PERCENTILES}
    return Distribution(math.fsum(ordered) / len(ordered), found, ordered[-1])


def spread(num_chunks: int, num_tokens: int) -> list[int]:
    """Number of tokens per chunk, as equal as possible; for servers that report only the sum."""
    return [num_tokens * (i + 1) // num_chunks - num_tokens * i // num_chunks for i in range(num_chunks)]


def parse_slo(text: str) -> dict[str, float]:
    """Parse `ttft:500,tpot:50` (milliseconds). Raises ValueError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in SLO_NAMES:
            raise ValueError(f"{name!r} is not a latency; use {', '.join(SLO_NAMES)}, e.g. ttft:500,tpot:50")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"{part!r}: {value!r} is not a number of milliseconds") from None
        if not limits[name] > 0:
            raise ValueError(f"{part!r}: a limit must be above 0 ms")
    return limits


def summary_fields(summary: Summary) -> dict[str, Any]:
    """The summary as JSON fields."""
    fields: dict[str, Any] = {
        "duration_s": round(summary.duration_s, 4),
        "requests_ok": summary.num_ok,
        "requests_failed": summary.num_failed,
        "input_tokens": summary.input_tokens,
        "output_tokens": summary.output_tokens,
        "cached_tokens": summary.cached_tokens,
        "hit_rate": round(summary.hit_rate, 4),
        "requests_per_s": round(summary.requests_per_s, 3),
        "output_tokens_per_s": round(summary.output_tokens_per_s, 2),
        "total_tokens_per_s": round(summary.total_tokens_per_s, 2),
        "chunks": summary.num_chunks,
        "resumes": summary.resumes,
        "send_delay_p99_ms": round(summary.send_delay_p99_ms, 3),
    }
    for name, found in summary.latencies.items():
        fields[f"{name}_ms"] = None if found is None else _distribution_fields(found)
    if summary.num_good is not None:
        fields |= {"slo_ms": dict(summary.slo_ms), "requests_good": summary.num_good, "goodput": summary.goodput}
    if summary.errors:
        fields["errors"] = dict(summary.errors)
    return fields


def _distribution_fields(found: Distribution) -> dict[str, float]:
    named = {f"p{percent}": value for percent, value in found.percentiles.items()}
    return {name: round(value, 4) for name, value in {"mean": found.mean, **named, "max": found.highest}.items()}


def _latencies(records: Sequence[Record]) -> dict[str, Distribution | None]:
    pauses = [pause for record in records for pause in record.pauses()]
    values_s: dict[str, Iterable[float]] = {
        "ttft": (r.ttft_s for r in records if r.ttft_s is not None),
        "tpot": (r.tpot_s for r in records if r.tpot_s is not None),
        "itl": (gap_s / tokens for gap_s, tokens in pauses for _ in range(tokens)),
        "pause": (gap_s for gap_s, _ in pauses),
        "e2e": (record.e2e_s for record in records),
    }
    return {name: distribution(1000 * value for value in values_s[name]) for name in LATENCIES}


def _meets(record: Record, slo_ms: Mapping[str, float]) -> bool:
    """Whether a request meets the limits. A latency without a value (e.g. TPOT of one token) meets its limit."""
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all((value := measured[name]) is None or 1000 * value <= limit for name, limit in slo_ms.items())


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def report_text(summary: Summary, *, client_cpu: float, interrupted: int = 0) -> str:
    """The output of `quire bench`. `interrupted`: number of requests that were open or not sent at the end."""
    parts = [table(("", "figure", ""), _figure_rows(summary)), _latency_table(summary.latencies)]
    parts += _notes(summary, client_cpu, interrupted)
    return "\n\n".join(parts)


def _figure_rows(summary: Summary) -> list[tuple[str, str, str]]:
    rows = [
        ("requests", f"{summary.num_ok}", f"ok, {summary.num_failed} failed"),
        ("duration", f"{summary.duration_s:.2f}", "s"),
        ("input tokens", f"{summary.input_tokens}", f"{summary.cached_tokens} from cache ({summary.hit_rate:.1%})"),
        ("output tokens", f"{summary.output_tokens}", f"in {summary.num_chunks} chunks"),
        ("request rate", f"{summary.requests_per_s:.2f}", "requests/s"),
        ("output throughput", f"{summary.output_tokens_per_s:.1f}", "tokens/s"),
        ("total throughput", f"{summary.total_tokens_per_s:.1f}", "tokens/s, input and output"),
    ]
    if summary.goodput is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in summary.slo_ms.items())
        rows.append(("goodput", f"{summary.goodput:.2f}", f"requests/s, {summary.num_good} with {limits}"))
    return rows


def _latency_table(latencies: Mapping[str, Distribution | None]) -> str:
    headers = ("latency in ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    return table(headers, [(LATENCY_NAMES[name], *_cells(found)) for name, found in latencies.items()])


def _cells(found: Distribution | None) -> list[str]:
    if found is None:
        return ["-"] * (len(PERCENTILES) + 2)
    return [f"{value:.2f}" for value in (found.mean, *(found.percentiles[p] for p in PERCENTILES), found.highest)]


def _notes(summary: Summary, client_cpu: float, interrupted: int) -> list[str]:
    notes = []
    if interrupted:
        notes.append(f"interrupted: {interrupted} requests were open or not sent and are not counted")
    if client_cpu > BUSY:
        notes.append(f"this client used {client_cpu:.0%} of a core: it may have limited the figures")
    if summary.send_delay_p99_ms > LATE_MS:
        notes.append(f"requests were sent up to {summary.send_delay_p99_ms:.0f} ms (p99) late: this client is too slow")
    if summary.resumes:
        notes.append(f"{summary.resumes} streams broke and were resumed")
    notes += [f"{count} x failed: {message}" for message, count in summary.errors.items()]
    return ["\n".join(notes)] if notes else []
