"""The generated tables and the dashboard match the code."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from svc_common.observe.metrics import PREFIX
from tests.promql import names_in

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/k8s/quire/dashboards/quire.json"
SUFFIXES = ("_bucket", "_sum", "_count")
VARIABLES = {"$namespace": ".*", "$model": ".*", "$__rate_interval": "5m"}


def load_docs_tables() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("docs_tables")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def dashboard_expressions() -> list[str]:
    """All expressions of the dashboard, with its variables substituted."""
    expressions = [target["expr"] for panel in _panels() for target in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    return expressions


def _panels() -> Iterator[dict[str, Any]]:
    yield from json.loads(DASHBOARD.read_text())["panels"]


def test_the_generated_tables_match_the_code() -> None:
    for page, text in load_docs_tables().written().items():
        assert page.read_text() == text, f"{page.name} is out of date: run scripts/docs_tables.py"


def test_the_dashboard_uses_existing_metrics() -> None:
    specs = load_docs_tables().SPECS
    known = {PREFIX + spec.name for service in specs.values() for spec in service}
    histograms = {
        PREFIX + spec.name + end for service in specs.values() for spec in service if spec.kind == "histogram"
        for end in SUFFIXES
    }  # fmt: skip
    asked = {name for expression in dashboard_expressions() for name in names_in(expression)}
    assert {name for name in asked if name.startswith(PREFIX)} <= known | histograms
    assert {name for name in asked if not name.startswith(PREFIX)} == {
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
    }


def test_the_dashboard_can_be_imported() -> None:
    panels = list(_panels())
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and (panel["type"] == "row" or panel["description"]) for panel in panels)
    assert not re.search(r"TODO|FIXME", DASHBOARD.read_text())


def test_every_prevented_attack_names_existing_tests() -> None:
    page = (ROOT / "docs/threat-model.md").read_text()
    section = page.split("## Attacks that are prevented\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for attack, _, tests in rows:
        folder = ""
        for name in re.split("[;,] ", tests.strip()):
            folder = name.rpartition("/")[0] or folder  # a name without a folder is in that of the one before
            assert (ROOT / folder / name.rpartition("/")[2]).is_file(), f"{attack.strip()}: no test {name!r}"


DECISIONS = {int(page.name[:4]): page for page in sorted((ROOT / "docs/adr").glob("[0-9]*.md"))}
TEXTS = ("*.md", "*.py", "*.cpp", "*.h", "*.toml", "*.yaml", "*.yml", "*.proto")


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_named_pages_exist() -> None:
    """Paths of pages, and decisions by number, in code and text."""
    dead = []
    for path in tracked(*TEXTS):
        text = path.read_text()
        pages = set(re.findall(r"\bdocs/(?:adr/)?[\w-]+\.md\b", text))
        dead += [f"{path.relative_to(ROOT)}: {page}" for page in pages if not (ROOT / page).exists()]
        decisions = {int(n) for n in re.findall(r"\bADR (\d+)", text)}
        dead += [f"{path.relative_to(ROOT)}: ADR {n}" for n in decisions - DECISIONS.keys()]
    assert dead == []


def test_the_indexes_list_every_page_once() -> None:
    for folder in (ROOT / "docs", ROOT / "docs/adr"):
        listed = re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(), re.MULTILINE)
        assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")


def test_decisions_have_the_number_of_their_file() -> None:
    for number, page in DECISIONS.items():
        assert page.read_text().startswith(f"# {number}. ")
