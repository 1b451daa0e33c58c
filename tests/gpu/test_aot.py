"""Every kernel compiles for sm_90 without a GPU, within registers and shared memory and without a spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_kernels_compile_within_bounds():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "worker_svc.engine.gpu.aot", "--short"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {kernel["name"]: kernel for kernel in json.loads(done.stdout.splitlines()[-1])["kernels"]}
    assert kernels["attention 0.6b prefill page 256"]["mma"]["HGMMA"] > 0
    assert kernels["attention 0.6b exact page 256"]["mma"]["HGMMA"] > 0
    assert kernels["attention 0.6b decode page 256"]["mma"]["LDGSTS"] > 0  # loads through the table are asynchronous
