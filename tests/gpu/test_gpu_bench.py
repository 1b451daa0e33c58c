"""The GPU benchmark keeps to its time budget, and a failing section does not affect the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.report import Report
from bench.gpu.run import chosen_sections, make_parser
from bench.gpu.sections import Section, run_all

ROOT = Path(__file__).resolve().parents[2]


def fine(report):
    report.figures["found"] = 7
    report.row("fine", "a row", ok=True, ms=1.0)


def fails(report):
    raise RuntimeError(f"no device, but {report.figures['found']}")


def hangs(report):
    report.row("hangs", "before")
    signal.pause()


def dies(report):
    os._exit(3)


def takes_long(report):
    report.ends_at = 0.0
    report.row("takes_long", "first")
    report.row("takes_long", "second")


def test_a_failing_section_does_not_affect_the_others(tmp_path):
    report = Report(is_smoke=True)
    sections = [Section(f.__name__, 60.0, f) for f in (fine, fails, dies, takes_long)]
    sections += [Section("hangs", 1.0, hangs), Section("late", 9000.0, fine), Section("fine", 60.0, fine)]
    run_all(sections, report, 100.0, lambda: report.write(tmp_path, "gpu"))
    rows = [(row["section"], row["name"], row["ok"]) for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]]
    assert rows == [
        ("fine", "a row", True), ("fails", "failed", False), ("dies", "died", False), ("takes_long", "first", None),
        ("takes_long", "remaining rows", None), ("hangs", "before", None), ("hangs", "killed", False),
        ("late", "skipped", None), ("fine", "a row", True),
    ]  # fmt: skip
    assert report.rows[1]["note"] == "RuntimeError: no device, but 7"


@pytest.mark.parametrize("part", [1, 2])
def test_the_sections_of_a_part_fit_its_budget(part):
    starting = 15.0  # imports and process exits
    assert sum(section.limit_s for section in chosen_sections(part, "")) + starting <= make_parser().get_default(
        "budget"
    )


def test_a_smoke_run_writes_its_results(tmp_path):
    command = [sys.executable, ROOT / "bench/gpu/run.py", "--smoke", "--out", tmp_path]
    done = subprocess.run(
        [*command, "--only", "environment,ceilings,prefill_attention"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == []
    assert summary["device"] == "cpu (smoke)"
    assert "prefill_attention" in (tmp_path / "gpu.md").read_text()
