"""Short runs of the chaos runner. `make chaos` runs it for longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.cluster import KINDS
from tests.chaos.report import Report
from tests.chaos.run import Settings, run


def check(report: Report) -> None:
    print(f"\n{report.text()}\n\n{report.json_line()}")
    assert report.is_good, report.text()
    summary = report.summary()
    assert [summary[name] for name in ("lost", "repeated", "changed", "errors")] == [0] * 4


@pytest.mark.slow
async def test_every_kind_of_process_may_fail(tmp_path: Path) -> None:
    # The best of 300 seeds: its plan first kills one process of each kind, and covers all actions soonest.
    report = await run(Settings(seconds=20, seed=252, gap_s=1.2, requests=24), tmp_path)
    check(report)
    kills = report.summary()["kills"]
    assert isinstance(kills, dict)
    assert all(kills[kind] > 0 for kind in KINDS), kills


@pytest.mark.slow
async def test_many_simulated_streams(tmp_path: Path) -> None:
    settings = Settings(seconds=6, seed=2, executor="sim", lanes=48, gap_s=1.5)
    report = await run(settings, tmp_path)
    check(report)
    assert len(report.records) > settings.lanes


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("executor", "model"), [("sim", "demo"), ("cpu", "demo"), ("cpu", "heads"), ("cpu", "recurrent")]
)
@pytest.mark.parametrize("seed", range(3))
async def test_long_runs(tmp_path: Path, seed: int, executor: str, model: str) -> None:
    check(await run(Settings(seconds=300, seed=seed, executor=executor, model=model), tmp_path))


def test_no_process_outlives_a_killed_runner(tmp_path: Path) -> None:
    with (tmp_path / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "tests.chaos.run", "--executor", "sim", "--seconds", "120"]
        runner = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 120.0
        while len(children := psutil.Process(runner.pid).children()) < 8:
            assert runner.poll() is None, (tmp_path / "output.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)  # the search for children reads the state of every process
        children[0].send_signal(signal.SIGSTOP)
    finally:
        runner.kill()
        runner.wait()
    _, alive = psutil.wait_procs(children, timeout=60.0)
    assert not alive
