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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.gpu.model import load, make_checkpoint, model_of
from bench.gpu.report import Report
from bench.workloads import Request, Workload, nano
from request_fields.fields import SamplingParams
from worker_svc.engine.batch import EMPTY, RowOpen, StepBatch, StepOutput
from worker_svc.engine.gpu.runner import DeviceRunner

ROOT = Path(__file__).resolve().parents[2]
TEMPERATURE = 0.6
DEPTH = 2
MAX_BATCHED_TOKENS = 16_384
TARGET_TOK_S = 25_000


def workload_of(report: Report) -> Workload:
    if not report.is_smoke:
        return nano(model_of(report))
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(3, 199, 5 + i).tolist(), 4 + i) for i in range(4)]
    return Workload(requests, model_of(report), 0)


def in_process(report: Report) -> None:
    """Steps as a scheduler would send them, two in flight, without scheduler and RPCs."""
    tok_s = _drive(report, "in_process")
    report.figures["in_process_tok_s"] = round(tok_s, 1)


def in_process_fp8(report: Report) -> None:
    """The same with an fp8 cache."""
    report.figures["in_process_fp8_tok_s"] = round(_drive(report, "in_process_fp8", kv_cache_dtype="fp8"), 1)


def _drive(report: Report, section: str, **fields: str) -> float:
    """Tokens per second of the best of three runs."""
    workload = workload_of(report)
    settings = {} if report.is_smoke else {"max_num_batched_tokens": MAX_BATCHED_TOKENS, "max_model_len": 4096}
    loop = Loop(load(make_checkpoint(report), report, **(settings | fields)), workload)
    loop.run()
    seconds = [loop.run() for _ in range(1 if report.is_smoke else 3)]
    tok_s = workload.num_output / min(seconds)
    report.figures[f"{section}_steps"] = loop.num_steps
    note = f"{tok_s:.0f} tok/s, {loop.num_steps} steps, host {loop.launch_s / loop.num_steps * 1e3:.2f} ms a launch"
    name = f"{len(workload.requests)} requests"
    report.row(section, name, ok=_is_fast(report, tok_s), ms=min(seconds) * 1e3, note=note)
    return tok_s


def _is_fast(report: Report, tok_s: float) -> bool | None:
    return None if report.is_smoke else tok_s >= TARGET_TOK_S


class Loop:
    """Runs requests to completion. A step has decodes first, then prompt chunks, within the token budget."""

    def __init__(self, runner: DeviceRunner, workload: Workload) -> None:
        self.runner = runner
        self.requests = workload.requests
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
        return RowOpen(i, prompt, len(prompt), table, 0, SamplingParams(TEMPERATURE, 0, 1.0, 0.0, i), 0)

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


def through_grpc(report: Report) -> None:
    """`quire up` (gateway, scheduler, worker) and `quire bench` on this machine over loopback."""
    workload = workload_of(report)
    folder = make_checkpoint(report)
    with tempfile.TemporaryDirectory() as scratch:
        requests = Path(scratch) / "requests.jsonl"
        lines = [json.dumps({"token_ids": r.prompt, "max_tokens": r.num_output}) for r in workload.requests]
        requests.write_text("\n".join(lines))
        with running_stack(folder, Path(scratch), report) as target:
            ask(requests, target, "warm-up", report)
            found = [ask(requests, target, str(i), report) for i in range(1 if report.is_smoke else 3)]
    best = max(found, key=lambda result: result["output_tokens_per_s"])
    tok_s = best["output_tokens_per_s"]
    report.figures |= {
        "grpc_tok_s": round(tok_s, 1),
        "grpc_ttft_ms": best["ttft_ms"],
        "grpc_itl_ms": best.get("itl_ms"),
    }
    note = f"{tok_s:.0f} tok/s"
    inside = report.figures.get("in_process_tok_s")
    if inside:
        report.figures["grpc_of_in_process"] = round(tok_s / inside, 3)
        note += f", {tok_s / inside:.1%} of in-process"
    name = f"{len(workload.requests)} requests"
    report.row("through_grpc", name, ok=_is_fast(report, tok_s), ms=best["duration_s"] * 1e3, note=note)


@contextmanager
def running_stack(folder: Path, scratch: Path, report: Report) -> Iterator[str]:
    """Yields the address of the gateway when all services are ready."""
    ready, log = scratch / "ready.json", scratch / "up.log"
    flags = ["--model", folder, "--port", 0, "--ready-file", ready, "--backend", "cuda", "--determinism", "best_effort"]
    if report.is_smoke:
        flags += ["--dtype", "float32", "--num-blocks", 40, "--max-num-seqs", 8, "--max-model-len", 256]
    else:
        flags += ["--block-size", 256, "--max-num-seqs", 256, "--max-num-batched-tokens", MAX_BATCHED_TOKENS]
        flags += ["--max-model-len", 4096]
    environment = os.environ | ({"QUIRE_CUDA_GRAPHS": "off"} if report.figures.get("has_no_graphs") else {})
    command = [sys.executable, "-m", "quire_client.cli", "up", *map(str, flags), "--log-dir", str(scratch)]
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


def ask(requests: Path, target: str, salt: str, report: Report) -> dict:
    """One run of the client with all requests at once, with a cache salt of its own so that runs share no prefixes."""
    flags = [
        "--dataset",
        "file",
        "--path",
        str(requests),
        "--warmup",
        "0",
        "--json",
        "--no-progress",
        "--target",
        target,
    ]
    flags += ["--temperature", str(TEMPERATURE), "--cache-salt", salt]
    command = [sys.executable, "-m", "quire_client.cli", "bench", *flags]
    left = min(report.seconds_left(), threading.TIMEOUT_MAX)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"quire bench exited with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
