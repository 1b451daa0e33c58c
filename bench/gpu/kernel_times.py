"""Where the time of a step goes: kernel times from torch.profiler, as a table and as a compressed trace."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record_profile

from bench.gpu.kernels import nano_contexts
from bench.gpu.model import GREEDY, NANO_SETTINGS, Rows, load, make_checkpoint
from bench.gpu.report import Report
from request_fields.fields import SamplingParams
from worker_svc.engine.gpu.runner import DeviceRunner

STEPS = 5
MOST_TRACE_BYTES = 12 << 20  # compressed; larger files do not come back from some machines
FILTERED = replace(GREEDY, temperature=0.6, top_k=20, top_p=0.95)


def profile(report: Report) -> None:
    """Decode steps of one row, of 256 rows with nano-vllm's lengths, greedy and filtered, and a mixed step."""
    runner = load(make_checkpoint(report), report, cuda_graphs="lazy", **NANO_SETTINGS)
    many = [5, 40, 17] if report.is_smoke else nano_contexts()
    steps: list[tuple[str, Callable[[], tuple[Rows, dict[int, int]]]]] = [
        ("decode 1", lambda: _rows(runner, [many[1]], GREEDY)),
        (f"decode {len(many)}", lambda: _rows(runner, many, GREEDY)),
        (f"decode {len(many)} filtered", lambda: _rows(runner, many, FILTERED)),
        ("mixed", lambda: _rows(runner, many[:-1], GREEDY, prompt=20 if report.is_smoke else 2048)),
    ]
    for name, make in steps:
        rows, counts = make()
        events = _record(rows, counts, report.out / f"trace-{name.replace(' ', '-')}.json.gz")
        _table(report, name, events)


def _rows(
    runner: DeviceRunner, contexts: list[int], sampling: SamplingParams, prompt: int = 0
) -> tuple[Rows, dict[int, int]]:
    """Rows with these tokens in the pool, and the tokens that each computes in a step."""
    rng = np.random.default_rng(0)
    lengths = [context + 1 for context in contexts] + ([(STEPS + 4) * prompt] if prompt else [])
    prompts = [rng.integers(3, runner.info.vocab_size, length).tolist() for length in lengths]
    rows = Rows(runner, prompts, STEPS + 8, contexts + ([0] if prompt else []), sampling)
    counts = dict.fromkeys(range(len(contexts)), 1)
    return rows, counts | ({len(contexts): prompt} if prompt else {})


def _record(rows: Rows, counts: dict[int, int], trace: Path) -> list[Any]:
    """Events of the device in a few steps after the first ones. The trace is written if it is small enough."""
    for _ in range(2):
        rows.launch(counts).result()
    with record_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        pending = [rows.launch(counts) for _ in range(STEPS)]
        for step in pending:
            step.result()
    _write_trace(recorded, trace)
    return [event for event in recorded.events() if event.device_type.name == "CUDA"]


def _write_trace(recorded: Any, trace: Path) -> None:
    trace.parent.mkdir(parents=True, exist_ok=True)
    plain = trace.with_suffix("")
    recorded.export_chrome_trace(str(plain))
    packed = gzip.compress(plain.read_bytes(), 6)
    plain.unlink()
    if len(packed) <= MOST_TRACE_BYTES:
        trace.write_bytes(packed)


def _table(report: Report, name: str, events: list[Any]) -> None:
    """Rows per kernel, microseconds and launches per step, and the part of the time in which no kernel runs."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for event in events:
        total[event.name] += event.time_range.elapsed_us() / STEPS
        count[event.name] += 1
    busy = sum(total.values())
    for kernel, us in sorted(total.items(), key=lambda item: -item[1])[:14]:
        note = f"{us:.1f} us in {count[kernel] / STEPS:.1f} launches, {us / busy:.1%}" if busy else ""
        report.row("profile", f"{name}: {kernel[:60]}", ms=us / 1e3, note=note)
    if events:
        first, last = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
        span = (last - first) / STEPS
        launches = sum(count.values()) / STEPS
        note = f"{launches:.0f} launches, kernels {busy:.0f} us, idle {max(span - busy, 0):.0f} us"
        report.row("profile", f"{name}: whole step", ms=span / 1e3, note=note)
        report.figures[f"profile_{name.replace(' ', '_')}"] = {
            "us": round(span, 1), "kernel_us": round(busy, 1), "launches": round(launches, 1),
            "kernels": {kernel[:80]: [round(us, 1), count[kernel] / STEPS] for kernel, us in total.items()},
        }  # fmt: skip
    else:
        report.row("profile", name, note="the profiler recorded no kernels")
