"""nano-vllm's workload: the engine in-process, then the whole path of client, gateway, scheduler and worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.model import GREEDY, NANO_SETTINGS, check_graphs, load, make_checkpoint, model_of
from bench.gpu.report import Report
from bench.workloads import Request, Workload, nano
from request_fields.fields import SamplingParams
from step_protocol.columns import EMPTY
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from worker_svc.engine.gpu.runner import DeviceRunner

ROOT = Path(__file__).resolve().parents[2]
NANO = SamplingParams(0.6, 0, 1.0, 0.0, 0)  # nano-vllm's benchmark
QWEN3 = SamplingParams(0.6, 20, 0.95, 0.0, 0)  # generation_config.json of every Qwen3 checkpoint
DEFAULTS = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
SAMPLINGS = {
    "in_process_tok_s": ("nano-vllm's sampling", NANO),
    "in_process_greedy_tok_s": ("greedy", GREEDY),
    "in_process_qwen3_tok_s": ("Qwen3's sampling", QWEN3),
}
DEPTH = 2
NO_GPU = "-1"  # names a device, as `quire up` requires, that does not exist
TARGET_TOK_S = 25_000
TARGET_GRPC = 0.97  # fraction of the in-process rate
TARGET_FILTERED = 0.9  # fraction of the greedy rate


def workload_of(report: Report) -> Workload:
    if not report.is_smoke:
        return nano(model_of(report))
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(3, 199, 5 + i).tolist(), 4 + i) for i in range(4)]
    return Workload(requests, model_of(report), 0)


def baseline(report: Report) -> None:
    """The engine with the tiles of its table, before other tiles are chosen: one run."""
    loop = _loop(report)
    report.figures["baseline_tok_s"] = _measure(report, "baseline", "nano-vllm's sampling", loop, NANO, runs=1)
    check_graphs(report, "baseline", loop.runner)


def in_process(report: Report) -> None:
    """Steps as a scheduler would send them, two in flight, without scheduler and RPCs: greedy, with nano-vllm's
    sampling, and with the defaults of every Qwen3 checkpoint."""
    loop = _loop(report)
    figures = report.figures
    for key, (name, sampling) in SAMPLINGS.items():
        figures[key] = _measure(report, "in_process", name, loop, sampling, runs=1)
    ratio = figures["in_process_qwen3_tok_s"] / figures["in_process_greedy_tok_s"]
    figures["qwen3_of_greedy"] = round(ratio, 3)
    ok = None if report.is_smoke else ratio >= TARGET_FILTERED
    report.row("in_process", "Qwen3's sampling / greedy", ok=ok, note=f"{ratio:.1%} (target {TARGET_FILTERED:.0%})")


def in_process_fp8(report: Report) -> None:
    """With an fp8 cache."""
    loop = _loop(report, kv_cache_dtype="fp8", cuda_graphs="lazy")
    report.figures["in_process_fp8_tok_s"] = _measure(report, "in_process_fp8", "fp8 cache", loop, NANO, runs=2)


def in_process_exact(report: Report) -> None:
    """In exact mode."""
    loop = _loop(report, determinism="exact", cuda_graphs="lazy")
    report.figures["in_process_exact_tok_s"] = _measure(report, "in_process_exact", "exact", loop, NANO, runs=1)


def _loop(report: Report, **fields: Any) -> Loop:
    return Loop(load(make_checkpoint(report), report, **(NANO_SETTINGS | fields)), workload_of(report))


def _measure(
    report: Report,
    section: str,
    name: str,
    loop: Loop,
    sampling: SamplingParams,
    *,
    runs: int,
) -> float:
    """Tokens per second of the best run, after one that is not counted."""
    loop.sampling = sampling
    loop.run()
    seconds = min(loop.run() for _ in range(1 if report.is_smoke else runs))
    tok_s = loop.num_output / seconds
    report.figures[f"{section}_steps"] = loop.num_steps
    note = f"{tok_s:.0f} tok/s, {loop.num_steps} steps, host {loop.launch_s / loop.num_steps * 1e3:.2f} ms a launch"
    ok = _is_fast(report, tok_s) if section == "in_process" else None
    report.row(section, f"{len(loop.requests)} requests, {name}", ok=ok, ms=seconds * 1e3, note=note)
    return round(tok_s, 1)


def _is_fast(report: Report, tok_s: float) -> bool | None:
    return None if report.is_smoke else tok_s >= TARGET_TOK_S


class Loop:
    """Runs requests to completion. A step has decodes first, then prompt chunks, within the token budget."""

    def __init__(self, runner: DeviceRunner, workload: Workload) -> None:
        self.runner = runner
        self.requests = workload.requests
        self.num_output = workload.num_output
        self.sampling = NANO
        self.size = runner.info.block_size
        self.prompt_lens = np.array([len(request.prompt) for request in self.requests])
        self.total_lens = self.prompt_lens + np.array([request.num_output for request in self.requests]) - 1
        counts = -(-self.total_lens // self.size)
        self.first_blocks = np.cumsum(counts) - counts
        self.num_blocks = counts
        self.num_steps = 0
        self.launch_s = 0.0

    def run(self) -> float:
        """Seconds for all requests."""
        self.runner.reset_rows()
        self.num_steps, self.launch_s = 0, 0.0
        computed = np.zeros(len(self.requests), np.int64)
        waiting: deque = deque()
        opens = [self._open(i) for i in range(len(self.requests))]
        started = time.perf_counter()
        while (lens := self._choose(computed)).any():
            launched = time.perf_counter()
            waiting.append(self.runner.launch(self._batch(lens, computed, opens)))
            self.launch_s += time.perf_counter() - launched
            opens = []
            computed += lens
            if len(waiting) == DEPTH:
                self._check(waiting.popleft().result())
        while waiting:
            self._check(waiting.popleft().result())
        return time.perf_counter() - started

    def _open(self, i: int) -> RowOpen:
        prompt = np.array(self.requests[i].prompt, np.uint32)
        table = np.arange(self.first_blocks[i], self.first_blocks[i] + self.num_blocks[i]).astype(np.uint32)
        return RowOpen(i, prompt, len(prompt), table, 0, replace(self.sampling, seed=i), 0)

    def _choose(self, computed: np.ndarray) -> np.ndarray:
        """Query lengths of all rows."""
        wanted = np.where(computed < self.prompt_lens, self.prompt_lens - computed, 1)
        wanted[computed >= self.total_lens] = 0
        is_decode = (wanted == 1) & (computed >= self.prompt_lens)
        prompts = np.where(is_decode, 0, wanted)
        budget = self.runner.info.max_num_batched_tokens - is_decode.sum()
        return np.where(is_decode, 1, np.clip(budget - (np.cumsum(prompts) - prompts), 0, prompts))

    def _batch(self, query_lens: np.ndarray, computed: np.ndarray, opens: list[RowOpen]) -> StepBatch:
        self.num_steps += 1
        rows = np.flatnonzero(query_lens)
        lens, contexts = query_lens[rows], computed[rows]
        starts = np.cumsum(lens) - lens
        positions = np.arange(lens.sum()) - np.repeat(starts - contexts, lens)
        slots = np.repeat(self.first_blocks[rows], lens) * self.size + positions
        return StepBatch(
            self.num_steps, rows.astype(np.uint32), lens.astype(np.uint32), contexts.astype(np.uint32),
            contexts + lens >= self.prompt_lens[rows], slots.astype(np.uint32), opens=opens, close_rows=EMPTY,
        )  # fmt: skip

    def _check(self, output: StepOutput) -> None:
        if output.errors:
            raise RuntimeError(f"a step failed: {output.errors[0]}")


def first_answer(report: Report) -> None:
    """`quire up` with its defaults, exact mode among them, and one request of it."""
    prompt = [5] * (9 if report.is_smoke else 3000)
    with tempfile.TemporaryDirectory() as scratch:
        requests = Path(scratch) / "requests.jsonl"
        requests.write_text(json.dumps({"token_ids": prompt, "max_tokens": 8}))
        started = time.perf_counter()
        with running_stack(make_checkpoint(report), Path(scratch), report, has_defaults=True) as target:
            report.row("first_answer", "quire up", ok=True, ms=1e3 * (time.perf_counter() - started))
            found = ask(requests, target, "first", report)
    note = f"TTFT {found['ttft_ms']['p50']:.0f} ms"
    report.row("first_answer", f"a prompt of {len(prompt)} tokens", ok=True, note=note)


def through_grpc(report: Report) -> None:
    """`quire up` (gateway, scheduler, worker) and `quire bench` on this machine over loopback, with nano-vllm's
    sampling."""
    with tempfile.TemporaryDirectory() as scratch:
        requests = _write_requests(report, Path(scratch))
        with running_stack(make_checkpoint(report), Path(scratch), report) as target:
            ask(requests, target, "warm-up", report)
            found = [ask(requests, target, str(i), report) for i in range(1 if report.is_smoke else 2)]
    best = max(found, key=_tok_s)
    tok_s = _tok_s(best)
    report.figures |= {
        "grpc_tok_s": round(tok_s, 1),
        "grpc_ttft_ms": best["ttft_ms"],
        "grpc_itl_ms": best.get("itl_ms"),
    }
    _grpc_row(report, "through_grpc", "nano-vllm's sampling", best, ok=_is_fast(report, tok_s))
    inside = report.figures.get("in_process_tok_s")
    if inside:
        report.figures["grpc_of_in_process"] = round(tok_s / inside, 3)
        ok = None if report.is_smoke else tok_s >= TARGET_GRPC * inside
        report.row("through_grpc", "gRPC / in-process", ok=ok, note=f"{tok_s / inside:.1%} (target {TARGET_GRPC:.0%})")


def filtered_through_grpc(report: Report) -> None:
    """The same for a checkpoint with Qwen3's generation_config.json: greedy, its defaults, and requests in bursts."""
    folder = _with_defaults(make_checkpoint(report), report.scratch / "with_defaults")
    with tempfile.TemporaryDirectory() as scratch:
        requests = _write_requests(report, Path(scratch))
        with running_stack(folder, Path(scratch), report) as target:
            for name in ("warm-up", "greedy", "defaults", "greedy 2", "defaults 2", "bursts"):
                flags = BURSTS if name == "bursts" else []
                temperature = 0.0 if name.startswith("greedy") else QWEN3.temperature
                found = ask(requests, target, name, report, temperature, flags)
                if name != "warm-up":
                    _grpc_row(report, "filtered_through_grpc", name, found)
                    key = f"grpc_{name.split()[0]}_tok_s"
                    report.figures[key] = round(max(_tok_s(found), report.figures.get(key, 0.0)), 1)
                    report.figures[f"grpc_{name.split()[0]}_ttft_ms"] = found["ttft_ms"]
    ratio = report.figures["grpc_defaults_tok_s"] / report.figures["grpc_greedy_tok_s"]
    report.figures["grpc_filtered_of_greedy"] = round(ratio, 3)
    ok = None if report.is_smoke else ratio >= TARGET_FILTERED
    note = f"{ratio:.1%} (target {TARGET_FILTERED:.0%})"
    report.row("filtered_through_grpc", "Qwen3's sampling / greedy", ok=ok, note=note)


BURSTS = ["--request-rate", "60", "--burstiness", "0.1"]  # groups of requests, about four seconds in all


def _with_defaults(source: Path, folder: Path) -> Path:
    """The checkpoint with sampling defaults; its files are links."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


def _write_requests(report: Report, folder: Path) -> Path:
    requests = folder / "requests.jsonl"
    found = workload_of(report).requests
    requests.write_text("\n".join(json.dumps({"token_ids": r.prompt, "max_tokens": r.num_output}) for r in found))
    return requests


def _tok_s(result: dict[str, Any]) -> float:
    return float(result["output_tokens_per_s"])


def _grpc_row(report: Report, section: str, name: str, result: dict[str, Any], ok: bool | None = None) -> None:
    note = f"{_tok_s(result):.0f} tok/s, TTFT {result['ttft_ms']}, ITL {result.get('itl_ms')}"
    report.row(section, name, ok=ok, ms=result["duration_s"] * 1e3, note=note)


@contextmanager
def running_stack(folder: Path, scratch: Path, report: Report, *, has_defaults: bool = False) -> Iterator[str]:
    """Yields the address of the gateway when all services are ready. `has_defaults`: without settings for speed."""
    ready, log = scratch / "ready.json", scratch / "up.log"
    flags = ["--model", folder, "--port", 0, "--ready-file", ready, "--backend", "cuda"]
    flags += [] if has_defaults else ["--determinism", "best_effort"]
    if has_defaults and not report.is_smoke:
        flags += ["--max-model-len", NANO_SETTINGS["max_model_len"], "--cuda-graphs", "lazy"]
    elif report.is_smoke:
        flags += ["--dtype", "float32", "--num-blocks", 40, "--max-num-seqs", 8, "--max-model-len", 256]
    else:
        flags += ["--block-size", 256, "--max-num-seqs", 256]
        flags += ["--max-num-batched-tokens", NANO_SETTINGS["max_num_batched_tokens"]]
        flags += ["--max-model-len", NANO_SETTINGS["max_model_len"]]
    environment = os.environ | ({"QUIRE_CUDA_GRAPHS": "off"} if report.figures.get("has_no_graphs") else {})
    environment |= {"CUDA_VISIBLE_DEVICES": NO_GPU} if report.is_smoke else {}
    command = [sys.executable, "-m", "quire_cli", "up", *map(str, flags), "--log-dir", str(scratch)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)
    try:
        yield _when_ready(process, ready, scratch, report)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def _when_ready(process: subprocess.Popen[bytes], ready: Path, scratch: Path, report: Report) -> str:
    while not ready.exists():
        if process.poll() is not None or report.seconds_left() < 0:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(scratch.glob("*.log")))
            raise RuntimeError(f"the stack did not start:\n{logs}")
        time.sleep(0.1)
    return str(json.loads(ready.read_text())["target"])


def ask(
    requests: Path,
    target: str,
    salt: str,
    report: Report,
    temperature: float = NANO.temperature,
    load_flags: Sequence[str] = (),
) -> dict[str, Any]:
    """One run of the client, with all requests at once unless `load_flags` say otherwise. The cache salt is one of its
    own, so that runs share no prefixes."""
    flags = ["--dataset", "file", "--path", str(requests), "--warmup", "0", "--json", "--no-progress"]
    flags += ["--target", target, "--temperature", str(temperature), "--cache-salt", salt, *load_flags]
    command = [sys.executable, "-m", "quire_cli", "bench", *flags]
    left = min(report.seconds_left(), threading.TIMEOUT_MAX)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"quire bench exited with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
