"""`scripts/test` fails if any part fails, prints failures last, and ends its child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"python", "ruff", "buf", "lint-imports", "mypy"}


def start_script(folder: Path, body: str) -> subprocess.Popen[str]:
    """The script with tools that run `body`, a piece of shell that finds its own command line in $line."""
    for tool in TOOLS:
        command = folder / tool
        command.write_text(f'#!/bin/bash\nline=" {tool} $* "\n{body}\n')
        command.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [ROOT / "scripts/test", folder], env=environment, stdout=pipe, stderr=pipe, text=True,
        # The child processes of a background job may ignore SIGINT, and bash cannot trap a signal that it ignores.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("failing", "verdict"),
    [("nothing", 0), ("tests/sim", 3), ("--ignore=tests/sim", 3), ("mypy", 3)],
    ids=["all-pass", "computed-fails", "services-fail", "check-fails"],
)
def test_the_exit_code_covers_all_parts(tmp_path: Path, failing: str, verdict: int) -> None:
    with start_script(
        tmp_path, f'[[ $line == *" {failing} "* ]] && echo "FAILED {failing}" && exit 3; exit 0'
    ) as script:
        output, errors = script.communicate(timeout=60)
    assert script.returncode == verdict, errors
    assert output.endswith(f"FAILED {failing}\n") == bool(verdict)
    assert {path.name for path in tmp_path.iterdir()} == TOOLS, "the logs were not removed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_child_processes(tmp_path: Path, number: signal.Signals) -> None:
    body = '[[ $line == *"scripts/gen_"* ]] && exit 0\nsleep 300 & wait'
    with start_script(tmp_path, body) as script:
        parent = psutil.Process(script.pid)
        while names_of(parent.children(recursive=True)).count("sleep") < 3:
            assert script.poll() is None
        children = parent.children(recursive=True)
        script.send_signal(number)
        script.send_signal(number)
        script.communicate(timeout=60)
    assert script.returncode == 130
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert {path.name for path in tmp_path.iterdir()} == TOOLS


def names_of(processes: list[psutil.Process]) -> list[str]:
    """The names of those that still exist."""
    names = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return names
