"""The command line of `quire`: flags, help, examples. Nothing runs here."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from quire_client.channel import DEFAULT_TARGET
from request_fields.fields import FIELDS, Field, Kind

EXAMPLES = """\
examples:
  quire up                                   start everything here with the bundled demo model
  quire chat "What does os.path.join do?"    ask it (quire chat alone: a conversation)
  quire status                               workers, blocks, queue, cache hits
  quire up --model ~/models/Qwen3-0.6B --workers 2 --dtype bfloat16

The gateway is --target, else $QUIRE_TARGET, else localhost:50051. Several are given as host:port,host:port: an answer
whose gateway dies goes on with the next one. Gateways with TLS: --tls, or QUIRE_TLS=1.
"""

UP_EXAMPLES = """\
examples:
  quire up                                   the bundled demo model on one worker
  quire up --model ./Qwen3-0.6B --workers 2  a Hugging Face folder on two workers
  quire up --gateways 2 --schedulers 2 --workers 2   nothing that exists only once
  quire up --redis redis://localhost:6379/0  prefix index in Redis instead of memory
  quire up --host 0.0.0.0 --port 50051       reachable from other machines (no authentication: mind your network)
  quire up --json --ready-file ready.json    for scripts: events as JSON lines, addresses in a file

Ctrl-C or SIGTERM drains: running answers are finished, then everything stops. A second one stops at once.
"""

GENERATE_EXAMPLES = """\
examples:
  quire generate "Once upon a time" --max-tokens 40
  quire generate --tokens 1,2,3 --max-tokens 8 --temperature 0 --ignore-eos --json
  quire generate "A colour:" --n 3 --seed 7 --json
  cat prompt.txt | quire generate
"""

CHAT_EXAMPLES = """\
examples:
  quire chat                                 a conversation: Ctrl-C stops an answer, Ctrl-D leaves, /new starts afresh
  quire chat "What is json.dumps for?"       one question
  quire chat --system "Answer in one word." "Which language is this?"
"""

BENCH_EXAMPLES = """\
examples:
  quire bench --num-prompts 200 --request-rate 10
  quire bench --dataset shared-prefix --groups 4 --prefix-len 512 --concurrency 16
  quire bench --dataset multi-turn --turns 4 --think-time-s 1 --num-prompts 100 --request-rate 2
  quire bench --dataset trace --path trace.jsonl --speed 2 --slo ttft:500,tpot:50 --output result.json
  quire bench --dataset demo --num-prompts 50 --concurrency 8 --plot result.html
  quire bench --backend openai --base-url http://localhost:8000 --concurrency 16   any OpenAI-compatible server

Without --request-rate and --concurrency all requests are sent at once. docs/benchmarking.md says how latencies count.
Exit code: 0, 1 when a request failed, 2 for wrong flags, 130 after Ctrl-C (with the figures so far).
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; each command sets `module` and `function`."""
    parser = argparse.ArgumentParser(
        prog="quire",
        description="Quire: distributed LLM inference over gRPC.",
        epilog=EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_up(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_inspection(commands)
    _add_drain(commands)
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    module: str,
    function: str,
    summary: str,
    epilog: str = "",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=epilog, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.set_defaults(module=module, function=function)
    return parser


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands, "up", "up", "run", "start gateway, scheduler and workers as processes of this machine", UP_EXAMPLES
    )
    add = parser.add_argument
    add("--model", default="demo", metavar="DIR", help="Hugging Face folder, or demo: the bundled model (default)")
    add("--model-name", metavar="NAME", help="name clients ask for (default: the folder's name)")
    add("--workers", type=_at_least(1), default=1, metavar="N", help="worker processes (default 1)")
    add(
        "--gateways", type=_at_least(1), default=1, metavar="N", help="gateway processes (default 1), on ports in a row"
    )
    add("--schedulers", type=_at_least(1), default=1, metavar="N", help="scheduler processes, replicas (default 1)")
    add("--redis", metavar="URL", help="prefix index in this Redis (default: in memory)")
    add("--host", default="127.0.0.1", help="address the gateway listens on (default 127.0.0.1: this machine only)")
    add("--port", type=_port, default=50051, help="port of the (first) gateway (default 50051; 0 picks free ones)")
    add(
        "--chunk-interval-ms",
        type=_not_negative,
        metavar="MS",
        help="tokens that come sooner leave together (default 50: gateways share these cores with the model; 0: never)",
    )
    add("--metrics", action="store_true", help="serve /metrics of every service on a free port of 127.0.0.1")
    add("--log-dir", metavar="DIR", help="where each service writes NAME.log (default: a new temporary folder)")
    add("--ready-file", metavar="FILE", help="write addresses and process ids here as JSON once everything is ready")
    add("--json", action="store_true", help="one JSON line per event instead of text")
    add("--drain-timeout-s", type=_positive, default=30.0, metavar="S", help="time for running answers at the end (30)")
    workers = parser.add_argument_group("handed to every worker (default: the worker's own)")
    add = workers.add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="numeric type of weights and KV cache")
    add("--kv-cache-dtype", choices=("auto", "fp8"), help="fp8: keys and values in 8 bits (backend cuda)")
    add("--quantize", choices=("int8",), help="round weights to 8 bits: faster, less exact")
    add("--block-size", type=_at_least(1), metavar="N", help="tokens per KV block, a power of two")
    add("--num-blocks", type=_at_least(1), metavar="N", help="KV blocks of the pool")
    add("--kv-cache-memory", metavar="SIZE", help="memory of the pool instead, e.g. 2G")
    add("--max-num-seqs", type=_at_least(1), metavar="N", help="sequences that run at once")
    add("--max-num-batched-tokens", type=_at_least(1), metavar="N", help="tokens computed per step")
    add("--max-model-len", type=_at_least(1), metavar="N", help="longest prompt + output")
    add("--determinism", choices=("exact", "best_effort"), help="exact: logits do not depend on the batch")
    add("--executor", choices=("model", "sim"), help="sim: no model runs; tokens are a function of context and seed")
    add("--backend", choices=("cpu", "cuda", "reference"), help="what computes; cuda: a GPU")
    add("--attention", choices=("auto", "triton", "flash", "torch"), help="of backend cuda")
    add("--gpu-memory-utilization", metavar="PART", help="part of the GPU's memory that a worker may take")
    add(
        "--tensor-parallel-size",
        type=_at_least(1),
        metavar="N",
        help="GPUs that share one model; each worker gets its own N",
    )
    add("--threads", type=_at_least(1), metavar="N", help="CPU threads of each worker (default: the cores, shared out)")
    queue = parser.add_argument_group("handed to every scheduler")
    queue.add_argument("--max-waiting", type=_at_least(1), metavar="N", help="sequences that may wait")
    queue.add_argument(
        "--burst-ms",
        type=_not_negative,
        metavar="MS",
        help="how long a worker may decode on one message (default 20: these cores are the model's too; 0: one step)",
    )
    queue.add_argument(
        "--no-prefix-caching", action="store_true", help="share no cached prompt prefix between requests"
    )
    queue.add_argument(
        "--max-waiting-tokens", type=_at_least(1), metavar="N", help="tokens of their prompts and expected answers"
    )


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "generate", "generate", "run", "continue a prompt", GENERATE_EXAMPLES)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: read stdin)")
    parser.add_argument("--tokens", type=_token_ids, metavar="1,2,3", help="token ids instead of text")
    parser.add_argument("--n", type=_at_least(1), metavar="N", help="samples of the prompt (default 1)")
    parser.add_argument("--json", action="store_true", help="no stream: one JSON line at the end")
    _add_sampling(parser)
    _add_target(parser)


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "chat", "chat", "run", "talk with a model", CHAT_EXAMPLES)
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="ask this only (default: a conversation)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--json", action="store_true", help="with QUESTION: no stream, one JSON line at the end")
    _add_sampling(parser)
    _add_target(parser)


def _add_inspection(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    models = _command(commands, "models", "show", "models", "list the models of a gateway")
    models.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(models)
    status = _command(commands, "status", "show", "status", "workers, rows, blocks, queue and cache hits")
    status.add_argument("--json", action="store_true", help="one JSON line (with --watch: one per second)")
    status.add_argument("--watch", action="store_true", help="again every second until Ctrl-C")
    _add_target(status)
    tokenize = _command(commands, "tokenize", "show", "tokenize", "token ids of a text")
    tokenize.add_argument("text", nargs="?", metavar="TEXT", help="text (default: read stdin)")
    tokenize.add_argument(
        "--chat", action="store_true", help="render it as a user message with the chat template first"
    )
    tokenize.add_argument("--json", action="store_true", help="one JSON line")
    tokenize.add_argument("--model", default="", metavar="NAME", help="model (default: the only one)")
    _add_target(tokenize)


def _add_drain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    drain = _command(
        commands, "drain", "show", "drain", "let a worker go: its sequences move to other workers, then it exits"
    )
    drain.add_argument("worker", metavar="WORKER", help="its id, as `quire status` shows it")
    drain.add_argument("--model", default="", metavar="NAME", help="model it serves (default: any)")
    drain.add_argument(
        "--drain-timeout-s", type=_positive, metavar="S", help="time it may take (default: the worker's own)"
    )
    drain.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(drain)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _command(
        commands, "doctor", "doctor", "run", "what is here, what is missing, and what is done instead; exit code 0 or 1"
    )
    doctor.add_argument("--redis", metavar="URL", help="Redis to look for (default: $QUIRE_REDIS)")
    doctor.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(doctor)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "bench", "bench", "run", "measure a server under load", BENCH_EXAMPLES)
    _add_bench_server(parser.add_argument_group("server"))
    _add_tls(parser)
    _add_bench_load(parser.add_argument_group("load"))
    _add_bench_dataset(parser.add_argument_group("dataset"))
    add = parser.add_argument_group("result").add_argument
    add("--slo", metavar="ttft:MS,...", help="count requests within these limits (ttft, tpot, e2e) as goodput")
    add("--output", metavar="FILE", help="write settings, figures and every request here as JSON")
    add("--plot", metavar="FILE", help="write pictures here: NAME.html, or NAME.png with matplotlib")
    add("--json", action="store_true", help="print one JSON line instead of tables")
    add("--no-progress", action="store_true", help="no progress bar (there is none anyway when stderr is no terminal)")


def _add_bench_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--backend", choices=("quire", "openai"), default="quire", help="quire: gRPC (default); openai: HTTP")
    add("--target", metavar="HOST:PORT,...", help=f"gateways of Quire (default: $QUIRE_TARGET, else {DEFAULT_TARGET})")
    add("--base-url", metavar="URL", help="HTTP server, e.g. http://localhost:8000; its key is in $OPENAI_API_KEY")
    add("--model", default="", metavar="NAME", help="model (default: the server's only or first one)")
    add("--temperature", type=_number, default=0.0, metavar="T", help="0 is greedy (default)")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="full length of every answer (default: yes but for texts)",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="texts are messages of a chat (default: for demo, sharegpt)",
    )
    add("--text", action=argparse.BooleanOptionalAction, help="ask Quire for text too (default: for demo, sharegpt)")
    add("--cache-salt", default="", metavar="SALT", help="share no cached prefix with requests of another salt")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields for every HTTP request")
    add("--timeout-s", type=_positive, metavar="S", help="longest time of a request (default 600)")


def _add_bench_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-prompts", type=_at_least(1), metavar="N", help="requests (default 100; of a file or trace: all)")
    add("--request-rate", type=_positive, metavar="R", help="conversations that begin per second, on average")
    add(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="1: Poisson (default); less: in bursts; more: even",
    )
    add("--concurrency", type=_at_least(1), metavar="N", help="conversations at a time, at most")
    add("--warmup", type=_at_least(0), default=1, metavar="N", help="requests before, not counted (default 1)")
    add("--seed", type=_at_least(0), default=0, metavar="N", help="the same seed makes the same requests (default 0)")


def _add_bench_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--dataset",
        choices=("random", "shared-prefix", "multi-turn", "trace", "demo", "sharegpt", "file"),
        default="random",
        help="random (default), shared-prefix, multi-turn: token ids from the seed; trace: JSON lines with timestamp, "
        "input_length, output_length, hash_ids; demo: questions of the bundled model; sharegpt: texts of a JSON file, "
        "drawn; file: its requests in order",
    )
    add("--path", metavar="FILE", help="file of trace, sharegpt or file")
    add(
        "--input-len",
        type=_at_least(1),
        default=256,
        metavar="N",
        help="tokens of a prompt, or of a turn (default 256)",
    )
    add("--output-len", type=_at_least(1), metavar="N", help="tokens of an answer (default 128, or the file's)")
    add("--range-ratio", type=_part, default=0.0, metavar="F", help="lengths vary by this part, 0 (default) to 1")
    add("--groups", type=_at_least(1), default=4, metavar="N", help="different prefixes (default 4)")
    add("--prefix-len", type=_at_least(0), default=256, metavar="N", help="tokens of a shared prefix (default 256)")
    add("--turns", type=_at_least(1), default=4, metavar="N", help="turns of a conversation (default 4)")
    add(
        "--think-time-s",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="mean pause before a further turn (default 0)",
    )
    add("--speed", type=_positive, default=1.0, metavar="F", help="play a trace this much faster (default 1)")
    add("--length-scale", type=_positive, default=1.0, metavar="F", help="multiply the lengths of a trace (default 1)")
    add(
        "--vocab-size",
        type=_at_least(16),
        metavar="N",
        help="draw token ids below this (default: the model's, or 2048)",
    )
    add("--skip-too-long", action="store_true", help="leave out what is longer than the model takes")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's own)")
    add = group.add_argument
    add("--model", default="", metavar="NAME", help="model (default: the gateway's only one)")
    for field in FIELDS:
        if field.has_flag:
            add(f"--{field.option.replace('_', '-')}", help=field.doc, **_value_of(field))


def _value_of(field: Field) -> dict[str, Any]:
    """How argparse reads the value of a request field."""
    if field.kind is Kind.BOOL:
        return {"action": "store_true"}
    if field.kind is Kind.STRINGS:
        return {"action": "append", "metavar": "TEXT"}
    return {"type": _number, "metavar": "X"} if field.kind is Kind.FLOAT else {"type": _at_least(0), "metavar": "N"}


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="HOST:PORT,...", help=f"gateway, or several (default: $QUIRE_TARGET, else {DEFAULT_TARGET})"
    )
    parser.add_argument("--timeout-s", type=_positive, metavar="S", help="give up after this many seconds")
    _add_tls(parser)


def _add_tls(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("TLS (default: $QUIRE_TLS, $QUIRE_TLS_CA, ...; else plaintext)").add_argument
    add("--tls", action="store_true", default=None, help="speak TLS; on by itself with one of the following")
    add("--tls-ca", metavar="FILE", help="authorities that gateways are known by (default: the well-known ones)")
    add("--tls-cert", metavar="FILE", help="certificate of this client, for gateways that ask for one")
    add("--tls-key", metavar="FILE", help="its key")
    add("--tls-server-name", metavar="NAME", help="name in the gateway's certificate (default: the target's host)")


def _at_least(low: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return value

    return convert


def _port(text: str) -> int:
    value = _at_least(0)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def _part(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give one or more token ids, none below 0")
    return ids
