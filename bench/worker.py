"""The CPU worker's engine alone: output tokens per second, no scheduler, no RPC, greedy, exact mode.

    python bench/worker.py                    # w1, w2, w3 in float32, bfloat16 and int8; about five minutes
    python bench/worker.py --workloads w1 --numbers bfloat16

The same run measures the speed of one large product per number type, and the speed of reading memory. `of_limit` is
the least possible time for the linear layers of the workload's steps (for each step the longer of multiplying and
reading the weights), divided by the measured time. int8 is --quantize int8 with bfloat16. tok_s is the best of the
repeats; tok_per_cpu_s uses processor time, which other processes disturb less. A run that lost much time to other
virtual machines is repeated (bench/machine.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # quire-worker sets it too; OpenMP reads it when torch is imported

import numpy as np
import torch

from bench.machine import Figures, describe, quiet
from bench.workloads import WORKLOADS, Request, Workload, make_model
from request_fields.fields import SamplingParams
from step_protocol.columns import EMPTY
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.model_runner import ModelRunner

NUMBERS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8")}
GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, 1)
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
LIMIT_SHAPE = (512, 4096, 1024)  # rows, outputs, inputs of the product whose speed is the limit


@dataclass
class Running:
    """All requests as columns; request i has row i and its blocks from the start."""

    prompt_lens: np.ndarray
    total_lens: np.ndarray  # tokens in KV when a request is done
    computed: np.ndarray
    tables: np.ndarray  # [requests, blocks]

    @classmethod
    def start(cls, requests: list[Request], block_size: int, shared_len: int) -> Running:
        prompt_lens = np.array([len(prompt) for prompt, _ in requests])
        total_lens = prompt_lens + np.array([count for _, count in requests]) - 1
        counts = -(-total_lens // block_size)
        shared = shared_len // block_size
        tables = np.zeros((len(requests), counts.max()), np.int64)
        next_block = shared
        for i, count in enumerate(counts):
            tables[i, :shared] = np.arange(shared)
            tables[i, shared:count] = np.arange(next_block, next_block + count - shared)
            next_block += count - shared
        return cls(prompt_lens, total_lens, np.zeros(len(requests), np.int64), tables)


class Loop:
    """Sends mixed steps (decodes first, then chunks of prompts) until every request has its tokens."""

    def __init__(self, runner: ModelRunner, workload: Workload) -> None:
        self.runner = runner
        self.requests = workload.requests
        self.shared_len = workload.shared_len
        self.block_size = runner.info.block_size
        self.steps: list[tuple[int, int]] = []  # tokens computed, rows sampled

    def run(self, sampling: SamplingParams) -> float:
        """Seconds for the whole workload."""
        self.runner.reset_rows()
        self.steps.clear()
        state = Running.start(self.requests, self.block_size, self.shared_len)
        started = time.perf_counter()
        if self.shared_len:
            self._prefill_shared(state, sampling)
        state.computed[1:] = self.shared_len
        opens = [self._open(i, state, sampling) for i in range(len(self.requests))]
        if self.shared_len:
            opens = opens[1:]
        while (state.computed < state.total_lens).any():
            self._step(state, self._choose(state), opens)
            opens = []
        return time.perf_counter() - started

    def _prefill_shared(self, state: Running, sampling: SamplingParams) -> None:
        opens = [self._open(0, state, sampling)]
        while state.computed[0] < self.shared_len:
            lens = np.zeros(len(self.requests), np.int64)
            lens[0] = min(self.runner.info.max_num_batched_tokens, self.shared_len - state.computed[0])
            self._step(state, lens, opens)
            opens = []

    def _open(self, i: int, state: Running, sampling: SamplingParams) -> RowOpen:
        prompt = np.array(self.requests[i][0], np.uint32)
        count = -(-state.total_lens[i] // self.block_size)
        table = state.tables[i, :count].astype(np.uint32)
        return RowOpen(i, prompt, len(prompt), table, int(state.computed[i]), replace(sampling, seed=i), 0)

    def _choose(self, state: Running) -> np.ndarray:
        """Query lengths of all rows under the token budget."""
        wanted = np.where(state.computed < state.prompt_lens, state.prompt_lens - state.computed, 1)
        wanted[state.computed >= state.total_lens] = 0
        is_decode = wanted == 1
        budget = self.runner.info.max_num_batched_tokens - is_decode.sum()
        before = np.cumsum(np.where(is_decode, 0, wanted)) - np.where(is_decode, 0, wanted)
        return np.where(is_decode, 1, np.clip(budget - before, 0, wanted))

    def _step(self, state: Running, query_lens: np.ndarray, opens: list[RowOpen]) -> None:
        rows = np.flatnonzero(query_lens)
        lens, context = query_lens[rows], state.computed[rows]
        starts = np.cumsum(lens) - lens
        positions = np.arange(lens.sum()) - np.repeat(starts - context, lens)
        blocks = state.tables[np.repeat(rows, lens), positions // self.block_size]
        output = self.runner.execute(
            StepBatch(
                step_id=len(self.steps) + 1,
                rows=rows.astype(np.uint32),
                query_lens=lens.astype(np.uint32),
                context_lens=context.astype(np.uint32),
                sample_mask=context + lens >= state.prompt_lens[rows],
                slot_mapping=(blocks * self.block_size + positions % self.block_size).astype(np.uint32),
                opens=opens,
                close_rows=EMPTY,
            )
        )
        if output.errors:
            raise RuntimeError(f"step failed: {output.errors[0]}")
        self.steps.append((int(lens.sum()), len(output.rows)))
        state.computed[rows] += lens


@dataclass(frozen=True)
class Limits:
    """Limits of this machine now: multiply-adds per second by number type, and bytes read per second."""

    macs: dict[str, float]
    read: float

    def seconds(self, number: str, workload: Workload, steps: list[tuple[int, int]]) -> float:
        """The least time for the linear layers of these steps."""
        body, head = _weights(workload)
        weights_read = (body + head) * BYTES[number] / self.read
        return sum(max((t * body + s * head) / self.macs[number], weights_read) for t, s in steps)


def _weights(workload: Workload) -> tuple[int, int]:
    """Weights of all layers, and of the vocabulary head."""
    m = workload.model
    heads = 2 * m["num_attention_heads"] + 2 * m["num_key_value_heads"]
    layer = m["hidden_size"] * (heads * m["head_dim"] + 3 * m["intermediate_size"])
    return layer * m["num_hidden_layers"], m["hidden_size"] * m["vocab_size"]


def fastest(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest call."""
    function()
    spent = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        spent.append(time.perf_counter() - started)
    return min(spent)


@torch.inference_mode()
def measure_limits(numbers: list[str], threads: int) -> Limits:
    torch.set_num_threads(threads)
    rows, outputs, inputs = LIMIT_SHAPE
    macs = {}
    for number in numbers:
        dtype, quantize = NUMBERS[number]
        weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
        layer = make_backend("cpu", threads, "exact", quantize).make_linear(weight, None)
        x = torch.randn(rows, inputs).to(weight.dtype)
        macs[number] = rows * outputs * inputs / fastest(lambda layer=layer, x=x: layer(x), 15)
    memory = torch.zeros(1 << 26)
    return Limits(macs, memory.numel() * memory.element_size() / fastest(memory.sum, 8))


def measure_engine(folder: Path, number: str, workload: Workload, args: argparse.Namespace, limits: Limits) -> dict:
    dtype, quantize = NUMBERS[number]
    settings = {"determinism": args.determinism, "threads": args.threads, "quantize": quantize}
    settings |= {"max_num_batched_tokens": args.max_num_batched_tokens, "max_model_len": 4096}
    started = time.perf_counter()
    runner = ModelRunner(EngineConfig(folder, dtype, kv_cache_memory=2 << 30, **settings))
    load_s = time.perf_counter() - started
    loop = Loop(runner, workload)
    loop.run(GREEDY)
    runs = [quiet(partial(timed, loop)) for _ in range(args.repeats)]
    seconds = min(run["seconds"] for run in runs)
    return {
        "tok_s": round(workload.num_output / seconds, 1),
        "tok_per_cpu_s": round(workload.num_output / min(run["cpu_s"] for run in runs), 1),
        "of_limit": round(limits.seconds(number, workload, loop.steps) / seconds, 3),
        "load_s": round(load_s, 1),
        "steal_pct": max(run["steal_pct"] or 0.0 for run in runs),
        "num_repeats": sum(run["num_repeats"] for run in runs),
    }


def timed(loop: Loop) -> Figures:
    """Time and processor time of one run."""
    cpu_before = time.process_time()
    seconds = loop.run(GREEDY)
    return {"seconds": seconds, "cpu_s": time.process_time() - cpu_before}


def measure(name: str, args: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """All figures of one workload."""
    workload = WORKLOADS[name]()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), workload.model)
        for number in args.numbers:
            figures[number] = measure_engine(folder, number, workload, args, limits)
            print(f"{name} {number}: {figures[number]}", flush=True)
    return figures


def _choices(allowed: Any) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = sorted(set(chosen) - set(allowed))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return chosen

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=_choices(WORKLOADS), default=list(WORKLOADS), metavar="w1,w2,w3")
    parser.add_argument("--numbers", type=_choices(NUMBERS), default=list(NUMBERS), metavar="float32,bfloat16,int8")
    parser.add_argument("--threads", type=int, default=available_cores(), help="default: one per core")
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024, help="per step (default 1024)")
    parser.add_argument("--determinism", choices=("exact", "best_effort"), default="exact")
    parser.add_argument("--repeats", type=int, default=3, help="number of runs; the fastest counts (default 3)")
    args = parser.parse_args()
    limits = measure_limits(args.numbers, args.threads)
    figures = {name: measure(name, args, limits) for name in args.workloads}
    print(
        json.dumps(
            {
                **describe(),
                "torch": torch.__version__,
                "threads": args.threads,
                "read_gb_s": round(limits.read / 1e9, 1),
                "gmac_s": {number: round(macs / 1e9, 1) for number, macs in limits.macs.items()},
                **figures,
            }
        )
    )


if __name__ == "__main__":
    main()
