"""The command line of `quire`: a table of its commands with their arguments, help and examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quire_client
from quire_bench.arguments import BENCH_ARGUMENTS, BENCH_EXAMPLES
from quire_client.connection.channel import DEFAULT_TARGET

from quire_cli.parser import (
    Argument,
    ArgumentGroup,
    Command,
    Parser,
    arg,
    count_of,
    number,
    positive,
    route_target,
    switch,
    text_file,
    token_ids,
    within,
)
from quire_cli.stack.arguments import MODEL_HELP, SERVE_EXAMPLES, UP_EXAMPLES, up_arguments
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

ROUTE_EXAMPLES = """\
examples:
  quire route set prod demo-v1               prod stands for demo-v1
  quire route set prod demo-v1=90 demo-v2=10 a tenth of the conversations goes to demo-v2
  quire route set demo demo-v2               demo-v2 takes the place of demo
  quire route set demo --shadow demo-v2      demo-v2 gets copies
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
  quire batch examples/input.jsonl -o output.jsonl
  quire batch input.jsonl -o output.jsonl --base-url http://a:8000,http://b:8000 --detach
  quire batch input.jsonl -o output.jsonl --cancel

A line of the input:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo", "messages": [...]}}
The gateways answer the requests after all others, and go on after Ctrl-C: run the same command again to follow the
batch. The output has one line per request, in the order of completion.
Exit code: 0; 1 if requests are unanswered; 2 for an invalid file or flag; 3 if some answers are errors;
130 after Ctrl-C.
"""


def _value_of(field: Field) -> dict[str, Any]:
    """The settings of a flag for the value of a request field."""
    if field.kind is Kind.BOOL:
        return {"action": "store_true"}
    if field.kind is Kind.STRINGS:
        return {"action": "append", "metavar": "TEXT"}
    if field.kind is Kind.STRING:
        return {"metavar": "TEXT"}
    return {"type": number, "metavar": "X"} if field.kind is Kind.FLOAT else {"type": within(0), "metavar": "N"}


def _model(unset: str) -> Argument:
    return arg("--model", default="", metavar="NAME", help=f"the model (default: {unset})")


TLS = ArgumentGroup("TLS (default: $QUIRE_TLS, $QUIRE_TLS_CA, ...; else plaintext)", (
    arg("--tls", action="store_true", default=None, help="use TLS; implied by the other TLS flags"),
    arg("--tls-ca", metavar="FILE",
        help="CA certificates that sign the gateways' certificates (default: the CAs bundled with gRPC)"),
    arg("--tls-cert", metavar="FILE", help="client certificate, for gateways that require one"),
    arg("--tls-key", metavar="FILE", help="private key of the client certificate"),
    arg("--tls-server-name", metavar="NAME",
        help="expected name in the gateway's certificate (default: the target's host)"),
))  # fmt: skip
API_KEY = arg("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY)")
TARGET = (
    arg("--target", metavar="HOST:PORT,...",
        help=f"one or more gateways (default: $QUIRE_TARGET, else {DEFAULT_TARGET})"),
    arg("--timeout-s", type=positive, metavar="S", help="give up after this many seconds"),
    API_KEY,
    TLS,
)  # fmt: skip
SAMPLING = ArgumentGroup("sampling (default: the model's)", (
    _model("the only served model"),
    *(arg(f"--{field.option.replace('_', '-')}", help=field.doc, **_value_of(field)) for field in FIELDS
      if field.has_flag),
    arg("--json-schema", type=text_file, metavar="FILE",
        help="The output is JSON that matches the schema in this file."),
))  # fmt: skip
JSON = switch("--json", "one JSON line")
PUBLIC_KEY = arg("--public-key", type=Path, metavar="FILE", help="the key that must have signed (PEM)")
SESSION = arg("id", metavar="ID", help="its id, or the id of a request that was sent with --resumable")
JSON_AT_END = switch("--json", "no stream: one JSON line at the end")
STACK = arg("stack", nargs="?", default="", metavar="STACK", help="its process or model, if several stacks run")
OUTPUT_FILE = "-o", "--output"

COMMANDS = (
    Command("up", "up.run", "start gateway, scheduler and workers as processes on this machine", (
        arg("--model", default="demo", metavar="MODEL", help=f"{MODEL_HELP} (default: demo)"), *up_arguments(),
    ), UP_EXAMPLES),
    Command("serve", "up.run", "like `quire up`, with the model as an argument", (
        arg("model", metavar="MODEL", help=MODEL_HELP), *up_arguments(),
    ), SERVE_EXAMPLES),
    Command("ps", "stacks.ps", "list the stacks that `quire up` runs here", (JSON,)),
    Command("stop", "stacks.stop", "drain and stop a stack, as Ctrl-C does where it runs", (
        STACK, switch("--now", "end running requests at once"),
    )),
    Command("logs", "stacks.logs", "print the logs of a stack", (
        STACK, arg("--service", default="", metavar="NAME", help="gateway, scheduler or worker-0 (default: all)"),
        switch("--follow", "print new lines until Ctrl-C"),
        count_of("--lines", "lines of each log (default 20)", default=20),
    )),
    Command("generate", "generate.run", "continue a prompt", (
        arg("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: read stdin)"),
        arg("--tokens", type=token_ids, metavar="1,2,3", help="token ids instead of text"),
        arg("--image", action="append", default=[], dest="images", metavar="FILE",
            help="image for a placeholder of the prompt; repeat the flag for several"),
        count_of("--n", "number of samples (default 1)"),
        arg("--request-id", metavar="ID", help="id of the request (default: chosen by the server)"),
        arg("--receipt", type=Path, metavar="FILE", help="write a signed receipt per sample to this file"),
        JSON_AT_END, SAMPLING, *TARGET,
    ), GENERATE_EXAMPLES),
    Command("resume", "generate.resume", "continue a request that was sent with --resumable, by its id", (
        arg("request_id", metavar="ID", help="the request's id"),
        count_of("--after", "skip the first N output tokens (default 0)", 0, default=0), JSON_AT_END, *TARGET,
    )),
    Command("chat", "generate.chat", "chat with a model", (
        arg("question", nargs="?", metavar="QUESTION", help="a single question (default: a conversation)"),
        arg("--system", metavar="TEXT", help="system message"),
        arg("--image", action="append", default=[], metavar="FILE",
            help="image before the first question; repeat the flag for several"),
        switch("--json", "with QUESTION: no stream, one JSON line at the end"), SAMPLING, *TARGET,
    ), CHAT_EXAMPLES),
    Command("models", "status.models", "list the models of a gateway", (JSON, *TARGET)),
    Command("status", "status.status", "workers, rows, blocks, queue and cache hits", (
        switch("--json", "one JSON line (with --watch: one per second)"),
        switch("--watch", "repeat every second until Ctrl-C"),
        switch("--memory", "what the memory of each service is used for, in MB"), *TARGET,
    )),
    Command("top", "top.top", "live load of schedulers and workers, like top", (
        arg("--interval-s", type=positive, default=1.0, metavar="S", help="seconds between views (default 1)"),
        switch("--text", "print plain text (default without a terminal)"),
        count_of("--count", "print N views as plain text, then exit", default=0), *TARGET,
    )),
    Command("tokenize", "status.tokenize", "token ids of a text", (
        arg("text", nargs="?", metavar="TEXT", help="text (default: read stdin)"),
        switch("--chat", "render the text as a user message with the chat template"),
        JSON, _model("the only served model"), *TARGET,
    )),
    Command("abort", "status.abort", "end requests: their streams finish with ABORTED", (
        arg("ids", nargs="+", metavar="ID", help="request_id, as in the output of --json and in logs"), JSON, *TARGET,
    )),
    Command("drain", "status.drain", "drain a worker: its sequences move to other workers, then it exits", (
        arg("worker", metavar="WORKER", help="the worker's id, as shown by `quire status`"), _model("any"),
        arg("--drain-timeout-s", type=positive, metavar="S",
            help="time limit of the drain (default: the worker's own)"), JSON, *TARGET,
    )),
    Command("adapter", "", "load, unload and list LoRA adapters", epilog=ADAPTER_EXAMPLES, actions=(
        Command("load", "served.load_adapter", "load an adapter on all workers of a model", (
            arg("name", metavar="NAME", help="the adapter's name in requests"),
            arg("path", metavar="PATH", help="its folder, below the workers' --adapter-dir"),
            _model("the only one"), JSON, *TARGET,
        )),
        Command("unload", "served.unload_adapter", "unload an adapter; refused while requests use it", (
            arg("name", metavar="NAME", help="the adapter's name"), _model("the only one"), JSON, *TARGET,
        )),
        Command("list", "served.list_adapters", "the adapters of one model or of all models", (
            _model("all"), JSON, *TARGET,
        )),
    )),
    Command("route", "", "names that stand for models: aliases, splits, shadows", epilog=ROUTE_EXAMPLES, actions=(
        Command("set", "served.set_route", "set a route", (
            arg("name", metavar="NAME", help="the name in requests"),
            arg("targets", nargs="*", type=route_target, metavar="TARGET[=WEIGHT]",
                help="models or adapters, and their parts (default: the model NAME; weight 1)"),
            arg("--shadow", default="", metavar="MODEL", help="gets a copy of each generation and never answers"),
            JSON, *TARGET,
        )),
        Command("rm", "served.remove_route", "remove a route", (
            arg("name", metavar="NAME", help="its name"), JSON, *TARGET,
        )),
        Command("list", "served.list_routes", "all routes", (JSON, *TARGET)),
    )),
    Command("session", "", "list, show and delete sessions", actions=(
        Command("list", "served.list_sessions", "your sessions, the newest first", (JSON, *TARGET)),
        Command("show", "served.show_session", "what the server knows of a session", (SESSION, JSON, *TARGET)),
        Command("rm", "served.remove_sessions", "delete sessions", (
            arg("ids", nargs="+", metavar="ID", help="their ids"), JSON, *TARGET,
        )),
    )),
    Command("doctor", "doctor.run",
        "check this machine: list what works, what is missing and which fallbacks are used; exit code 0 or 1", (
        arg("--redis", metavar="URL", help="Redis to check (default: $QUIRE_REDIS)"), JSON, *TARGET,
    )),
    Command("verify", "receipt.verify",
        "check receipts by computing the answers again; exit code 0: the model gave them, 1: it did not, 3: not "
        "decidable on this machine", (
        arg("receipt", type=Path, metavar="RECEIPT", help="file with a receipt per line; -: stdin"),
        arg("--model", type=Path, required=True, metavar="DIR", help="folder of the model"),
        arg("--adapter", type=Path, metavar="DIR", help="folder of the adapter, if the answer has one"),
        PUBLIC_KEY,
        count_of("--first", "first output position to check (default 0)", 0),
        count_of("--last", "output position after the last one to check (default: all)", 0),
    )),
    Command("receipt", "", "read receipts", actions=(
        Command("show", "receipt.show", "what a receipt says, and whether its signature is valid", (
            arg("receipt", type=Path, metavar="RECEIPT", help="file with a receipt per line; -: stdin"),
            PUBLIC_KEY, JSON,
        )),
    )),
    Command("replay", "replay.run",
        "compute the turns of a replay log again; exit code 0: all are equal, 1: one differs, 2: not computed", (
        arg("log", type=Path, metavar="LOG", help="log of the SDK's `client.recorded`, or entries of HTTP answers"),
        arg("--against", type=Path, metavar="LOG", help="compare with the turns of this log; nothing is computed"),
        _model("the recorded one"), JSON, *TARGET,
    )),
    Command("fetch", "setup.fetch", "download a model of the Hugging Face Hub once, pinned to a commit", (
        arg("model", metavar="ORG/NAME@COMMIT", help="the model and the 40 digits of its commit"),
        arg("--to", type=Path, required=True, metavar="DIR", help="folder of the downloads, as a Hub cache"),
    )),
    Command("profile", "diagnostics.profile", "where a service spends its time, for Perfetto", (
        arg("service", metavar="SERVICE",
            help="gateway; scheduler or worker, if there is one; the address of a scheduler; the id of a worker"),
        arg("--seconds", type=positive, default=10.0, metavar="S", help="duration, at most 60 (default 10)"),
        count_of("--hz", "samples per second (default 200)", default=200),
        arg(*OUTPUT_FILE, metavar="FILE", help="file to write (default: SERVICE.trace.json.gz)"), *TARGET,
    )),
    Command("debug", "diagnostics.debug", "collect what support needs into one file", (
        arg("action", choices=("bundle",),
            help="bundle: status, versions, settings without secrets, metrics and logs"),
        arg(*OUTPUT_FILE, metavar="FILE", help="file to write (default: quire-bundle-TIME.tar.gz)"), *TARGET,
    )),
    Command("key", "setup.key", "make API keys for the gateways, which store only digests", (
        arg("action", choices=("new", "hash"), help="new: make a key; hash: print the line of a key from stdin"),
        arg("owner", nargs="?", metavar="OWNER", help="owner of the new key: its tenant, and the file's name"),
        arg("--dir", type=Path, metavar="DIR", help="add the line to DIR/OWNER; DIR is the folder of --api-keys"), JSON,
    ), KEY_EXAMPLES),
    Command("cert", "setup.cert", "make the certificates of the services, signed by a CA of their own", (
        arg("dir", type=Path, metavar="DIR", help="folder to write; its CA is used again if it has one"),
        arg("--host", action="append", metavar="NAME", default=[],
            help="DNS name or IP address of the gateways, for clients (default: localhost and 127.0.0.1)"),
        arg("--worker-id", action="append", metavar="ID", default=[], help="also a certificate for this worker"),
        arg("--days", type=positive, default=90.0, metavar="N", help="days until they expire (default 90)"),
    ), CERT_EXAMPLES),
    Command("batch", "quire_batch.command.run", "answer a file of requests in OpenAI's batch format", (
        arg("input", metavar="INPUT", help="requests, one JSON object per line"),
        arg(*OUTPUT_FILE, required=True, metavar="FILE", help="file for the answers, written at the end"),
        arg("--base-url", metavar="URL,...",
            help="HTTP API of one or more gateways (default: $QUIRE_BASE_URL, else http://localhost:8000)"),
        arg("--window", default="24h", metavar="TIME", help="time after which the batch ends (default 24h; 90m, 2d)"),
        arg("--drafts", metavar="OLD",
            help="results of an earlier batch: the answers with the same custom_id are proposed as drafts, which makes "
            "similar answers faster and changes none"),
        switch("--detach", "start the batch and do not wait for its end"),
        switch("--cancel", "end the batch of this output, and write the answers so far"),
        arg("--retry-timeout-s", type=positive, default=60.0, metavar="S",
            help="how long a call is retried (default 60)"),
        API_KEY, switch("--json", "print the summary as one JSON line"), TLS,
    ), BATCH_EXAMPLES),
    Command("compare", "quire_analysis.compare.run", "what differs between the answers of two models", (
        arg("a", metavar="A", help="a model, an adapter or a route"), arg("b", metavar="B", help="the other one"),
        arg("--requests", type=Path, required=True, metavar="FILE", help="requests, one JSON object per line"),
        arg("--gateway-a", metavar="HOST:PORT,...", help="gateways of A (default: those of --target)"),
        arg("--gateway-b", metavar="HOST:PORT,...", help="gateways of B (default: those of A)"),
        arg(*OUTPUT_FILE, required=True, metavar="NAME", help="writes the report to NAME.json and NAME.html"),
        arg("--score", metavar="FILE", help="Python file with score(line, text); the higher score wins"),
        count_of("--top", "most likely tokens per position (default 20)", 0, default=20),
        count_of("--seed", "seed of the first request without one; the next has the next (default 0)", 0, default=0),
        count_of("--concurrency", "requests at a time (default 16)", default=16),
        count_of("--max-differing", "exit code 1 for more differing answers (default: no limit)", 0),
        *TARGET,
    )),
    Command("explain", "quire_analysis.explain.run", "why a stored answer has its token at a position", (
        arg("answer", metavar="ID", help="id of a resumable request, a stored response or a session"),
        count_of("--token", "output position, from 0 (default: the last one)", 0),
        count_of("--sample", "sample of the request (default 0)", 0, default=0),
        arg("--what-if", nargs="+", default=[], metavar="NAME=JSON", help="continue from there with other parameters"),
        *TARGET,
    )),
    Command("bench", "quire_bench.command.run", "measure a server under load", (TLS, *BENCH_ARGUMENTS), BENCH_EXAMPLES),
    Command("completion", "setup.completion", "print a script that completes commands and flags", (
        arg("shell", choices=("bash", "zsh", "fish"), help="the shell"),
    ), COMPLETION_EXAMPLES),
)  # fmt: skip


def make_parser() -> Parser:
    """The parser of the whole command line. Each command sets `module` and `function`."""
    parser = Parser(prog="quire", description="Quire: distributed LLM inference over gRPC.", epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"quire {quire_client.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    return parser
