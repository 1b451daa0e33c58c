"""compute-sanitizer over all kernels with small shapes: memory errors, races, uninitialized reads, wrong barriers.

    bench/gpu/start sanitize

Without a tool, the kernels run once, which compiles them into the cache and shows that they work. Each tool
then runs the same program and checks only Triton's kernels. torch allocates every tensor on its own, so that an access
beyond a tensor is an error. initcheck also reports what kernels read for padding, whose results are not used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FEW_TOOLS = ("memcheck", "racecheck")  # within a section, over the kernels that pass results between their programs
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")
SHARE = {"memcheck": 0.3, "racecheck": 0.4, "initcheck": 0.5}  # fractions of the time left; the last tool: all
MIN_S = 20.0
MAX_LINES = 30  # lines of a tool's messages
ERROR_CODE = 99  # exit status of a program in which a tool found an error
SUMMARY = re.compile(r"=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one tool."""

    tool: str
    verdict: str  # clean, errors, failed, out of time, skipped
    num_errors: int
    seconds: float
    messages: str


def run(out: Path, budget_s: float) -> int:
    """Prints a table and writes sanitizer.json. Returns an exit code: 0 only if every tool ran and found nothing."""
    ends = time.monotonic() + budget_s
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.gpu.sanitized"]
    findings = [_run("without a tool", command, ends - time.monotonic())]
    sanitizer = find_sanitizer()
    if sanitizer is None:
        text = f"compute-sanitizer was not found on PATH or in {', '.join(PLACES)}; it is part of the CUDA toolkit"
        findings.append(Finding("compute-sanitizer", "failed", 0, 0.0, text))
    elif findings[0].verdict == "clean":
        for tool in TOOLS:
            left = ends - time.monotonic()
            limit = left * SHARE.get(tool, 1.0)
            findings.append(_run(tool, [*tool_command(sanitizer, tool), *command], limit))
            (out / "sanitizer.json").write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    (out / "sanitizer.json").write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    print("\n| tool | result | errors | s |\n| --- | --- | --- | --- |")
    for finding in findings:
        print(f"| {finding.tool} | {finding.verdict} | {finding.num_errors} | {finding.seconds:.0f} |")
    return 0 if all(finding.verdict == "clean" for finding in findings) else 1


def few_kernels(report: Report) -> None:
    """Two tools over attention, its work lists and the sampler, as a section."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        report.row(report.section, "compute-sanitizer", note="was not found; it is part of the CUDA toolkit")
        return
    command = [sys.executable, "-m", "bench.gpu.sanitized", "--few"]
    for tool, share in zip(FEW_TOOLS, (0.5, 1.0), strict=True):
        limit = share * min(report.seconds_left(), 600.0)
        found = _run(tool, [*tool_command(sanitizer, tool), *command], limit)
        ok = None if found.verdict in ("out of time", "skipped") else found.verdict == "clean"
        note = f"{found.verdict}, {found.num_errors} errors: {found.messages[-200:]}"
        report.row(report.section, tool, ok=ok, ms=found.seconds * 1e3, note=note)


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


def kernel_filter(sanitizer: str) -> list[str]:
    """Flags that select Triton's kernels, whose names end in _kernel. Kernels of libraries take most of the time. The
    flag has changed its name between versions."""
    text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, timeout=60).stdout
    flag = next((flag for flag in ("--kernel-name", "--filter") if flag in text), None)
    return [flag, "kernel_substring=_kernel"] if flag else []


def tool_command(sanitizer: str, tool: str) -> list[str]:
    return [
        sanitizer, "--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20",
        "--target-processes", "application-only", *kernel_filter(sanitizer),
    ]  # fmt: skip


def _run(name: str, command: list[str], limit_s: float) -> Finding:
    if limit_s < MIN_S:
        return Finding(name, "skipped", 0, 0.0, f"{limit_s:.0f} s are left")
    print(f"== {name}", flush=True)
    started = time.monotonic()
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": python_path()}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else str(error.stdout or "")
        finding = Finding(name, "out of time", count_errors(text), limit_s, messages(text))
    else:
        finding = judge(name, done.returncode, done.stdout + done.stderr, time.monotonic() - started)
    print(finding.messages, flush=True)
    return finding


def judge(name: str, code: int, text: str, seconds: float) -> Finding:
    """A program that ends badly without errors of the tool has failed by itself."""
    count = count_errors(text)
    verdict = "errors" if count or code == ERROR_CODE else "failed" if code else "clean"
    lines = text.splitlines()[-MAX_LINES:]
    return Finding(name, verdict, count, round(seconds, 1), "\n".join(lines) if verdict == "failed" else messages(text))


def count_errors(text: str) -> int:
    return sum(int(number) for match in SUMMARY.findall(text) for number in match if number)


def messages(text: str) -> str:
    """The first messages of the tool, and its summary."""
    lines = [line for line in text.splitlines() if line.startswith("=====")]
    return "\n".join([*lines[: MAX_LINES - 1], lines[-1]] if len(lines) > MAX_LINES else lines)


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
