"""`scripts/test` hands on the verdict of both halves of the tests, whatever else it does when it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("failing", "verdict"),
    [("nothing", 0), ("tests/sim", 3), ("--ignore=tests/sim", 3)],
    ids=["all-pass", "simulations-fail", "the-rest-fails"],
)
def test_the_verdict_is_that_of_both_halves(tmp_path: Path, failing: str, verdict: int) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase " $* " in *" {failing} "*) exit 3;; esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run([ROOT / "scripts/test", tmp_path], env=environment, capture_output=True, text=True)
    assert run.returncode == verdict, run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["python"], "the logs are left behind"
