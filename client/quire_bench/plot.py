"""Plots of a run: latency distributions, throughput and concurrency over time.

HTML with inline SVG needs no other package; PNG requires matplotlib.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_bench.figures import Record

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 40
NUM_BINS = 60
NUM_STEPS = 5
MAX_CURVE_POINTS = 400
FORMATS = (".html", ".png")

PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff }}
h1 {{ font-size: 18px }} pre {{ background: #f5f5f5; padding: 12px; overflow: auto }}
figure {{ display: inline-block; margin: 0 16px 16px 0 }} svg {{ border: 1px solid #ddd }}
.axis {{ stroke: #999 }} .grid {{ stroke: #eee }} .curve {{ fill: none; stroke: #2563eb; stroke-width: 2 }}
text {{ font: 11px system-ui, sans-serif; fill: #444 }} .name {{ font-size: 13px; font-weight: 600 }}
</style></head><body><h1>{title}</h1>
{figures}
<pre>{report}</pre></body></html>
"""


class PlotError(Exception):
    """The plot cannot be made. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a curve."""

    title: str
    x_label: str
    y_label: str
    points: Sequence[tuple[float, float]]
    is_count: bool = False  # y is a whole number


def check_plot_path(path: Path) -> None:
    """Check the path before the run. Raises PlotError."""
    if path.suffix not in FORMATS:
        raise PlotError(f"--plot {path}: the name must end with {' or '.join(FORMATS)}")
    if path.suffix == ".png":
        _pyplot()


def write_plot(path: Path, records: Sequence[Record], title: str, report: str) -> None:
    panels = make_panels([record for record in records if not record.error])
    if path.suffix == ".png":
        _write_png(path, panels, title)
    else:
        path.write_text(to_html(panels, title, report))


def make_panels(records: Sequence[Record]) -> list[Panel]:
    """Distributions of the latencies, throughput and concurrency over time."""
    gaps_ms = [1000 * gap_s / tokens for record in records for gap_s, tokens in record.pauses() for _ in range(tokens)]
    fraction = "fraction of requests"
    return [
        Panel(
            "Time to first token", "ms", fraction, _curve([1000 * r.ttft_s for r in records if r.ttft_s is not None])
        ),
        Panel("Inter-token latency", "ms", "fraction of tokens", _curve(gaps_ms)),
        Panel("End to end", "ms", fraction, _curve([1000 * record.e2e_s for record in records])),
        Panel("Output throughput", "seconds since the start", "tokens/s", _throughput(records)),
        Panel("Requests in flight", "seconds since the start", "requests", _in_flight(records), is_count=True),
    ]


def to_html(panels: Sequence[Panel], title: str, report: str) -> str:
    """A self-contained page."""
    figures = "\n".join(f"<figure>{_svg(panel)}</figure>" for panel in panels)
    return PAGE.format(title=html.escape(title), figures=figures, report=html.escape(report))


def _curve(values: Sequence[float]) -> list[tuple[float, float]]:
    """The cumulative distribution with at most about MAX_CURVE_POINTS points."""
    ordered = sorted(values)
    step = max(1, len(ordered) // MAX_CURVE_POINTS)
    kept = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[i], (i + 1) / len(ordered)) for i in kept]


def _throughput(records: Sequence[Record]) -> list[tuple[float, float]]:
    end_s = max((record.end_s for record in records), default=0.0)
    if not end_s:
        return []
    bins = [0] * NUM_BINS
    width_s = end_s / NUM_BINS
    for record in records:
        for at, count in zip(record.chunk_times, record.chunk_tokens, strict=True):
            bins[min(NUM_BINS - 1, int(at / width_s))] += count
    return [((i + 0.5) * width_s, count / width_s) for i, count in enumerate(bins)]


def _in_flight(records: Sequence[Record]) -> list[tuple[float, float]]:
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    points, open_now = [], 0
    for at, change in changes:
        points.append((at, float(open_now)))
        open_now += change
        points.append((at, float(open_now)))
    return points


def _svg(panel: Panel) -> str:
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img">']
    parts.append(f'<text class="name" x="{LEFT}" y="20">{html.escape(panel.title)}</text>')
    if not panel.points:
        parts.append(f'<text x="{LEFT}" y="{HEIGHT // 2}">nothing measured</text></svg>')
        return "".join(parts)
    steps_x = axis_steps(max(x for x, _ in panel.points))
    steps_y = axis_steps(max(y for _, y in panel.points), is_whole=panel.is_count)
    high_x, high_y = steps_x[-1], steps_y[-1]
    parts += _axes(panel, steps_x, steps_y)
    points = " ".join(f"{_x(x / high_x):.1f},{_y(y / high_y):.1f}" for x, y in panel.points)
    parts.append(f'<polyline class="curve" points="{points}"/></svg>')
    return "".join(parts)


def _axes(panel: Panel, steps_x: Sequence[float], steps_y: Sequence[float]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
    parts = []
    for value in steps_y:
        y = _y(value / steps_y[-1])
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>')
    for value in steps_x:
        x = _x(value / steps_x[-1])
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:.6g}</text>')
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(f'<text x="{middle_x:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(panel.x_label)}</text>')
    turn = f'transform="rotate(-90 14 {middle_y:.0f})"'
    parts.append(f'<text x="14" y="{middle_y:.0f}" {turn} text-anchor="middle">{html.escape(panel.y_label)}</text>')
    return parts


def axis_steps(high: float, *, is_whole: bool = False) -> list[float]:
    """Round values from 0 to at least `high`, in equal steps; whole numbers for counts."""
    step = nice_ceiling(high / NUM_STEPS)
    if is_whole:
        step = math.ceil(max(1.0, step))
    count = max(1, math.ceil(high / step * 0.999999))
    return [step * i for i in range(count + 1)]


def nice_ceiling(value: float) -> float:
    """The end of an axis: the smallest 1, 2, 2.5, 5 or 10 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * 0.999999)


def _x(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _y(part: float) -> float:
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def _write_png(path: Path, panels: Sequence[Panel], title: str) -> None:
    figure, axes = _pyplot().subplots(len(panels), 1, figsize=(8, 3 * len(panels)), layout="constrained")
    figure.suptitle(title)
    for panel, axis in zip(panels, axes, strict=True):
        axis.plot([x for x, _ in panel.points], [y for _, y in panel.points])
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, xlim=(0, None), ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
    figure.savefig(path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise PlotError(
            "a PNG requires matplotlib, which is not installed: run `pip install matplotlib`, or use --plot NAME.html"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
