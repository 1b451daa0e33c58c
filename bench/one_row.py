"""Output tokens per second of one row by number type, int4 included, beside llama.cpp, and the memory of the weights.

    python bench/one_row.py --threads 1                                 # bfloat16, int8, int4; shapes of Qwen3-0.6B
    python bench/one_row.py --llama $PEERS_VENV/bin/llama-bench         # and Q4_0, after scripts/install_peers --llama
    python bench/one_row.py --model FOLDER --llama .../llama-bench --gguf A.bf16.gguf A.q8_0.gguf

int4 is a `pack-quantized` checkpoint in groups of 128 inputs, with embedding and head in bfloat16; all matrices of Q4_0
are in 4 bits. The vocabulary is smaller than the model's, so that its head, which is not in 4 bits, does not decide.
All of them take turns; `tok_s` is the best of the rounds, `of_bfloat16` and `of_llama` are medians of the ratios within
a round. `first_ms`: least time of a prompt of 64 tokens. `memory_mb`: resident memory after a load less that before.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # quire-worker sets it too; OpenMP reads it when torch is imported

import numpy as np

from bench.machine import StealMeter, describe
from bench.worker import GREEDY, NUMBERS
from bench.workloads import QWEN3_06B, SMALL, make_model
from step_protocol.messages import RowOpen, StepBatch
from svc_common.memory import resident_bytes
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.kernels.machine import available_cores
from worker_svc.engine.model_runner import ModelRunner

SHAPES = QWEN3_06B | {"vocab_size": 32768}
MAKE_GGUF = Path(__file__).parent / "peers" / "make_gguf.py"
PROMPT = np.arange(3, 35, dtype=np.uint32)


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        plain = args.model or make_model(Path(scratch, "plain"), SHAPES)
        folders = {name: plain for name in args.numbers if name != "int4"}
        if "int4" in args.numbers:
            folders["int4"] = make_model(Path(scratch, "int4"), SHAPES, is_int4=True)
        _load(make_model(Path(scratch, "small"), SMALL), "bfloat16", args)  # memory that every engine allocates
        runners, memory = {}, {}
        for name, folder in folders.items():
            runners[name], memory[name] = _load(folder, name, args)
        runs: dict[str, Callable[[], float]] = {
            name: lambda runner=runner: decode(runner, PROMPT, args.num_tokens) for name, runner in runners.items()
        }
        for target in args.gguf:
            runs["llama_" + target.suffixes[-2].strip(".")] = _llama(args, target)
        if args.llama and not args.gguf:
            runs["llama"] = _llama(args, _q4_0(args, plain, Path(scratch, "q4_0.gguf")))
        first_ms = {name: _first_ms(runner, args) for name, runner in runners.items()}
        meter = StealMeter()
        rounds = [{name: run() for name, run in runs.items()} for _ in range(1 + args.repeats)][1:]
    figures = {name: _figures(name, rounds) for name in runs}
    for name in runners:
        figures[name] |= {"first_ms": first_ms[name], "memory_mb": memory[name]}
    print(json.dumps({**describe(), "threads": args.threads, "steal_pct": meter.pct(), **figures}))


def decode(runner: ModelRunner, prompt: np.ndarray, num_tokens: int) -> float:
    """Greedy tokens per second of one row after its first token, as the scheduler asks for them."""
    num_blocks = -(-(len(prompt) + num_tokens) // runner.info.block_size)
    table, one = np.arange(num_blocks, dtype=np.uint32), np.ones(1, np.uint32)
    runner.reset_rows()
    opened = RowOpen(0, prompt, len(prompt), table, 0, GREEDY, 0)
    samples, slots = np.ones(1, np.bool_), np.arange(len(prompt), dtype=np.uint32)
    runner.execute(StepBatch(1, one * 0, one * len(prompt), one * 0, samples, slots, opens=[opened]))
    started = time.perf_counter()
    for step in range(num_tokens - 1):
        position = one * (len(prompt) + step)
        runner.execute(StepBatch(2 + step, one * 0, one, position, samples, position))
    return (num_tokens - 1) / (time.perf_counter() - started)


def _load(folder: Path, name: str, args: argparse.Namespace) -> tuple[ModelRunner, int]:
    """An engine, and the MB of memory that it took."""
    dtype, quantize = NUMBERS.get(name, ("bfloat16", None))
    before = _resident()
    settings = {"threads": args.threads, "quantize": quantize, "num_blocks": 64, "max_num_seqs": 2}
    runner = ModelRunner(EngineConfig(folder, dtype, max_model_len=1024, **settings))
    return runner, (_resident() - before) >> 20


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def _first_ms(runner: ModelRunner, args: argparse.Namespace) -> float:
    seconds = []
    for _ in range(1 + args.repeats):
        started = time.perf_counter()
        decode(runner, np.arange(1000, 1064, dtype=np.uint32), 1)
        seconds.append(time.perf_counter() - started)
    return round(1000 * min(seconds), 2)


def _q4_0(args: argparse.Namespace, folder: Path, target: Path) -> Path:
    """The same shapes in Q4_0."""
    python = args.llama.with_name("python")
    subprocess.run([python, MAKE_GGUF, folder, target, "q4_0"], check=True, stdout=sys.stderr)
    return target


def _llama(args: argparse.Namespace, target: Path) -> Callable[[], float]:
    """Tokens per second of llama-bench."""
    command = [args.llama, "-m", target, "-p", "0", "-n", args.num_tokens, "-t", args.threads, "-r", "1", "-o", "json"]

    def run() -> float:
        found = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout
        return float(json.loads(found)[0]["avg_ts"])

    return run


def _figures(name: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"tok_s": round(max(each[name] for each in rounds), 1)}
    for base in rounds[0]:
        if base != name and base.startswith(("bfloat16", "llama")):
            found[f"of_{base}"] = round(median(each[name] / each[base] for each in rounds), 2)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", nargs="+", choices=[*NUMBERS, "int4"], default=["bfloat16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=available_cores(), help="default: one per core")
    parser.add_argument("--num-tokens", type=int, default=48, help="of one run (default 48)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint instead of those shapes")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files for llama-bench instead of Q4_0")
    parser.add_argument("--llama", type=Path, help="llama-bench of llama.cpp, beside the python of its environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
