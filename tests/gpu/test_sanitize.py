"""compute-sanitizer over the kernels: its verdicts, with a program in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import sanitize
from bench.gpu.report import Report
from tests.cpu_limit import limited

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/usr/bin/env python3
import subprocess, sys
flags = sys.argv[1:]
if "--help" in flags:
    sys.exit(print("  --kernel-name arg   kernels to check"))
tool, command = flags[flags.index("--tool") + 1], flags[flags.index("application-only") + 3:]
assert flags[flags.index("--kernel-name") + 1] == "kernel_substring=_kernel", flags
assert command[1:3] == ["-m", "bench.gpu.sanitized"], command
print("========= COMPUTE-SANITIZER")
if tool == "racecheck":
    print("========= Error: Race reported between Read access at paged_attention_kernel and Write access")
    sys.exit(print("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)") or 99)
if tool == "initcheck":
    sys.exit(print("Traceback (most recent call last):\\nRuntimeError: CUDA error") or 1)
if tool == "synccheck":
    import time
    time.sleep(60)
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The program is replaced by one that does nothing, and the sanitizer by a script."""
    script = tmp_path / "bin/compute-sanitizer"
    script.parent.mkdir()
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "MIN_S", 0.5)
    run = subprocess.run

    def without_program(command, **arguments):
        if command[0] == sys.executable:
            command = [sys.executable, "-c", ""]
        return run(command, **arguments)

    monkeypatch.setattr(sanitize.subprocess, "run", without_program)
    return tmp_path / "out"


def verdicts(folder: Path) -> dict[str, tuple[str, int]]:
    found = json.loads((folder / "sanitizer.json").read_text())
    return {finding["tool"]: (finding["verdict"], finding["num_errors"]) for finding in found}


def test_each_tool_has_a_verdict(quick, monkeypatch, capsys):
    monkeypatch.setitem(sanitize.SHARE, "synccheck", 0.01)  # the others have enough time on a busy machine
    assert sanitize.run(quick, 100.0) == 1
    assert verdicts(quick) == {
        "without a tool": ("clean", 0), "memcheck": ("clean", 0), "racecheck": ("errors", 2),
        "initcheck": ("failed", 0), "synccheck": ("out of time", 0),
    }  # fmt: skip
    output = capsys.readouterr().out
    assert "Race reported between Read access at paged_attention_kernel" in output
    assert "RuntimeError: CUDA error" in output
    assert "| racecheck | errors | 2 |" in output


def test_a_section_runs_two_tools(quick, monkeypatch):
    report = Report(is_smoke=True)
    report.section = "races"
    sanitize.few_kernels(report)
    assert [(row["name"], row["ok"]) for row in report.rows] == [("memcheck", True), ("racecheck", False)]
    assert "Race reported" in report.rows[1]["note"]
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sanitize, "PLACES", ("/nonexistent",))
    sanitize.few_kernels(report)
    assert report.rows[2]["note"].startswith("was not found")


def test_a_missing_tool_is_reported(quick, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sanitize, "PLACES", ("/nonexistent",))
    assert sanitize.run(quick, 30.0) == 1
    assert verdicts(quick) == {"without a tool": ("clean", 0), "compute-sanitizer": ("failed", 0)}
    assert "| compute-sanitizer | failed |" in capsys.readouterr().out


def test_tools_without_time_are_skipped(quick):
    assert sanitize.run(quick, 0.4) == 1
    assert set(verdicts(quick).values()) == {("skipped", 0)}


@pytest.mark.deep
@pytest.mark.parametrize("flags", [["--short"], ["--short", "--few"]], ids=" ".join)
def test_the_program_runs_the_kernels(flags):
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = limited([sys.executable, "-m", "bench.gpu.sanitized", *flags], cpu_s=150)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best_effort: checks done" in done.stdout
    assert ("steps done" in done.stdout) == ("--few" not in flags)
