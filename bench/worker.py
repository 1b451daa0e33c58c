"""Output tokens per second of the engine alone: a plain loop over ModelRunner, no scheduler, no RPC, greedy.

    python bench/worker.py --workload w1 --dtype bfloat16 --threads 2

w1: 64 requests of 25-256 tokens in and 25-256 out on a small model (4 layers, hidden 256, vocabulary 4,096).
w2: 16 requests of 32-128 in and 16-64 out on the shape of Qwen3-0.6B, random weights.
w3: 64 requests that share 1,024 tokens and add 32 of their own, 32 out, on the small model.
All requests are there at the start and ignore the end-of-sequence token. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as quire-worker does; OpenMP reads it when torch is imported

import numpy as np
import torch

from bench.workloads import WORKLOADS, Request, make_model
from worker_svc.engine import linear
from worker_svc.engine.batch import EMPTY, RowOpen, SamplingParams, StepBatch
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner


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

    def __init__(self, runner: ModelRunner, requests: list[Request], shared_len: int) -> None:
        self.runner = runner
        self.requests = requests
        self.shared_len = shared_len
        self.block_size = runner.info.block_size
        self.step_us: list[int] = []

    def run(self, sampling: SamplingParams) -> float:
        """Seconds for the whole workload."""
        self.runner.reset_rows()
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
                step_id=len(self.step_us) + 1,
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
        self.step_us.append(output.forward_us)
        state.computed[rows] += lens


def profile(loop: Loop, sampling: SamplingParams) -> None:
    """Prints where the time of one run goes, by operation of the backend."""
    backend, spent, calls = loop.runner._backend, Counter(), Counter()

    def timed(name, function):
        def call(*args, **kwargs):
            started = time.perf_counter()
            result = function(*args, **kwargs)
            spent[name] += time.perf_counter() - started
            calls[name] += 1
            return result

        return call

    for name in ("add_rms_norm", "qk_norm_rope_store", "paged_attention", "gated_activation", "sample"):
        setattr(backend, name, timed(name, getattr(backend, name)))
    original = linear.PackedLinear.__call__
    linear.PackedLinear.__call__ = timed("linear", original)
    total = loop.run(sampling)
    linear.PackedLinear.__call__ = original
    spent["rest"] = total - sum(spent.values())
    for name, seconds in spent.most_common():
        print(f"{name:20s} {seconds:7.3f} s {seconds / total:6.1%} {calls[name]:7d} calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("w1", "w2", "w3"), default="w1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantize", choices=("int8",), default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--determinism", choices=("exact", "best_effort"), default="exact")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    requests, model, shared_len = WORKLOADS[args.workload]()
    sampling = SamplingParams(args.temperature, 0, args.top_p, 0.0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), model, args.dtype)
        runner = ModelRunner(
            EngineConfig(
                folder,
                args.dtype,
                block_size=args.block_size,
                max_num_batched_tokens=args.max_num_batched_tokens,
                max_model_len=4096,
                determinism=args.determinism,
                threads=args.threads,
                backend=args.backend,
                quantize=args.quantize,
                kv_cache_memory=2 << 30,
            )
        )
        loop = Loop(runner, requests, shared_len)
        loop.run(sampling)
        seconds = [loop.run(sampling) for _ in range(args.repeat)]
        if args.profile:
            profile(loop, sampling)
    num_output = sum(count for _, count in requests)
    best, middle = min(seconds), statistics.median(seconds)
    print(
        json.dumps(
            {
                **vars(args),
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "output_tokens": num_output,
                "seconds": round(middle, 3),
                "output_tokens_per_s": round(num_output / middle, 1),
                "best_output_tokens_per_s": round(num_output / best, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
