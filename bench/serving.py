#!/usr/bin/env python
"""The throughput of the whole stack compared with its own engine in-process and with peers.

    make bench-serving
    python bench/serving.py --workloads w1,w2,w3 --peers vllm,transformers,llama
    python bench/serving.py --cores 2 --threads 1 --peers none   # what the split costs

Stack: `quire up` (gateway, scheduler, one worker) and one client process (`quire bench`), bf16, all on --cores cores.
With fewer --threads than --cores, the worker gets cores of its own and the others get the rest, unless --shared-cores.
In-process: bench/worker.py, the same engine with the same threads on the worker's cores, without scheduler and RPC.
Peers run in their own virtual environment ($PEERS_VENV, default .peers; created by scripts/install_peers), on the same
cores; a missing peer is reported as null. Figures are the best of --repeats runs after one uncounted run. Runs of stack
and engine alternate, because the load of a machine varies. `cpu` is the number of cores used by each process.
`cpu_ratio` compares output tokens per second of processor time, which other programs affect less than `ratio`;
`worker_cpu_ratio` does so for the worker alone. A run that lost much time to other virtual machines is repeated
(bench/machine.py). The last line is one JSON object: the figures of W1, and the others under their names.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from quire_cli.stack.supervisor import free_ports

from bench.machine import cpu_s, describe, pin, quiet
from bench.workloads import WORKLOADS, Workload, make_model

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / ".cache" / "bench"  # a fixed path, so that vLLM reuses what it compiled
START_TIMEOUT_S = 400.0  # a fresh machine compiles the kernels first
PEERS = ("vllm", "transformers", "llama")
INT8_WORKLOAD = "w2"  # its model is large enough for int8 weights to matter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="w1,w2,w3")
    parser.add_argument("--peers", default="vllm,transformers,llama", help="peers, separated by commas; none: no peers")
    parser.add_argument("--cores", type=int, default=2, help="cores for all processes")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of worker, engine and peers")
    parser.add_argument("--shared-cores", action="store_true", help="all processes on all cores, whatever --threads is")
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024, help="token budget of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-venv", default=os.environ.get("PEERS_VENV", str(ROOT / ".peers")))
    parser.add_argument("--peer-timeout-s", type=float, default=420.0, help="a peer that takes longer is skipped")
    parser.add_argument("--stack-flags", default="", help='additional flags of quire up, e.g. "--chunk-interval-ms 20"')
    parser.add_argument("--log-dir", help="keep the services' logs here")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    args.places = make_places(cores, len(cores) if args.shared_cores else args.threads)
    names = [] if args.peers == "none" else args.peers.split(",")
    if unknown := (set(names) - set(PEERS)) | (set(args.workloads.split(",")) - set(WORKLOADS)):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; peers are {', '.join(PEERS)}, workloads {list(WORKLOADS)}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends child processes
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.workloads.split(","):
            found[name] = measure(name, args, names, Path(scratch))
    first = found.pop("w1", {})
    places = {"model_cores": args.places.model, "service_cores": args.places.services}
    print(json.dumps({**first, **found, **describe(), "threads": args.threads, **places}))


@dataclass(frozen=True)
class Places:
    """The cores of the model's process and of all others."""

    model: list[int]
    services: list[int]


def make_places(cores: list[int], num_model: int) -> Places:
    """The model gets cores of its own if that leaves some for the others."""
    return Places(cores[:num_model], cores[num_model:]) if num_model < len(cores) else Places(cores, cores)


def measure(name: str, args: argparse.Namespace, peers: Sequence[str], scratch: Path) -> dict[str, Any]:
    """All figures of one workload."""
    workload = WORKLOADS[name]()
    model = MODELS / f"hidden-{workload.model['hidden_size']}"
    if not (model / "config.json").exists():  # written last: the model is complete
        make_model(model, workload.model)
    requests = write_requests(scratch / f"{name}.jsonl", workload)
    report(f"{name}: {len(workload.requests)} requests, {workload.num_output} output tokens")
    stack, inproc = [], []
    with running_stack(model, args, scratch) as services:
        ask_stack(services, requests, "warm-up", args.places)
        for i in range(args.repeats):
            stack.append(quiet_run(services, requests, str(i), args.places))
            inproc.append(engine_speed(name, args))
    best = fastest(stack)
    inproc_tok_s = max(speed["tok_s"] for speed in inproc)
    inproc_per_cpu_s = max(speed["tok_per_cpu_s"] for speed in inproc)
    figures: dict[str, Any] = {
        "stack_tok_s": round(best["output_tokens_per_s"], 1),
        "inproc_tok_s": inproc_tok_s,
        "ratio": round(best["output_tokens_per_s"] / inproc_tok_s, 3),
        "cpu_ratio": round(max(result["tok_per_cpu_s"] for result in stack) / inproc_per_cpu_s, 3),
        "worker_cpu_ratio": round(max(result["tok_per_worker_s"] for result in stack) / inproc_per_cpu_s, 3),
        "steal_pct": {"stack": [run["steal_pct"] for run in stack], "inproc": [run["steal_pct"] for run in inproc]},
        "num_repeats": sum(run["num_repeats"] for run in (*stack, *inproc)),
        "cpu": best["cpu"],
        "ttft_p50_ms": best["ttft_ms"]["p50"],
    }
    if workload.shared_len:
        cold = another_stack(model, requests, args, scratch, "--no-prefix-caching")
        figures["no_cache_tok_s"] = round(cold["output_tokens_per_s"], 1)
        figures["steal_pct"]["no_cache"] = cold["steal_pct"]
        figures["no_cache_ttft_p50_ms"] = cold["ttft_ms"]["p50"]
        figures["ttft_gain"] = round(cold["ttft_ms"]["p50"] / best["ttft_ms"]["p50"], 2)
    if name == INT8_WORKLOAD:
        int8 = another_stack(model, requests, args, scratch, "--quantize", "int8")
        figures["int8_tok_s"] = round(int8["output_tokens_per_s"], 1)
        figures["steal_pct"]["int8"] = int8["steal_pct"]
    for key, value in figures.items():
        report(f"  {key:24} {value}")
    for peer in [*peers, *(["llama_q8"] if name == INT8_WORKLOAD and "llama" in peers else [])]:
        found = peer_run(peer, model, requests, args)
        figures[PEER_KEYS[peer]], figures["steal_pct"][peer] = found["tok_s"], found.get("steal_pct")
        report(f"  {PEER_KEYS[peer]:24} {found['tok_s']}, steal {found.get('steal_pct')} %")
    return figures


def another_stack(model: Path, requests: Path, args: argparse.Namespace, scratch: Path, *flags: str) -> dict[str, Any]:
    """The best run of a stack with additional flags."""
    with running_stack(model, args, scratch, *flags) as services:
        ask_stack(services, requests, "warm-up", args.places)
        return fastest([quiet_run(services, requests, str(i), args.places) for i in range(args.repeats)])


def fastest(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(results, key=lambda result: float(result["output_tokens_per_s"]))


def write_requests(path: Path, workload: Workload) -> Path:
    """Write the workload in the format of `quire bench --dataset file` and the peers."""
    lines = [json.dumps({"token_ids": r.prompt, "max_tokens": r.num_output}) for r in workload.requests]
    path.write_text("\n".join(lines))
    return path


@contextmanager
def running_stack(model: Path, args: argparse.Namespace, scratch: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """`quire up` on free ports; yields its ready file: target and services."""
    ready = scratch / "ready.json"
    command = [
        "-m",
        "quire_cli",
        "up",
        "--model",
        model,
        "--dtype",
        "bfloat16",
        "--port",
        "0",
        "--ready-file",
        ready,
    ]
    command += [
        "--threads",
        args.threads,
        "--max-num-seqs",
        64,
        "--max-num-batched-tokens",
        args.max_num_batched_tokens,
    ]
    command += ["--kv-cache-memory", "2G", "--max-model-len", 2048, *shlex.split(args.stack_flags), *flags]
    if args.log_dir:
        command += ["--log-dir", args.log_dir]
    with (scratch / "up.log").open("w") as log:
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log, cwd=ROOT)
    try:
        yield _when_ready(process, ready, scratch / "up.log")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_TIMEOUT_S)


def _when_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the stack did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return dict(json.loads(ready.read_text()))


def quiet_run(services: dict[str, Any], requests: Path, salt: str, places: Places) -> dict[str, Any]:
    """`ask_stack`, repeated if the machine lost much time. A repeat has its own salt."""
    attempts = count()
    return quiet(lambda: ask_stack(services, requests, f"{salt}-{next(attempts)}", places))


def ask_stack(services: dict[str, Any], requests: Path, salt: str, places: Places) -> dict[str, Any]:
    """One run of the client: its result and the cores used by each process.

    Each run has its own salt and so does not reuse the cache of another run.
    """
    pids = {service["name"]: service["pid"] for service in services["services"]}
    for name, pid in pids.items():
        pin(pid, places.model if name.startswith("worker") else places.services)
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    result = quire_bench(requests, "--target", services["target"], "--cache-salt", salt, cores=places.services)
    used = {name: round((cpu_s(pid) - before[name]) / result["duration_s"], 2) for name, pid in pids.items()}
    used["client"] = round(result["client_cpu"], 2)
    speed = result["output_tokens_per_s"]
    return result | {
        "cpu": used,
        "tok_per_cpu_s": speed / sum(used.values()),
        "tok_per_worker_s": speed / used["worker-0"],
    }


def quire_bench(requests: Path, *flags: str, cores: Sequence[int] | None = None) -> dict[str, Any]:
    """Run `quire bench` with all requests at once."""
    command = [
        "-m",
        "quire_cli",
        "bench",
        "--dataset",
        "file",
        "--path",
        str(requests),
        "--warmup",
        "0",
        "--json",
    ]
    return dict(last_json([sys.executable, *command, *flags], cores=cores))


def engine_speed(name: str, args: argparse.Namespace) -> dict[str, float]:
    """The same engine without scheduler and RPC: tok_s and tok_per_cpu_s."""
    flags = ["--workloads", name, "--numbers", "bfloat16", "--threads", str(args.threads), "--repeats", "1"]
    flags += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    return dict(last_json([sys.executable, "bench/worker.py", *flags], cores=args.places.model)[name]["bfloat16"])


def peer_run(peer: str, model: Path, requests: Path, args: argparse.Namespace) -> dict[str, Any]:
    """tok_s of a peer: None if it is not installed or fails; the reason goes to stderr."""
    try:
        return quiet(lambda: {"tok_s": float(RUN_PEER[peer](model, requests, args))})
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        report(f"  {peer} is not measured: {error}")
        return {"tok_s": None}


def vllm_tok_s(model: Path, requests: Path, args: argparse.Namespace) -> float:
    """vLLM's CPU backend in-process: compiled for the small model, eager for the large one (equally fast)."""
    flags = ["--repeats", str(args.repeats)] if model.name.endswith("256") else ["--repeats", "1", "--eager"]
    return _peer_script("vllm_offline.py", model, requests, args, *flags)


def transformers_tok_s(model: Path, requests: Path, args: argparse.Namespace) -> float:
    """Continuous batching of transformers, in-process."""
    return _peer_script("transformers_cb.py", model, requests, args)


def _peer_script(script: str, model: Path, requests: Path, args: argparse.Namespace, *flags: str) -> float:
    venv = Path(args.peers_venv)
    command = [venv / "bin/python", ROOT / "bench/peers" / script, model, requests, "--threads", args.threads, *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["VLLM_CACHE_ROOT"] = str(venv / "cache")  # keep the output of torch.compile
    found = last_json([str(word) for word in command], environment, args.peer_timeout_s, args.places.model)
    return float(found["tok_s"])


def llama_tok_s(model: Path, requests: Path, args: argparse.Namespace, weights: str = "bf16") -> float:
    """llama.cpp's server with one slot per request, measured over HTTP with `quire bench`."""
    gguf = model.with_suffix(f".{weights}.gguf")
    if not gguf.exists():
        make = [Path(args.peers_venv) / "bin/python", ROOT / "bench/peers/make_gguf.py", model, gguf, weights]
        subprocess.run([str(word) for word in make], check=True, capture_output=True, timeout=args.peer_timeout_s)
    num_slots = len(requests.read_text().splitlines())
    with running_llama(gguf, args, num_slots, model.with_suffix(".llama.log")) as (_, url):
        flags = ("--backend", "openai", "--base-url", url, "--extra-body", json.dumps({"cache_prompt": True}))
        quire_bench(requests, *flags, "--num-prompts", "4")
        return float(quire_bench(requests, *flags)["output_tokens_per_s"])


@contextmanager
def running_llama(gguf: Path, args: argparse.Namespace, num_slots: int, log: Path) -> Iterator[tuple[int, str]]:
    """llama.cpp's server; yields its process and URL."""
    server = Path(args.peers_venv) / "bin/llama-server"
    if not server.exists():
        raise RuntimeError(f"{server} does not exist; build it with scripts/install_peers --llama")
    port = free_ports(1)[0]
    command = [server, "-m", gguf, "--port", port, "-t", args.threads, "-np", num_slots, "-c", 1280 * num_slots]
    command += ["--no-webui", "-b", 2048, "-ub", 512]
    with log.open("w") as output:
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_http(process, f"{url}/health", log)
        yield process.pid, url
    finally:
        process.kill()
        process.wait()


def llama_q8_tok_s(model: Path, requests: Path, args: argparse.Namespace) -> float:
    """llama.cpp's server with 8-bit weights."""
    return llama_tok_s(model, requests, args, "q8_0")


def _wait_http(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start: {log.read_text()[-500:]}") from None
            time.sleep(0.1)


def last_json(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
    cores: Sequence[int] | None = None,
) -> Any:
    """Run a program; the JSON object in the last line of its output. Raises RuntimeError with the end of its output.

    `cores`: the cores that it may use; None: all of this process.
    """
    restrict = None if cores is None else partial(os.sched_setaffinity, 0, cores)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, preexec_fn=restrict
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}: {(done.stderr or done.stdout)[-600:].strip()}")
    return json.loads(lines[-1])


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


RUN_PEER = {"vllm": vllm_tok_s, "transformers": transformers_tok_s, "llama": llama_tok_s, "llama_q8": llama_q8_tok_s}
PEER_KEYS = {
    "vllm": "vllm_cpu_tok_s",
    "transformers": "transformers_cb_tok_s",
    "llama": "llama_cpp_tok_s",
    "llama_q8": "llama_cpp_q8_tok_s",
}

if __name__ == "__main__":
    main()
