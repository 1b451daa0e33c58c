"""Nsight Compute over a few kernels: bytes per second, and what their warps wait for.

The section runs `python -m bench.gpu.counters`, which launches each kernel twice, under ncu.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from bench.gpu.kernels import Case, nano_contexts
from bench.gpu.report import Report
from bench.gpu.sanitize import python_path
from worker_svc.engine.config import Determinism
from worker_svc.engine.gpu.kernels.linears import linear

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
KERNELS = "regex:paged_attention_kernel|linear_kernel"
BYTES, TIME = "dram__bytes.sum", "gpu__time_duration.sum"
STALL = "smsp__average_warps_issue_stalled_"
STALLS = ("long_scoreboard", "barrier", "wait", "math_pipe_throttle", "lg_throttle", "membar", "short_scoreboard")
METRICS = (BYTES, TIME, "sm__warps_active.avg.pct_of_peak_sustained_active",
           *(f"{STALL}{name}_per_issue_active.ratio" for name in STALLS))  # fmt: skip
MARGIN_S = 5.0


def counters(report: Report) -> None:
    ncu = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if ncu is None:
        report.row("counters", "ncu", note="was not found; it is part of the CUDA toolkit")
        return
    command = [ncu, "--csv", "--clock-control", "none", "--kernel-name", KERNELS, "--metrics", ",".join(METRICS),
               sys.executable, "-m", "bench.gpu.counters"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": python_path()}
    limit = max(min(report.seconds_left(), 600.0) - MARGIN_S, 1.0)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    launches = parsed(done.stdout)
    if not launches:  # counters may be reserved for root: ERR_NVGPUCTRPERM
        report.row("counters", "ncu", note=f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        return
    for name, values in zip(PROGRAMS, launches[1::2], strict=False):  # the first launch of each compiles
        show(report, name, values)


def show(report: Report, name: str, values: dict[str, float]) -> None:
    """A row with the bandwidth of a launch and its largest stalls, in warps per issue."""
    stalls = {key.removeprefix(STALL).split("_per_")[0]: value for key, value in values.items() if STALL in key}
    largest = sorted(stalls.items(), key=lambda item: -item[1])[:3]
    ms = values[TIME] / 1e6
    note = ", ".join(f"{reason} {value:.1f}" for reason, value in largest)
    report.row("counters", name, ms=ms, num_bytes=values[BYTES], note=note)
    report.figures[f"counters_{name.replace(' ', '_')}"] = {"ms": ms, "bytes": values[BYTES], **stalls}


def parsed(text: str) -> list[dict[str, float]]:
    """The metrics of each launch, from ncu's table of a line per launch and metric. Times are in nanoseconds, sizes in
    bytes."""
    start = text.find('"ID"')
    if start < 0:
        return []
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for line in csv.DictReader(io.StringIO(text[start:])):
        value = line["Metric Value"].replace(",", "")
        if value:
            found[line["ID"]][line["Metric Name"]] = float(value) * UNITS.get(line["Metric Unit"], 1.0)
    return list(found.values())


UNITS = {"usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def _attention(report: Report, contexts: list[int] | None = None, *, determinism: Determinism) -> None:
    case = Case.make(report, contexts or nano_contexts())
    case.run(case.triton(determinism))


def _linear(report: Report, outputs: int, inputs: int) -> None:
    x, weight = (torch.randn(n, inputs, device=report.device).to(report.dtype) for n in (1, outputs))
    linear.linear(x, weight, None)


CONTEXTS: dict[str, list[int] | None] = {"nano": None, "1 x 4k": [4095], "1 x 32k": [32_767]}
LINEARS = {"o": (1024, 2048), "down": (1024, 3072), "head": (151_936, 1024)}
PROGRAMS: dict[str, Callable[[Report], None]] = {
    f"attention {name} {determinism}": partial(_attention, contexts=contexts, determinism=determinism)
    for determinism in get_args(Determinism)
    for name, contexts in CONTEXTS.items()
} | {f"linear {name}": partial(_linear, outputs=sizes[0], inputs=sizes[1]) for name, sizes in LINEARS.items()}


def main() -> None:
    report = Report(is_smoke=False)
    for program in PROGRAMS.values():
        for _ in range(2):
            program(report)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
