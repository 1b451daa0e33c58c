"""The machine: GPU, driver, clocks and limits, and the versions of libraries."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata

import torch
import triton

from bench.gpu.report import Report

LIBRARIES = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "xxhash", "redis", "uvloop", "llguidance",
    "flash-attn", "flash-attn-3", "vllm",
)  # fmt: skip
QUERIES = (
    "name", "driver_version", "compute_cap", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
    "power.limit", "power.max_limit", "temperature.gpu", "clocks_throttle_reasons.active", "ecc.mode.current",
    "mig.mode.current", "pcie.link.gen.current", "pcie.link.width.current", "memory.used",
)  # fmt: skip


def environment(report: Report) -> None:
    for name in LIBRARIES:
        report.row("environment", name, note=_version(name))
    report.figures["python"] = platform.python_version()
    report.figures["torch"], report.figures["triton"] = torch.__version__, triton.__version__
    report.figures["cores"] = len(os.sched_getaffinity(0))
    if report.is_smoke:
        report.figures["device"] = "cpu (smoke)"
        return
    device = torch.cuda.get_device_properties(0)  # raises an error with the cause if there is no GPU
    report.figures |= {"device": device.name, "memory_gib": round(device.total_memory / 2**30, 1)}
    report.row("environment", device.name, note=f"{report.figures['memory_gib']} GiB, CUDA {torch.version.cuda}")
    for name, value in query(QUERIES).items():
        report.row("environment", name, note=value)
        report.figures[f"gpu_{name}"] = value


def query(names: tuple[str, ...]) -> dict[str, str]:
    """nvidia-smi's report for the first GPU. A field that this driver does not know is left out."""
    found = _ask(names)
    if found is not None:
        return dict(zip(names, found, strict=True))
    answers = {name: _ask((name,)) for name in names}
    return {name: values[0] for name, values in answers.items() if values}


def _ask(names: tuple[str, ...]) -> list[str] | None:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return values if len(values) == len(names) else None


def _version(name: str) -> str:
    """Version of an installed distribution. It is not imported, which takes long for some."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
