"""Arguments and examples of `quire bench`."""

from __future__ import annotations

import argparse

from quire_cli.parser import ArgumentGroup, arg, count_of, json_object, number, positive, switch, within
from quire_client.connection.channel import DEFAULT_TARGET

BENCH_EXAMPLES = """\
examples:
  quire bench --num-prompts 200 --request-rate 10
  quire bench --dataset shared-prefix --groups 4 --prefix-len 512 --concurrency 16
  quire bench --dataset multi-turn --turns 4 --think-time-s 1 --num-prompts 100 --request-rate 2
  quire bench --dataset trace --path trace.jsonl --speed 2 --slo ttft:500,tpot:50 --output result.json
  quire bench --dataset demo --num-prompts 50 --concurrency 8 --plot result.html
  quire bench --backend openai --base-url http://localhost:8000 --concurrency 16   any OpenAI-compatible server

Without --request-rate and --concurrency all requests are sent at once. docs/benchmarking.md defines the latencies.
Exit code: 0; 1 if a request failed; 2 for invalid flags; 130 after Ctrl-C, which still prints the figures so far.
"""

SERVER = ArgumentGroup("server", (
    arg("--backend", choices=("quire", "openai"), default="quire", help="quire: gRPC (default); openai: HTTP"),
    arg("--target", metavar="HOST:PORT,...", help=f"gateways (default: $QUIRE_TARGET, else {DEFAULT_TARGET})"),
    arg("--base-url", metavar="URL", help="HTTP server, e.g. http://localhost:8000"),
    arg("--api-key", metavar="KEY",
        help="API key (default: $QUIRE_API_KEY; with --backend openai $OPENAI_API_KEY)"),
    arg("--model", default="", metavar="NAME", help="model (default: the server's only or first model)"),
    arg("--temperature", type=number, default=0.0, metavar="T", help="0 is greedy (default)"),
    arg("--ignore-eos", action=argparse.BooleanOptionalAction,
        help="generate the full length of every answer (default: on, except for demo and sharegpt)"),
    arg("--chat", action=argparse.BooleanOptionalAction,
        help="send prompts as chat messages (default: on for demo and sharegpt)"),
    arg("--text", action=argparse.BooleanOptionalAction,
        help="request text from Quire in addition to token ids (default: on for demo and sharegpt)"),
    arg("--cache-salt", default="", metavar="SALT",
        help="requests with different salts do not share cached prefixes"),
    arg("--extra-body", type=json_object, default={}, metavar="JSON",
        help="additional fields of every HTTP request"),
    arg("--timeout-s", type=positive, metavar="S", help="timeout of a request (default 600)"),
))  # fmt: skip
LOAD = ArgumentGroup("load", (
    count_of("--num-prompts", "number of requests (default 100; for file and trace: all)"),
    arg("--request-rate", type=positive, metavar="R", help="mean number of conversations started per second"),
    arg("--burstiness", type=positive, default=1.0, metavar="B",
        help="1: Poisson (default); below 1: bursty; above 1: even"),
    count_of("--concurrency", "maximum number of concurrent conversations"),
    count_of("--warmup", "uncounted requests before the run (default 1)", 0, default=1),
    count_of("--seed", "the same seed gives the same requests (default 0)", 0, default=0),
))  # fmt: skip
DATASET = ArgumentGroup("dataset", (
    arg("--dataset", choices=("random", "shared-prefix", "multi-turn", "trace", "demo", "sharegpt", "file"),
        default="random",
        help="random (default), shared-prefix, multi-turn: token ids from the seed; trace: JSON lines with timestamp, "
        "input_length, output_length, hash_ids; demo: questions that the bundled model can answer; sharegpt: texts of "
        "a JSON file in random order; file: the requests of a file in order"),
    arg("--path", metavar="FILE", help="input file of the datasets trace, sharegpt and file"),
    count_of("--input-len", "tokens per prompt or turn (default 256)", default=256),
    count_of("--output-len", "tokens per answer (default 128, or the file's)"),
    arg("--range-ratio", type=within(0.0, 1.0, number), default=0.0, metavar="F",
        help="lengths vary by this fraction, 0 (default) to 1"),
    count_of("--groups", "number of different prefixes (default 4)", default=4),
    count_of("--prefix-len", "tokens per shared prefix (default 256)", 0, default=256),
    count_of("--turns", "turns per conversation (default 4)", default=4),
    arg("--think-time-s", type=within(0.0, None, number), default=0.0, metavar="S",
        help="mean pause between two turns (default 0)"),
    arg("--speed", type=positive, default=1.0, metavar="F", help="replay a trace faster by this factor (default 1)"),
    arg("--length-scale", type=positive, default=1.0, metavar="F",
        help="multiply lengths in a trace by F (default 1)"),
    count_of("--vocab-size", "upper limit of the token ids (default: the model's vocabulary size, or 2048)", 16),
    switch("--skip-too-long", "skip requests that exceed max_model_len"),
))  # fmt: skip
RESULT = ArgumentGroup("result", (
    arg("--slo", metavar="ttft:MS,...", help="count requests within these limits (ttft, tpot, e2e) as goodput"),
    arg("--output", metavar="FILE", help="write settings, figures and every request to this file as JSON"),
    arg("--plot", metavar="FILE", help="write plots to this file: NAME.html, or NAME.png with matplotlib"),
    switch("--json", "print one JSON line instead of tables"),
    switch("--no-progress", "no progress bar (never shown if stderr is not a terminal)"),
))  # fmt: skip
BENCH_ARGUMENTS = (SERVER, LOAD, DATASET, RESULT)
