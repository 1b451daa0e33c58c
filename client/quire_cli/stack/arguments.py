"""Arguments and examples of `quire up` and `quire serve`: their own, and those of the services that they start."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any

from quire_cli.parser import Argument, ArgumentGroup, arg, count_of, number, positive, size, switch, within

MODEL_HELP = "Hugging Face folder, ORG/NAME[@REVISION] of the Hugging Face Hub, or demo: the bundled model"

UP_EXAMPLES = """\
examples:
  quire up                                   the bundled demo model on one worker
  quire up --model ./Qwen3-0.6B --workers 2  a Hugging Face folder on two workers
  quire up --model Qwen/Qwen3-0.6B@main      a model of the Hugging Face Hub: cached, else downloaded
  quire up --gateways 2 --schedulers 2 --workers 2   two replicas of every service
  quire up --redis redis://localhost:6379/0  prefix index in Redis instead of memory
  quire up --host 0.0.0.0 --api-key KEY --tls   for other machines: clients need the key and the printed CA
  quire up --detach                          in the background: quire ps, quire logs, quire stop
  quire up --json --ready-file ready.json    for scripts: events as JSON lines, addresses in a file

Ctrl-C or SIGTERM drains: running requests finish, then all services stop. A second signal stops them immediately.
"""

SERVE_EXAMPLES = """\
examples:
  quire serve Qwen/Qwen3-0.6B                from the local cache of the Hub, else downloaded
  quire serve ./Qwen3-0.6B --workers 2 --dtype bfloat16
  quire serve Qwen/Qwen3-0.6B --served-model-name qwen --api-key KEY --max-model-len 8192 --tool-parser hermes
"""

# Flags of the services. `quire up` sets the first ones itself; the last ones are for several machines.
NOT_OFFERED = {
    *("model", "listen", "http-listen", "advertise", "scheduler", "scheduler-id", "worker-id", "insecure"),
    *(
        "metrics-listen",
        "health-listen",
        "console-listen",
        "token-file",
        "internal-tls-worker-name",
        "internal-tls-name",
    ),
    *("internal-tls-ca-file", "internal-tls-cert-file", "internal-tls-key-file"),
    *("tls-cert-file", "tls-key-file", "tls-client-ca-file"),
    *("revision", "replace-revision"),  # fleets only; vLLM's --revision is MODEL@REVISION
    *("nnodes", "node-rank", "node-listen", "leader-address", "node-timeout-s"),
}
NAMES_IN_VLLM = {"tool-parser": "--tool-call-parser", "http-allow-origin": "--allowed-origins"}
DEFAULTS_HERE = {
    "threads": "here an equal share of the cores",
    "chunk-interval-ms": "here 50, because all services share this machine",
    "burst-ms": "here 20, because all services share this machine",
    "record-memory": "here 64M for one gateway without --redis",
    "batch-dir": "here, without --redis, a folder in --log-dir",
}


def up_arguments() -> tuple[Argument | ArgumentGroup, ...]:
    """All arguments except the model."""
    return (*OWN, *_of_services())


OWN = (
    arg("--model-name", "--served-model-name", metavar="NAME",
        help="name of the model in requests (default: ORG/NAME or the folder's name)"),
    count_of("--workers", "worker processes (default 1)", default=1),
    count_of("--gateways", "gateway processes (default 1), on consecutive ports", default=1),
    count_of("--schedulers", "scheduler replicas (default 1)", default=1),
    arg("--redis", metavar="URL", help="prefix index and records of requests in this Redis (default: in memory)"),
    arg("--host", default="127.0.0.1", help="address that gateways listen on (default 127.0.0.1: this machine only)"),
    arg("--port", type=within(0, 65535), default=50051,
        help="port of the first gateway (default 50051; 0: free ports)"),
    arg("--http-port", type=within(0, 65535), metavar="PORT",
        help="port of the OpenAI-compatible HTTP API of the first gateway (default 8000, or free ports if 8000 is in "
        "use or --port is 0; 0: free ports)"),
    arg("--api-key", action="append", metavar="KEY", default=[],
        help="clients need this key; repeat the flag for several (--api-keys DIR: keys with owners, by digest)"),
    switch("--detach", "return when all services are ready; `quire logs` and `quire stop` find the stack"),
    switch("--tls",
        "encrypt all connections with certificates that are made for this run; prints --tls-ca for clients"),
    switch("--metrics", "serve /metrics of every service on free ports of 127.0.0.1"),
    switch("--console", "serve the console, a page for browsers, on a free port of 127.0.0.1"),
    arg("--log-dir", metavar="DIR",
        help="folder of the log files NAME.log (default: a temporary folder that is removed after a clean stop)"),
    arg("--ready-file", metavar="FILE",
        help="write addresses and process ids to this file as JSON when all services are ready"),
    switch("--json", "one JSON line per event instead of text"),
    arg("--drain-timeout-s", type=positive, default=30.0, metavar="S",
        help="time limit for running requests at shutdown (default 30)"),
    switch("--enable-auto-tool-choice", "has no effect, as models may always call the tools of a request"),
)  # fmt: skip


@cache
def _rows() -> tuple[Mapping[str, Any], ...]:
    """The flags of the services that can be set here. scripts/docs_tables.py writes the file."""
    rows = json.loads(Path(__file__).with_name("service_flags.json").read_text(encoding="utf-8"))
    return tuple(row for row in rows if row["name"] not in NOT_OFFERED)


def _of_services() -> Iterator[ArgumentGroup]:
    own = {name for argument in OWN for name in argument.names}
    groups: dict[str, list[Argument]] = {}
    for row in _rows():
        if f"--{row['name']}" not in own:
            services = "services" if len(row["services"]) == 3 else " and ".join(f"{one}s" for one in row["services"])
            groups.setdefault(f"flags of all {services}", []).append(_flag(row))
    return starmap(ArgumentGroup, groups.items())


def _flag(row: Mapping[str, Any]) -> Argument:
    name = row["name"]
    names = [f"--{name}", *([NAMES_IN_VLLM[name]] if name in NAMES_IN_VLLM else [])]
    default = f"; {DEFAULTS_HERE[name]}" if name in DEFAULTS_HERE else ""
    if row.get("is_switch"):
        return arg(*names, help=row["help"], action="store_true")
    value = {"choices": row["choices"]} if "choices" in row else {"type": _type(row), "metavar": row.get("metavar")}
    repeated = {"action": "append"} if row.get("is_list") else {}
    return arg(*names, help=row["help"] + default, **value, **repeated)


def _type(row: Mapping[str, Any]) -> Any:
    if row["name"] == "http-allow-origin":
        return _origins
    kind = row.get("type")
    if kind == "size":
        return size
    return str if kind is None else within(*row["range"], *([number] if kind == "float" else []))


def _origins(text: str) -> str | list[str]:
    """One origin, or vLLM's list in JSON."""
    if not text.startswith("["):
        return text
    try:
        return [str(origin) for origin in json.loads(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None


def flags_of(service: str, args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """The flags of a service that are set, with their values."""
    for row in _rows():
        value = getattr(args, row["name"].replace("-", "_"))
        if service in row["services"]:
            yield from ((row["name"], one) for one in _flat(value))


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
