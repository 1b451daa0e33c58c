#!/usr/bin/env python
"""Start time of `quire up`, and the speed of loading a large checkpoint.

    make bench-start
    python bench/start.py [--repeats 5] [--gib 1.0] [--profile]

First token: `quire up` with the demo model in a new process, the compiled kernels in their cache, and one request with
one output token as soon as the stack is ready. `cpu_s` is the processor time of each process until then.

Checkpoint: a random checkpoint of this size is read into memory by a plain read, and loaded by the engine in bfloat16
and int8, the page cache warm for both, the compiled kernels in their cache. `of_read` is the time of the read divided
by the time of the load, which excludes the start of the process and the import of torch.

Figures are the best of --repeats runs. A run that lost much time to other virtual machines is repeated
(bench/machine.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quire_client import Client

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import Figures, cpu_s, describe, quiet
from bench.workloads import make_model

ROOT = Path(__file__).resolve().parents[1]
LARGE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 32_000, "max_position_embeddings": 4096,
}  # fmt: skip
TIMEOUT_S = 120.0


# -- first token -------------------------------------------------------------------------------------------------------


def first_token(model: str = "demo", *flags: str) -> Figures:
    """Start the stack, get one token, stop the stack."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = ["-m", "quire_cli", "up", "--model", model, "--port", "0", "--ready-file", ready]
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, command), "--log-dir", folder, *flags], stdout=subprocess.DEVNULL, cwd=ROOT
        )
        try:
            facts = when_ready(process, ready)
            ready_s = time.perf_counter() - started
            with Client.connect(facts["target"]) as client:
                client.generate("def", max_tokens=1)
            token_s = time.perf_counter() - started
            pids = {service["name"]: service["pid"] for service in facts["services"]} | {"up": process.pid}
            used = {name: round(cpu_s(pid), 2) for name, pid in pids.items()}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
    return {"first_token_s": round(token_s, 2), "ready_s": round(ready_s, 2), "cpu_s": used}


def when_ready(process: subprocess.Popen[bytes], ready: Path) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the stack did not start")
        time.sleep(0.005)
    return dict(json.loads(ready.read_text()))


# -- checkpoint --------------------------------------------------------------------------------------------------------


def measure_load(gib: float, repeats: int) -> Figures:
    """The times of plain reads and of loads of one checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        layer_bytes = 2 * LARGE["hidden_size"] * (3 * LARGE["intermediate_size"] + 6 * 8 * LARGE["head_dim"])
        model = LARGE | {"num_hidden_layers": max(1, round(gib * 2**30 / layer_bytes))}
        made = make_model(Path(folder) / "model", model)
        size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
        timed_read(made)  # fills the page cache
        figures: Figures = {"gib": round(size / 2**30, 2)}
        read = best([quiet(partial(timed_read, made)) for _ in range(repeats)])
        figures["read"] = read | {"gib_per_s": round(size / 2**30 / read["seconds"], 2)}
        for name, flags in (("bfloat16", []), ("int8", ["int8"])):
            load = best([quiet(partial(timed_load, made, flags)) for _ in range(repeats)])
            of_read = {key: round(read[key] / load[key], 3) for key in ("seconds", "cpu_s")}
            figures[name] = load | {"of_read": of_read["seconds"], "of_read_by_cpu": of_read["cpu_s"]}
    return figures


def best(runs: Sequence[Figures]) -> Figures:
    return min(runs, key=lambda run: float(run["seconds"]))


def timed_read(folder: Path) -> Figures:
    """Read the weights into memory."""
    cpu, started = time.process_time(), time.perf_counter()
    for path in folder.glob("*.safetensors"):
        path.read_bytes()
    return {
        "seconds": round(time.perf_counter() - started, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def timed_load(folder: Path, flags: Sequence[str]) -> Figures:
    """Load the checkpoint in a new process."""
    command = [sys.executable, __file__, "--load", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def load(folder: Path, quantize: str | None, *, shows_profile: bool) -> None:
    """Load the checkpoint in this process and print the time."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from worker_svc.engine.config import EngineConfig
    from worker_svc.engine.kernels.build import load_kernels
    from worker_svc.engine.model_runner import ModelRunner

    load_kernels()
    config = EngineConfig(folder, "bfloat16", num_blocks=64, max_model_len=1024, quantize=quantize)
    if shows_profile:
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        profiler.runcall(ModelRunner, config)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    cpu, started = time.process_time(), time.perf_counter()
    ModelRunner(config)
    print(
        json.dumps(
            {
                "seconds": round(time.perf_counter() - started, 3),
                "cpu_s": round(time.process_time() - cpu, 3),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint; 0: none")
    parser.add_argument("--profile", action="store_true", help="with --load: print a profile")
    parser.add_argument("--load", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        load(Path(args.load[0]), next(iter(args.load[1:]), None), shows_profile=args.profile)
        return
    starts = [quiet(first_token) for _ in range(args.repeats)]
    for start in starts:
        print(f"start: {json.dumps(start)}", flush=True)
    figures: Figures = {"start": min(starts, key=lambda start: float(start["first_token_s"]))}
    if args.gib:
        figures["checkpoint"] = measure_load(args.gib, args.repeats)
    print(json.dumps(figures | describe()))


if __name__ == "__main__":
    main()
