"""Every kernel compiles for sm_90 within its bounds, and the engine compiles none after start-up. No GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def compiled(module: str) -> Any:
    """The JSON in the last line of the module's output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, "--short"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_worker_compiles_all_kernels_at_start_up():
    (worker,) = compiled("bench.gpu.dry_run")
    assert worker["kernels"] > 0
    assert worker["graphs"] > 0
    assert worker["while_recording"] == worker["by_requests"] == []


def test_kernels_compile_within_bounds():
    kernels = {kernel["name"]: kernel for kernel in compiled("worker_svc.engine.gpu.aot")["kernels"]}
    assert kernels["attention 0.6b prefill page 256"]["mma"]["HGMMA"] > 0
    assert kernels["attention 0.6b exact page 256"]["mma"]["HGMMA"] > 0
    assert kernels["attention 0.6b decode page 256"]["mma"]["LDGSTS"] > 0  # asynchronous loads through the block table
