"""Where the time of a step goes: kernel times from torch.profiler, as a table and as a compressed trace."""

from __future__ import annotations

import gzip
from collections import defaultdict
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
from worker_svc.engine.gpu.step.pending_step import PendingStep

STEPS = 5
MAX_TRACE_BYTES = 12 << 20  # compressed; larger files do not come back from some machines
FILTERED = replace(GREEDY, temperature=0.6, top_k=20, top_p=0.95)


def profile(report: Report) -> None:
    """Decode steps of one row, of 256 rows with nano-vllm's lengths, greedy and filtered, and a mixed step."""
    runner = load(make_checkpoint(report), report, cuda_graphs="lazy", **NANO_SETTINGS)
    many = [5, 40, 17] if report.is_smoke else nano_contexts()
    _profile(report, runner, "decode 1", many[:1], GREEDY)
    _profile(report, runner, f"decode {len(many)}", many, GREEDY)
    _profile(report, runner, f"decode {len(many)} filtered", many, FILTERED)
    _profile(report, runner, "mixed", many[:-1], GREEDY, chunk=20 if report.is_smoke else 2048)


def _profile(
    report: Report, runner: DeviceRunner, name: str, contexts: list[int], sampling: SamplingParams, chunk: int = 0
) -> None:
    """`chunk`: tokens of a prompt that one more row computes in every step, always the same ones."""
    rng = np.random.default_rng(0)
    lengths = [context + 1 for context in contexts] + ([chunk + 1] if chunk else [])
    prompts = [rng.integers(3, runner.info.vocab_size, length).tolist() for length in lengths]
    rows = Rows(runner, prompts, STEPS + 8, contexts + ([0] if chunk else []), sampling)
    counts = dict.fromkeys(range(len(contexts)), 1) | ({len(contexts): chunk} if chunk else {})

    def launch() -> PendingStep:
        rows.computed[len(contexts) :] = 0
        return rows.launch(counts)

    for _ in range(2):
        if errors := launch().result().errors:
            raise RuntimeError(str(errors[0]))
    with record_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for step in [launch() for _ in range(STEPS)]:
            step.result()
    _write_trace(recorded, report.out / f"trace-{name.replace(' ', '-')}.json.gz")
    _table(report, name, [event for event in recorded.events() if event.device_type.name == "CUDA"])


def _write_trace(recorded: Any, trace: Path) -> None:
    trace.parent.mkdir(parents=True, exist_ok=True)
    plain = trace.with_suffix("")
    recorded.export_chrome_trace(str(plain))
    packed = gzip.compress(plain.read_bytes(), 6)
    plain.unlink()
    if len(packed) <= MAX_TRACE_BYTES:
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
