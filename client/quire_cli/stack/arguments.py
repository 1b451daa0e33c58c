"""Flags, help and examples of `quire up` and `quire serve`."""

from __future__ import annotations

import argparse

from quire_cli.parser import at_least, not_negative, port, positive

MODEL_HELP = "Hugging Face folder, ORG/NAME[@REVISION] of the Hugging Face Hub, or demo: the bundled model"

UP_EXAMPLES = """\
examples:
  quire up                                   the bundled demo model on one worker
  quire up --model ./Qwen3-0.6B --workers 2  a Hugging Face folder on two workers
  quire up --model Qwen/Qwen3-0.6B@main      a model of the Hugging Face Hub: cached, else downloaded
  quire up --gateways 2 --schedulers 2 --workers 2   two replicas of every service
  quire up --redis redis://localhost:6379/0  prefix index in Redis instead of memory
  quire up --tls                             certificates for clients and services, made for this run
  quire up --host 0.0.0.0 --port 50051       reachable from other machines (no authentication: trusted networks only)
  quire up --json --ready-file ready.json    for scripts: events as JSON lines, addresses in a file

Ctrl-C or SIGTERM drains: running requests finish, then all services stop. A second signal stops them immediately.
"""

SERVE_EXAMPLES = """\
examples:
  quire serve Qwen/Qwen3-0.6B                from the local cache of the Hub, else downloaded
  quire serve ./Qwen3-0.6B --workers 2 --dtype bfloat16
"""


def add_up_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-name", metavar="NAME", help="name of the model in requests (default: ORG/NAME or the folder's name)")
    add("--workers", type=at_least(1), default=1, metavar="N", help="worker processes (default 1)")
    add(
        "--gateways",
        type=at_least(1),
        default=1,
        metavar="N",
        help="gateway processes (default 1), on consecutive ports",
    )
    add("--schedulers", type=at_least(1), default=1, metavar="N", help="scheduler replicas (default 1)")
    add("--redis", metavar="URL", help="prefix index in this Redis (default: in memory)")
    add("--host", default="127.0.0.1", help="address that gateways listen on (default 127.0.0.1: this machine only)")
    add("--port", type=port, default=50051, help="port of the first gateway (default 50051; 0: free ports)")
    add(
        "--http-port",
        type=port,
        metavar="PORT",
        help="port of the OpenAI-compatible HTTP API of the first gateway (default 8000, or free ports if 8000 is in "
        "use or --port is 0; 0: free ports)",
    )
    add(
        "--chunk-interval-ms",
        type=not_negative,
        metavar="MS",
        help="least time between two chunks of a stream (default 50, because all services share this machine; 0: none)",
    )
    add(
        "--tls",
        action="store_true",
        help="encrypt all connections with certificates that are made for this run; prints --tls-ca for clients",
    )
    add("--metrics", action="store_true", help="serve /metrics of every service on free ports of 127.0.0.1")
    add("--console", action="store_true", help="serve the console, a page for browsers, on a free port of 127.0.0.1")
    add(
        "--log-dir",
        metavar="DIR",
        help="folder of the log files NAME.log (default: a temporary folder that is removed after a clean stop)",
    )
    add(
        "--ready-file",
        metavar="FILE",
        help="write addresses and process ids to this file as JSON when all services are ready",
    )
    add("--json", action="store_true", help="one JSON line per event instead of text")
    add(
        "--drain-timeout-s",
        type=positive,
        default=30.0,
        metavar="S",
        help="time limit for running requests at shutdown (default 30)",
    )
    _add_worker_flags(parser.add_argument_group("flags of every worker (default: the worker's own)"))
    _add_scheduler_flags(parser.add_argument_group("flags of every scheduler"))


def _add_worker_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="numeric type of weights and KV cache")
    add("--kv-cache-dtype", choices=("auto", "fp8"), help="fp8: keys and values in 8 bits (backend cuda)")
    add(
        "--quantize",
        choices=("int8", "fp8"),
        help="round weights to 8 bits, int8 on CPUs, fp8 on GPUs: faster, less accurate",
    )
    add("--block-size", type=at_least(1), metavar="N", help="tokens per KV block, a power of two")
    add("--num-blocks", type=at_least(1), metavar="N", help="KV blocks of the pool")
    add("--kv-cache-memory", metavar="SIZE", help="memory of the pool, instead of --num-blocks, e.g. 2G")
    add("--max-num-seqs", type=at_least(1), metavar="N", help="limit of sequences that run at the same time")
    add("--max-num-batched-tokens", type=at_least(1), metavar="N", help="limit of tokens computed per step")
    add("--max-model-len", type=at_least(1), metavar="N", help="longest prompt + output")
    add("--determinism", choices=("exact", "best_effort"), help="exact: logits do not depend on the batch")
    add("--executor", choices=("model", "sim"), help="sim: no model runs; tokens are a function of context and seed")
    add("--backend", choices=("cpu", "cuda", "reference"), help="compute backend; cuda: a GPU")
    add(
        "--attention",
        choices=("auto", "triton", "flash", "flash3", "flashinfer", "torch"),
        help="attention kernel (backend cuda)",
    )
    add("--gpu-memory-utilization", metavar="FRACTION", help="fraction of the GPU's memory that a worker may use")
    add(
        "--tensor-parallel-size",
        type=at_least(1),
        metavar="N",
        help="GPUs per worker; they share one copy of the model",
    )
    add("--adapter", action="append", metavar="NAME=DIR", help="LoRA adapter to load; repeat the flag for more")
    add("--adapter-dir", metavar="DIR", help="folder below which `quire adapter load` finds adapters")
    add("--max-adapters", type=at_least(1), metavar="N", help="adapters that sequences may use at the same time")
    add(
        "--threads",
        type=at_least(1),
        metavar="N",
        help="CPU threads of each worker (default: an equal share of the cores)",
    )


def _add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-waiting", type=at_least(1), metavar="N", help="limit of waiting sequences")
    add(
        "--burst-ms",
        type=not_negative,
        metavar="MS",
        help="how long a worker may decode per message (default 20, because all services share this machine; 0: one "
        "step per message)",
    )
    add("--no-prefix-caching", action="store_true", help="disable the prefix cache")
    add(
        "--max-waiting-tokens",
        type=at_least(1),
        metavar="N",
        help="limit of tokens in the queue (prompts plus expected outputs)",
    )
