"""The result of a run as text. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from quire_cli.bench.figures import PERCENTILES, Distribution, Summary
from quire_cli.tables import table

LATENCY_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "pause": "pause between chunks",
    "e2e": "end to end",
}
LATE_MS = 50.0  # above this delay, the report warns that the client is too slow
BUSY = 0.9


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
