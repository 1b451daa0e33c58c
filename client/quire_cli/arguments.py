"""The command line of `quire`: flags, help and examples."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import quire_client
from quire_client.connection.channel import DEFAULT_TARGET

from quire_cli.bench.arguments import BENCH_EXAMPLES, add_bench_flags
from quire_cli.parser import Parser, at_least, number, positive, priority, text_file, token_ids
from quire_cli.stack.arguments import MODEL_HELP, SERVE_EXAMPLES, UP_EXAMPLES, add_up_flags
from request_fields.fields import FIELDS, Field, Kind

EXAMPLES = """\
examples:
  quire up                                   start all services here with the bundled demo model
  quire chat "What does os.path.join do?"    one question (without one: a conversation)
  quire status                               workers, blocks, queue, cache hits
  quire top                                  the same, live, with rates and the oldest requests
  quire up --model ~/models/Qwen3-0.6B --workers 2 --dtype bfloat16

The gateway is --target, else $QUIRE_TARGET, else localhost:50051. For several gateways write host:port,host:port: if
one dies, its answers continue on the next. For TLS set --tls or QUIRE_TLS=1.
"""

GENERATE_EXAMPLES = """\
examples:
  quire generate "Once upon a time" --max-tokens 40
  quire generate --tokens 1,2,3 --max-tokens 8 --temperature 0 --ignore-eos --json
  quire generate "A colour:" --n 3 --temperature 1 --seed 7 --json
  cat prompt.txt | quire generate
"""

COMPLETION_EXAMPLES = """\
examples:
  quire completion bash > ~/.local/share/bash-completion/completions/quire
  quire completion zsh > "${fpath[1]}/_quire"
  quire completion fish > ~/.config/fish/completions/quire.fish
"""

ADAPTER_EXAMPLES = """\
examples:
  quire adapter load sql ./sql-lora          a folder below --adapter-dir of the workers
  quire adapter list
  quire generate "SELECT" --adapter sql
  quire adapter unload sql
"""

CHAT_EXAMPLES = """\
examples:
  quire chat                                 a conversation: Ctrl-C stops an answer, /quit exits, /new resets
  quire chat "What is json.dumps for?"       one question
  quire chat --system "Answer in one word." "Which language is this?"
"""


KEY_EXAMPLES = """\
examples:
  quire key new team-a                       a key, and the line for the file team-a in the folder of --api-keys
  quire key new team-a --dir keys            also adds the line to keys/team-a
  quire key hash < old-key.txt               the line of a key that exists
"""

CERT_EXAMPLES = """\
examples:
  quire cert certs --host llm.example.com    a CA, a certificate per role, and one for the gateways' public port
  quire cert certs --host llm.example.com    again: new certificates of the same CA, without a restart of services
  quire cert certs --worker-id w-1 --worker-id w-2   also certificates that name a worker's id
"""

BATCH_EXAMPLES = """\
examples:
  quire batch input.jsonl -o output.jsonl
  quire batch input.jsonl -o output.jsonl --concurrency 64 --base-url http://a:8000,http://b:8000

A line of the input:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo", "messages": [...]}}
The output has one line per request, in the order of completion. After Ctrl-C or a crash, run the same command again:
it skips the requests that are already in the output.
Exit code: 0; 1 if requests are unanswered (run again); 2 for an invalid file or flag; 3 if all are answered, but some
with an error; 130 after Ctrl-C.
"""


def make_parser() -> Parser:
    """The parser of the whole command line. Each command sets `module` and `function`."""
    parser = Parser(prog="quire", description="Quire: distributed LLM inference over gRPC.", epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"quire {quire_client.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_up(commands)
    _add_generate(commands)
    _add_resume(commands)
    _add_chat(commands)
    _add_inspection(commands)
    _add_abort(commands)
    _add_drain(commands)
    _add_adapter(commands)
    _add_doctor(commands)
    _add_fetch(commands)
    _add_diagnostics(commands)
    _add_credentials(commands)
    _add_batch(commands)
    _add_bench(commands)
    _add_completion(commands, parser)
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    module: str,
    function: str,
    summary: str,
    epilog: str = "",
) -> Parser:
    parser = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
    parser.set_defaults(module=module, function=function, parser=parser)
    return parser


def _add_up(commands: argparse._SubParsersAction[Parser]) -> None:
    summary = "start gateway, scheduler and workers as processes on this machine"
    up = _command(commands, "up", "up", "run", summary, UP_EXAMPLES)
    up.add_argument("--model", default="demo", metavar="MODEL", help=f"{MODEL_HELP} (default: demo)")
    add_up_flags(up)
    serve = _command(commands, "serve", "up", "run", "like `quire up`, with the model as an argument", SERVE_EXAMPLES)
    serve.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_up_flags(serve)


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(commands, "generate", "generate", "run", "continue a prompt", GENERATE_EXAMPLES)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: read stdin)")
    parser.add_argument("--tokens", type=token_ids, metavar="1,2,3", help="token ids instead of text")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        dest="images",
        metavar="FILE",
        help="image for a placeholder of the prompt; repeat the flag for several",
    )
    parser.add_argument("--n", type=at_least(1), metavar="N", help="number of samples (default 1)")
    parser.add_argument("--request-id", metavar="ID", help="id of the request (default: chosen by the server)")
    parser.add_argument("--json", action="store_true", help="no stream: one JSON line at the end")
    _add_sampling(parser)
    _add_target(parser)


def _add_resume(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands, "resume", "generate", "resume", "continue a request that was sent with --resumable, by its id"
    )
    parser.add_argument("request_id", metavar="ID", help="the request's id")
    parser.add_argument(
        "--after", type=at_least(0), default=0, metavar="N", help="skip the first N output tokens (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="no stream: one JSON line at the end")
    _add_target(parser)


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(commands, "chat", "chat", "run", "chat with a model", CHAT_EXAMPLES)
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="a single question (default: a conversation)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image before the first question; repeat the flag for several",
    )
    parser.add_argument("--json", action="store_true", help="with QUESTION: no stream, one JSON line at the end")
    _add_sampling(parser)
    _add_target(parser)


def _add_inspection(commands: argparse._SubParsersAction[Parser]) -> None:
    models = _command(commands, "models", "status", "models", "list the models of a gateway")
    models.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(models)
    status = _command(commands, "status", "status", "status", "workers, rows, blocks, queue and cache hits")
    status.add_argument("--json", action="store_true", help="one JSON line (with --watch: one per second)")
    status.add_argument("--watch", action="store_true", help="repeat every second until Ctrl-C")
    _add_target(status)
    top = _command(commands, "top", "top", "top", "live load of schedulers and workers, like top")
    top.add_argument("--interval-s", type=positive, default=1.0, metavar="S", help="seconds between views (default 1)")
    top.add_argument("--text", action="store_true", help="print plain text (default without a terminal)")
    top.add_argument("--count", type=at_least(1), default=0, metavar="N", help="print N views as plain text, then exit")
    _add_target(top)
    tokenize = _command(commands, "tokenize", "status", "tokenize", "token ids of a text")
    tokenize.add_argument("text", nargs="?", metavar="TEXT", help="text (default: read stdin)")
    tokenize.add_argument(
        "--chat", action="store_true", help="render the text as a user message with the chat template"
    )
    tokenize.add_argument("--json", action="store_true", help="one JSON line")
    tokenize.add_argument("--model", default="", metavar="NAME", help="model (default: the only served model)")
    _add_target(tokenize)


def _add_abort(commands: argparse._SubParsersAction[Parser]) -> None:
    abort = _command(commands, "abort", "status", "abort", "end requests: their streams finish with ABORTED")
    abort.add_argument("ids", nargs="+", metavar="ID", help="request_id, as in the output of --json and in logs")
    abort.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(abort)


def _add_completion(commands: argparse._SubParsersAction[Parser], whole_parser: Parser) -> None:
    parser = _command(
        commands,
        "completion",
        "completion",
        "run",
        "print a script that completes commands and flags",
        COMPLETION_EXAMPLES,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.set_defaults(whole_parser=whole_parser)


def _add_adapter(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser("adapter", help="load, unload and list LoRA adapters", epilog=ADAPTER_EXAMPLES)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    load = _command(actions, "load", "adapter", "load", "load an adapter on all workers of a model")
    load.add_argument("name", metavar="NAME", help="the adapter's name in requests")
    load.add_argument("path", metavar="PATH", help="its folder, below the workers' --adapter-dir")
    unload = _command(actions, "unload", "adapter", "unload", "unload an adapter; refused while requests use it")
    unload.add_argument("name", metavar="NAME", help="the adapter's name")
    listing = _command(actions, "list", "adapter", "show", "the adapters of one model or of all models")
    for command in (load, unload, listing):
        command.add_argument("--model", default="", metavar="NAME", help="the model (default: the only one, or all)")
        command.add_argument("--json", action="store_true", help="one JSON line")
        _add_target(command)


def _add_drain(commands: argparse._SubParsersAction[Parser]) -> None:
    drain = _command(
        commands, "drain", "status", "drain", "drain a worker: its sequences move to other workers, then it exits"
    )
    drain.add_argument("worker", metavar="WORKER", help="the worker's id, as shown by `quire status`")
    drain.add_argument("--model", default="", metavar="NAME", help="the worker's model (default: any)")
    drain.add_argument(
        "--drain-timeout-s", type=positive, metavar="S", help="time limit of the drain (default: the worker's own)"
    )
    drain.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(drain)


def _add_doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    doctor = _command(
        commands,
        "doctor",
        "doctor",
        "run",
        "check this machine: list what works, what is missing and which fallbacks are used; exit code 0 or 1",
    )
    doctor.add_argument("--redis", metavar="URL", help="Redis to check (default: $QUIRE_REDIS)")
    doctor.add_argument("--json", action="store_true", help="one JSON line")
    _add_target(doctor)


def _add_diagnostics(commands: argparse._SubParsersAction[Parser]) -> None:
    profile = _command(commands, "profile", "diagnostics", "profile", "where a service spends its time, for Perfetto")
    profile.add_argument(
        "service",
        metavar="SERVICE",
        help="gateway; scheduler or worker, if there is one; the address of a scheduler; the id of a worker",
    )
    profile.add_argument(
        "--seconds", type=positive, default=10.0, metavar="S", help="duration, at most 60 (default 10)"
    )
    profile.add_argument("--hz", type=at_least(1), default=200, metavar="N", help="samples per second (default 200)")
    profile.add_argument("-o", "--output", metavar="FILE", help="file to write (default: SERVICE.trace.json.gz)")
    _add_target(profile)
    debug = _command(commands, "debug", "diagnostics", "debug", "collect what support needs into one file")
    debug.add_argument(
        "action", choices=("bundle",), help="bundle: status, versions, settings without secrets, metrics and logs"
    )
    debug.add_argument("-o", "--output", metavar="FILE", help="file to write (default: quire-bundle-TIME.tar.gz)")
    _add_target(debug)


def _add_credentials(commands: argparse._SubParsersAction[Parser]) -> None:
    summary = "make API keys for the gateways, which store only digests"
    add_key_flags(_command(commands, "key", "key", "run", summary, KEY_EXAMPLES))
    summary = "make the certificates of the services, signed by a CA of their own"
    add_cert_flags(_command(commands, "cert", "cert", "run", summary, CERT_EXAMPLES))


def _add_fetch(commands: argparse._SubParsersAction[Parser]) -> None:
    summary = "download a model of the Hugging Face Hub once, pinned to a commit"
    fetch = _command(commands, "fetch", "fetch", "run", summary)
    fetch.add_argument("model", metavar="ORG/NAME@COMMIT", help="the model and the 40 digits of its commit")
    fetch.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder of the downloads, as a Hub cache")


def _add_batch(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands, "batch", "batch", "run", "answer a file of requests in OpenAI's batch format", BATCH_EXAMPLES
    )
    add_batch_flags(parser)
    _add_tls(parser)


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(commands, "bench", "bench", "run", "measure a server under load", BENCH_EXAMPLES)
    _add_tls(parser)
    add_bench_flags(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's)")
    add = group.add_argument
    add("--model", default="", metavar="NAME", help="model (default: the only served model)")
    for field in FIELDS:
        if field.has_flag:
            add(f"--{field.option.replace('_', '-')}", help=field.doc, **_value_of(field))
    add(
        "--json-schema", type=text_file, metavar="FILE", help="The output is JSON that matches the schema in this file."
    )


def _value_of(field: Field) -> dict[str, Any]:
    """Arguments of add_argument for the value of a request field."""
    if field.kind is Kind.BOOL:
        return {"action": "store_true"}
    if field.kind is Kind.STRINGS:
        return {"action": "append", "metavar": "TEXT"}
    if field.kind is Kind.STRING:
        return {"metavar": "TEXT"}
    return {"type": number, "metavar": "X"} if field.kind is Kind.FLOAT else {"type": at_least(0), "metavar": "N"}


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="HOST:PORT,...",
        help=f"one or more gateways (default: $QUIRE_TARGET, else {DEFAULT_TARGET})",
    )
    parser.add_argument("--timeout-s", type=positive, metavar="S", help="give up after this many seconds")
    parser.add_argument("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY)")
    _add_tls(parser)


def _add_tls(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("TLS (default: $QUIRE_TLS, $QUIRE_TLS_CA, ...; else plaintext)").add_argument
    add("--tls", action="store_true", default=None, help="use TLS; implied by the other TLS flags")
    add(
        "--tls-ca",
        metavar="FILE",
        help="CA certificates that sign the gateways' certificates (default: the CAs bundled with gRPC)",
    )
    add("--tls-cert", metavar="FILE", help="client certificate, for gateways that require one")
    add("--tls-key", metavar="FILE", help="private key of the client certificate")
    add(
        "--tls-server-name",
        metavar="NAME",
        help="expected name in the gateway's certificate (default: the target's host)",
    )


def add_key_flags(key: argparse.ArgumentParser) -> None:
    key.add_argument(
        "action", choices=("new", "hash"), help="new: make a key; hash: print the line of a key from stdin"
    )
    key.add_argument("owner", nargs="?", metavar="OWNER", help="owner of the new key: its tenant, and the file's name")
    key.add_argument(
        "--dir", type=Path, metavar="DIR", help="add the line to DIR/OWNER; DIR is the folder of --api-keys"
    )
    key.add_argument("--json", action="store_true", help="one JSON line")


def add_cert_flags(cert: argparse.ArgumentParser) -> None:
    cert.add_argument("dir", type=Path, metavar="DIR", help="folder to write; its CA is used again if it has one")
    cert.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        default=[],
        help="DNS name or IP address of the gateways, for clients (default: localhost and 127.0.0.1)",
    )
    cert.add_argument(
        "--worker-id", action="append", metavar="ID", default=[], help="also a certificate for this worker"
    )
    cert.add_argument("--days", type=positive, default=90.0, metavar="N", help="days until they expire (default 90)")


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", metavar="INPUT", help="requests, one JSON object per line")
    add("-o", "--output", required=True, metavar="FILE", help="answers are appended to this file")
    add(
        "--base-url",
        metavar="URL,...",
        help="HTTP API of one or more gateways (default: $QUIRE_BASE_URL, else http://localhost:8000)",
    )
    add("--concurrency", type=at_least(1), default=32, metavar="N", help="requests in flight at once (default 32)")
    add(
        "--priority",
        type=priority,
        default=1000,
        metavar="N",
        help="priority of requests whose body has none (default 1000: after all others)",
    )
    add(
        "--retry-timeout-s", type=positive, default=60.0, metavar="S", help="how long a request is retried (default 60)"
    )
    add("--timeout-s", type=positive, default=600.0, metavar="S", help="time limit of one attempt (default 600)")
    add("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY)")
    add("--json", action="store_true", help="print the summary as one JSON line")
