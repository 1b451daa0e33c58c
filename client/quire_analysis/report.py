"""The report of a comparison as one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quire_analysis.differences import Difference, Path

MAX_SHOWN = 200  # answers; the JSON file has all
BAR, HEIGHT = 4, 40  # pixels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td { padding: 2px 1.5em 2px 0; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .6em }
rect { fill: #b33 } small { color: #666 }
"""


def report_page(report: Mapping[str, Any], found: Sequence[Difference]) -> str:
    """The page. Answers with other tokens come first, then those with other log probabilities."""
    differing = sorted(
        (one for one in found if one.paths), key=lambda one: (one.is_equal, -sum(abs(p.log_ratio) for p in one.paths))
    )
    a, b = escape(report["a"]), escape(report["b"])
    rows = "".join(f"<tr><td>{name}<td>{escape(str(value))}" for name, value in report["summary"].items())
    errors = "".join(f"<li>{escape(name)}: {escape(words)}" for name, words in report["errors"].items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{a} and {b}</title><style>{STYLE}</style>'
        f"<h1>A: {a}, B: {b}</h1><table>{rows}</table><ul>{errors}</ul>"
        f"<h2>{len(differing)} answers are not identical; {min(MAX_SHOWN, len(differing))} are shown</h2>"
        f"{''.join(map(_answer, differing[:MAX_SHOWN]))}</html>\n"
    )


def _answer(one: Difference) -> str:
    where = "equal tokens" if one.first is None else f"first other token at {one.first}"
    paths = "".join(map(_path, "AB", one.paths))
    return f"<h3>{escape(one.name)}, sample {one.index}: {where}</h3>{paths}"


def _path(name: str, path: Path) -> str:
    """One output: the text around the difference, its log ratio, and its KL divergence as a bar per token."""
    most = max(path.kl_at_least, default=0.0)
    bars = "".join(
        f'<rect x="{BAR * i}" y="{HEIGHT * (1 - kl / most):.1f}" width="{BAR - 1}" height="{HEIGHT * kl / most:.1f}"/>'
        for i, kl in enumerate(path.kl_at_least)
        if kl > most / HEIGHT
    )
    words = f"log ratio {path.log_ratio:.6g}; ended by {path.finish_reason}; KL per token up to {most:.3g}"
    size = f'width="{BAR * len(path.kl_at_least)}" height="{HEIGHT}"'
    return f"<pre>{name}: {escape(path.around)}</pre><small>{words}</small><br><svg {size}>{bars}</svg>"
