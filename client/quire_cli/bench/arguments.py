"""Flags, help and examples of `quire bench`."""

from __future__ import annotations

import argparse

from quire_client.connection.channel import DEFAULT_TARGET

from quire_cli.parser import at_least, fraction, json_object, not_negative, number, positive

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


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    _add_bench_server(parser.add_argument_group("server"))
    _add_bench_load(parser.add_argument_group("load"))
    _add_bench_dataset(parser.add_argument_group("dataset"))
    add = parser.add_argument_group("result").add_argument
    add("--slo", metavar="ttft:MS,...", help="count requests within these limits (ttft, tpot, e2e) as goodput")
    add("--output", metavar="FILE", help="write settings, figures and every request to this file as JSON")
    add("--plot", metavar="FILE", help="write plots to this file: NAME.html, or NAME.png with matplotlib")
    add("--json", action="store_true", help="print one JSON line instead of tables")
    add("--no-progress", action="store_true", help="no progress bar (never shown if stderr is not a terminal)")


def _add_bench_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--backend", choices=("quire", "openai"), default="quire", help="quire: gRPC (default); openai: HTTP")
    add("--target", metavar="HOST:PORT,...", help=f"gateways (default: $QUIRE_TARGET, else {DEFAULT_TARGET})")
    add("--base-url", metavar="URL", help="HTTP server, e.g. http://localhost:8000")
    add("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY; with --backend openai $OPENAI_API_KEY)")
    add("--model", default="", metavar="NAME", help="model (default: the server's only or first model)")
    add("--temperature", type=number, default=0.0, metavar="T", help="0 is greedy (default)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate the full length of every answer (default: on, except for demo and sharegpt)",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send prompts as chat messages (default: on for demo and sharegpt)",
    )
    add(
        "--text",
        action=argparse.BooleanOptionalAction,
        help="request text from Quire in addition to token ids (default: on for demo and sharegpt)",
    )
    add("--cache-salt", default="", metavar="SALT", help="requests with different salts do not share cached prefixes")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="additional fields of every HTTP request")
    add("--timeout-s", type=positive, metavar="S", help="timeout of a request (default 600)")


def _add_bench_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--num-prompts",
        type=at_least(1),
        metavar="N",
        help="number of requests (default 100; for file and trace: all)",
    )
    add("--request-rate", type=positive, metavar="R", help="mean number of conversations started per second")
    add(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="B",
        help="1: Poisson (default); below 1: bursty; above 1: even",
    )
    add("--concurrency", type=at_least(1), metavar="N", help="maximum number of concurrent conversations")
    add("--warmup", type=at_least(0), default=1, metavar="N", help="uncounted requests before the run (default 1)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="the same seed gives the same requests (default 0)")


def _add_bench_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--dataset",
        choices=("random", "shared-prefix", "multi-turn", "trace", "demo", "sharegpt", "file"),
        default="random",
        help="random (default), shared-prefix, multi-turn: token ids from the seed; trace: JSON lines with timestamp, "
        "input_length, output_length, hash_ids; demo: questions that the bundled model can answer; sharegpt: texts of "
        "a JSON file in random order; file: the requests of a file in order",
    )
    add("--path", metavar="FILE", help="input file of the datasets trace, sharegpt and file")
    add(
        "--input-len",
        type=at_least(1),
        default=256,
        metavar="N",
        help="tokens per prompt or turn (default 256)",
    )
    add("--output-len", type=at_least(1), metavar="N", help="tokens per answer (default 128, or the file's)")
    add(
        "--range-ratio",
        type=fraction,
        default=0.0,
        metavar="F",
        help="lengths vary by this fraction, 0 (default) to 1",
    )
    add("--groups", type=at_least(1), default=4, metavar="N", help="number of different prefixes (default 4)")
    add("--prefix-len", type=at_least(0), default=256, metavar="N", help="tokens per shared prefix (default 256)")
    add("--turns", type=at_least(1), default=4, metavar="N", help="turns per conversation (default 4)")
    add(
        "--think-time-s",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="mean pause between two turns (default 0)",
    )
    add("--speed", type=positive, default=1.0, metavar="F", help="replay a trace faster by this factor (default 1)")
    add("--length-scale", type=positive, default=1.0, metavar="F", help="multiply lengths in a trace by F (default 1)")
    add(
        "--vocab-size",
        type=at_least(16),
        metavar="N",
        help="upper limit of the token ids (default: the model's vocabulary size, or 2048)",
    )
    add("--skip-too-long", action="store_true", help="skip requests that exceed max_model_len")
