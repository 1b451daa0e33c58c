"""The kernels that the benchmark compiles ahead are those that are launched later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cpu_limit import limited

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json
import torch, triton
from triton.runtime.driver import driver
from bench.gpu import precompile
from bench.gpu.dry_run import Device
from bench.gpu.report import Report
from worker_svc.engine.gpu.kernels import record
from worker_svc.engine.gpu.kernels.linears import linear

def launches():
    record.apply_deltas(torch.zeros(64, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32))
    linear.linear(torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(96, 64, dtype=torch.bfloat16), None)

driver.set_active(Device())
wanted = precompile.list_kernels(launches)
report = Report(is_smoke=False)
precompile.compile_in_processes(report, wanted | {("worker_svc.engine.gpu.kernels.record", "deltas_kernel", "{}")}, 90)
hits = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit))
launches()
rows = [(row["name"], row["ok"]) for row in report.rows]
print(json.dumps({"listed": sorted(kernel[1] for kernel in wanted), "hits": sorted(hits), "rows": rows}))
"""


def test_a_launch_finds_its_kernel_in_the_cache(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = limited([sys.executable, "-c", PROGRAM], cpu_s=100)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["listed"] == ["deltas_kernel", "linear_kernel"]
    assert found["hits"] == [["deltas_kernel", True], ["linear_kernel", True]]
    assert found["rows"] == [["deltas_kernel", False], ["2 kernels", None]]  # the first one is no valid specialization
