"""`scripts/test` hands on the verdict of the checks and of both halves of the tests, and names what failed last."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


TOOLS = {"python", "ruff", "buf", "lint-imports", "mypy"}


@pytest.mark.parametrize(
    ("failing", "verdict"),
    [("nothing", 0), ("tests/sim", 3), ("--ignore=tests/sim", 3), ("mypy", 3)],
    ids=["all-pass", "what-computes-fails", "the-rest-fails", "a-check-fails"],
)
def test_the_verdict_is_that_of_all_parts(tmp_path: Path, failing: str, verdict: int) -> None:
    for tool in TOOLS:
        command = tmp_path / tool
        command.write_text(
            f'#!/bin/sh\ncase " {tool} $* " in *" {failing} "*) echo "FAILED {failing}"; exit 3;; esac\n'
        )
        command.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run([ROOT / "scripts/test", tmp_path], env=environment, capture_output=True, text=True)
    assert run.returncode == verdict, run.stderr
    assert run.stdout.endswith(f"FAILED {failing}\n") == bool(verdict)
    assert {path.name for path in tmp_path.iterdir()} == TOOLS, "the logs are left behind"
