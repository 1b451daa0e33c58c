"""The CPU worker's engine alone: output tokens per second, no scheduler, no RPC, greedy, exact mode.

    python bench/worker.py                    # w1, w2, w3 in float32, bfloat16 and int8; about five minutes
    python bench/worker.py --quick            # fewer requests and layers, under a minute
    python bench/worker.py --workloads w1 --numbers bfloat16 --profile
    python bench/worker.py --numbers bfloat16 --speculation    # drafts of which a share is right
    python bench/worker.py --recurrent --numbers bfloat16,float32   # Qwen3.5-0.8B beside a dense model, transformers

The same run measures a padded PyTorch loop (bench/padded.py), the speed of one large product per number type, and the
speed of reading memory. `of_limit` is the least possible time for the linear layers of the workload's steps (for each
step the longer of multiplying and reading the weights), divided by the measured time. int8 is --quantize int8 with
bfloat16. tok_s is the best of the repeats; tok_per_cpu_s uses processor time, which other processes disturb less. A run
that lost much time to other virtual machines is repeated (bench/machine.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # quire-worker sets it too; OpenMP reads it when torch is imported

import numpy as np
import torch

from bench.machine import Figures, StealMeter, describe, quiet
from bench.padded import PaddedLoop
from bench.speculation import GREEDY, measure_speculation
from bench.workloads import QWEN3_06B, WORKLOADS, Request, Workload, make_model
from request_fields.fields import SamplingParams
from step_protocol.columns import EMPTY
from step_protocol.messages import RowOpen, StepBatch
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels import linear as kernel_linear
from worker_svc.engine.kernels import torch_linear as linear
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.model_runner import ModelRunner

NUMBERS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8")}
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
LIMIT_SHAPE = (512, 4096, 1024)  # rows, outputs, inputs of the product whose speed is the limit
RECURRENT_PROMPT, RECURRENT_OUTPUT = 256, 32
TRANSFORMERS_PROMPT, TRANSFORMERS_OUTPUT = 64, 8  # it is slower
RECURRENT_SHAPES: dict[str, Any] = {  # shapes of Qwen3.5-0.8B, with a smaller vocabulary
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
DENSE_SHAPES: dict[str, Any] = QWEN3_06B | {"vocab_size": 32768, "num_hidden_layers": 24, "intermediate_size": 4704}
QUICK_REQUESTS = {"w1": 16, "w2": 4, "w3": 16}
QUICK_LAYERS = 4


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
    if args.profile:
        profile(loop)
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


def measure_padded(folder: Path, number: str, workload: Workload, args: argparse.Namespace) -> float:
    torch.set_num_threads(args.threads)
    loop = PaddedLoop(folder, getattr(torch, number))
    return round(workload.num_output / min(loop.run(workload) for _ in range(args.repeats)), 1)


def profile(loop: Loop) -> None:
    """Prints the processor time of one run by operation of the backend, without the fused call: the last layer
    computes attention for all tokens."""
    backend, spent, calls = loop.runner._backend, Counter(), Counter()
    loop.runner._model._fused = None

    def timed(name, function):
        def call(*args, **kwargs):
            started = time.process_time()
            result = function(*args, **kwargs)
            spent[name] += time.process_time() - started
            calls[name] += 1
            return result

        return call

    for name in ("add_norm", "qk_norm_rope_store", "paged_attention", "gated_activation", "sample"):
        setattr(backend, name, timed(name, getattr(backend, name)))
    layers = [linear.PackedLinear, kernel_linear.KernelLinear]
    originals = [layer.__call__ for layer in layers]
    for layer in layers:
        layer.__call__ = timed("linear", layer.__call__)
    started = time.process_time()
    loop.run(GREEDY)
    total = time.process_time() - started
    for layer, original in zip(layers, originals, strict=True):
        layer.__call__ = original
    spent["rest"] = total - sum(spent.values())
    for name, seconds in spent.most_common():
        print(f"    {name:20s} {seconds:7.3f} s {seconds / total:6.1%} {calls[name]:7d} calls")


def choose_workload(name: str, *, is_quick: bool) -> Workload:
    workload = WORKLOADS[name]()
    if not is_quick:
        return workload
    model = workload.model | {"num_hidden_layers": QUICK_LAYERS}
    return workload._replace(requests=workload.requests[: QUICK_REQUESTS[name]], model=model)


def measure(name: str, args: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """All figures of one workload."""
    workload = choose_workload(name, is_quick=args.quick)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), workload.model)
        for number in args.numbers:
            figures[number] = measure_engine(folder, number, workload, args, limits)
            print(f"{name} {number}: {figures[number]}", flush=True)
        for number in {"float32", "bfloat16"} & set(args.numbers) if args.padded else ():
            figures[f"padded_{number}"] = measure_padded(folder, number, workload, args)
            print(f"{name} padded loop {number}: {figures[f'padded_{number}']} tok/s", flush=True)
    return figures


def measure_drafts(number: str, args: argparse.Namespace) -> dict[str, Any]:
    """Drafts in one row and in many."""
    dtype, quantize = NUMBERS[number]
    workload, most_rows = choose_workload("w2", is_quick=args.quick), max(args.rows)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), workload.model)
        sizes = {"num_blocks": 16 * most_rows, "max_num_seqs": most_rows, "max_model_len": 256}
        runner = ModelRunner(EngineConfig(folder, dtype, quantize=quantize, threads=args.threads, **sizes))
    figures = dict[str, Any]()
    for num_rows in args.rows:
        num_tokens = 120 if num_rows == 1 and not args.quick else 48
        figures |= measure_speculation(runner, num_rows, num_tokens, args.repeats, number)
    return figures


def measure_recurrent(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of one row: of a prompt, and of the output after a short one. Of Qwen3.5-0.8B's shapes, of a
    dense model with as many active parameters, and of the first in transformers. All engines take turns; best of the
    repeats."""
    import transformers

    prompt = np.random.default_rng(0).integers(3, RECURRENT_SHAPES["vocab_size"], RECURRENT_PROMPT).tolist()
    meter, runs = StealMeter(), dict[str, Callable[[], tuple[float, float]]]()
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**RECURRENT_SHAPES)).bfloat16().eval()
        model.save_pretrained(Path(scratch, "recurrent"))
        folders = {"recurrent": Path(scratch, "recurrent"), "dense": make_model(Path(scratch, "dense"), DENSE_SHAPES)}
        sizes = {"num_blocks": 64, "max_num_seqs": 2, "max_model_len": 1024, "snapshot_memory": 0}
        for number in args.numbers:
            for name, folder in folders.items():
                dtype, quantize = NUMBERS[number]
                runner = ModelRunner(EngineConfig(folder, dtype, quantize=quantize, threads=args.threads, **sizes))
                runs[f"{name} {number}"] = partial(_speeds, runner, prompt)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            found[name].append(run())
    torch.set_num_threads(args.threads)
    for number in {"float32", "bfloat16"} & set(args.numbers):
        found[f"transformers {number}"] = [_speeds_of_transformers(model.to(getattr(torch, number)), prompt)]
    return {
        **{
            name: dict(zip(("prompt", "decode"), map(_best, zip(*all_, strict=True)), strict=True))
            for name, all_ in found.items()
        },
        "steal_pct": meter.pct(),
    }


def _best(speeds: tuple[float, ...]) -> float:
    return round(max(speeds), 1)


def _speeds(runner: ModelRunner, prompt: list[int]) -> tuple[float, float]:
    """Tokens per second of a prompt, and of the output after a short one."""
    wanted = ((RECURRENT_PROMPT, 1), (16, 1), (16, 1 + RECURRENT_OUTPUT))
    loops = [Loop(runner, Workload([Request(prompt[:length], count)], DENSE_SHAPES, 0)) for length, count in wanted]
    whole, short, long = (loop.run(GREEDY) for loop in loops)
    return RECURRENT_PROMPT / whole, RECURRENT_OUTPUT / (long - short)


@torch.inference_mode()
def _speeds_of_transformers(model: Any, prompt: list[int]) -> tuple[float, float]:
    started = time.perf_counter()
    output = model(torch.tensor([prompt[:TRANSFORMERS_PROMPT]]), use_cache=True)
    prompt_s = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(TRANSFORMERS_OUTPUT):
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return TRANSFORMERS_PROMPT / prompt_s, TRANSFORMERS_OUTPUT / (time.perf_counter() - started)


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
    parser.add_argument("--quick", action="store_true", help="fewer requests, 4 layers, one repeat")
    parser.add_argument("--no-padded", dest="padded", action="store_false", help="leave out the padded PyTorch loop")
    parser.add_argument("--profile", action="store_true", help="print the engine's time by operation")
    parser.add_argument("--speculation", action="store_true", help="measure drafts, and nothing else")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="of --speculation (default 1 16 64)")
    parser.add_argument("--recurrent", action="store_true", help="measure a model with recurrent layers, nothing else")
    args = parser.parse_args()
    if args.recurrent:
        print(json.dumps({**describe(), "threads": args.threads, "recurrent": measure_recurrent(args)}))
        return
    if args.speculation:
        figures = {number: measure_drafts(number, args) for number in args.numbers}
        print(json.dumps({**describe(), "threads": args.threads, "quick": args.quick, "speculation": figures}))
        return
    args.repeats = 1 if args.quick else args.repeats
    limits = measure_limits(args.numbers, args.threads)
    figures = {name: measure(name, args, limits) for name in args.workloads}
    print(
        json.dumps(
            {
                **describe(),
                "torch": torch.__version__,
                "threads": args.threads,
                "quick": args.quick,
                "read_gb_s": round(limits.read / 1e9, 1),
                "gmac_s": {number: round(macs / 1e9, 1) for number, macs in limits.macs.items()},
                **figures,
            }
        )
    )


if __name__ == "__main__":
    main()
