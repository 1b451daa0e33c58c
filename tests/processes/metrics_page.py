"""The tables and expressions of docs/metrics.md as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
SERVICES = ("gateway", "scheduler", "worker")


@dataclass(frozen=True)
class Documented:
    """One row of a table."""

    kind: str
    labels: frozenset[str]
    vllm: tuple[str, ...]


def read_tables() -> dict[str, dict[str, Documented]]:
    """The metrics of each service by name, including those that every service has."""
    text = PAGE.read_text(encoding="utf-8")
    every = _table(text, "every") | _process_metrics(text)
    return {service: every | _table(text, service) for service in SERVICES}


def read_expressions() -> list[str]:
    """The PromQL expressions of the page."""
    return re.findall(r"```promql\n(.*?)\n```", PAGE.read_text(encoding="utf-8"))


def _table(text: str, service: str) -> dict[str, Documented]:
    body = re.search(rf"<!-- metrics of {service} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert body is not None, f"docs/metrics.md has no table of {service}"
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in body[1].splitlines()[2:]]
    return {
        _words(name)[0]: Documented(kind, frozenset(_words(labels)), tuple(_words(vllm)))
        for name, kind, _, labels, _, vllm in rows
    }


def _process_metrics(text: str) -> dict[str, Documented]:
    names = re.findall(r"`(process_\w+)`", text)
    return {n: Documented("counter" if n.endswith("_total") else "gauge", frozenset(), ()) for n in names}


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
