"""`quire models`, `quire status`, `quire tokenize`, `quire drain`, `quire abort`."""

from __future__ import annotations

import argparse
import sys
import time

from quire_client.sync.client import Client
from quire_client.types import ModelInfo, SchedulerStatus, Status, WorkerStatus

from quire_cli.commands.top_screen import RateMeter, Rates, seconds_text
from quire_cli.connection import connect
from quire_cli.output import complain, count, read_stdin, show, table, to_json, write

WATCH_INTERVAL_S = 1.0
OPERATORS_ONLY = (
    "workers, queues and cache hits are for operators: --target must be the address of the gateway's --admin-listen, "
    "and --api-key a key of its --admin-keys"
)
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def models(args: argparse.Namespace) -> int:
    with connect(args) as client:
        found = client.models(timeout_s=args.timeout_s)
    headers = ("model", "workers", "max length", "vocabulary", "dtype", "determinism")
    none = "no model yet: no worker has registered. `quire status` shows the schedulers."
    return show(args, {"models": found}, table(headers, map(_model_row, found)) if found else none)


def status(args: argparse.Namespace) -> int:
    meter = RateMeter()
    with connect(args) as client:
        while True:
            found = client.status(timeout_s=args.timeout_s)
            if args.memory and not found.is_summary:
                print(memory_text(client, found, is_json=args.json))
                return 0
            rates = meter.add(found, time.monotonic())
            if args.watch and not args.json and sys.stdout.isatty():
                write(CLEAR_SCREEN)
            text = to_json(found) if args.json else status_text(found)
            print(text if args.json or not args.watch else f"{text}\n{rates_text(rates)}", flush=True)
            if not args.watch:
                return 0
            time.sleep(WATCH_INTERVAL_S)


def abort(args: argparse.Namespace) -> int:
    """Exit code 1 if a request is unknown."""
    with connect(args) as client:
        result = client.abort(*args.ids, timeout_s=args.timeout_s)
    if args.json:
        print(to_json(result))
    elif result.aborted_ids:
        print(f"aborted: {', '.join(result.aborted_ids)}")
    if result.unknown_ids:
        complain(f"no open request {', '.join(result.unknown_ids)}: it has ended, or the id is wrong")
    return 1 if result.unknown_ids else 0


def drain(args: argparse.Namespace) -> int:
    with connect(args) as client:
        num_moved = client.drain_worker(args.worker, model=args.model, timeout_s=args.drain_timeout_s)
    words = f"{args.worker} is draining: {count(num_moved, 'sequence')} moved"
    return show(args, {"worker": args.worker, "num_moved": num_moved}, words)


def tokenize(args: argparse.Namespace) -> int:
    if args.text is None and sys.stdin.isatty():
        complain('nothing to tokenize: give a text, e.g. quire tokenize "Hello"')
        return 2
    text = read_stdin() if args.text is None else args.text
    with connect(args) as client:
        prompt, messages = (None, text) if args.chat else (text, None)
        result = client.tokenize(prompt, messages=messages, model=args.model, timeout_s=args.timeout_s)
    show(args, result, ",".join(map(str, result.token_ids)))
    if not args.json:
        print(f"[{count(len(result.token_ids), 'token')}; max_model_len is {result.max_model_len}]", file=sys.stderr)
    return 0


def status_text(status: Status) -> str:
    """The status of the schedulers and workers behind a gateway, as text."""
    if status.is_summary:
        return summary_text(status)
    parts = [scheduler_text(scheduler) for scheduler in status.schedulers] or ["no scheduler is configured"]
    return "\n\n".join([*parts, f"open streams: {status.open_streams}{_pinned(status)}"])


def memory_text(client: Client, status: Status, *, is_json: bool) -> str:
    """Uses of the memory of each service, in MB; among gateways, of the one that answers."""
    schedulers = [scheduler for scheduler in status.schedulers if scheduler.connected]
    workers = [worker.worker_id for scheduler in schedulers for worker in scheduler.workers]
    names = ["gateway", *(scheduler.address for scheduler in schedulers), *dict.fromkeys(workers)]
    found = {name: client.report(name)["memory"] for name in names}
    if is_json:
        return to_json(found)
    kinds = list(dict.fromkeys(kind for memory in found.values() for kind in memory))
    columns = {name: [sum(memory.values()), *(memory.get(kind, 0) for kind in kinds)] for name, memory in found.items()}
    rows = ((name, *(round(size / 1e6) for size in sizes)) for name, sizes in columns.items())
    return table(("MB", "all", *kinds), rows)


def rates_text(rates: Rates) -> str:
    """The rates of all schedulers in one line."""
    first = f"{seconds_text(rates.first_token_p50_s)} p50, {seconds_text(rates.first_token_p95_s)} p95"
    return (
        f"rates: {rates.output_tokens_per_s:.0f} tokens/s, {rates.ended_per_s:.1f} sequences/s, "
        f"first token after {first} (30 s)"
    )


def summary_text(status: Status) -> str:
    """The status that a gateway shows to clients."""
    states = (
        f"{s.model or 'no model yet'}  {'connected' if s.connected else 'NOT CONNECTED'}" for s in status.schedulers
    )
    return "\n".join([*states, OPERATORS_ONLY])


def scheduler_text(scheduler: SchedulerStatus) -> str:
    name = scheduler.model or "no model yet"
    if not scheduler.connected:
        return f"{name}  scheduler {scheduler.address}: NOT CONNECTED"
    revision = f", revision {scheduler.revision}" if scheduler.revision else ""
    lines = [
        f"{name}  scheduler {scheduler.address}{revision}",
        f"  queue   {scheduler.num_waiting} of {scheduler.max_waiting} waiting, {scheduler.num_running} running, "
        f"{count(scheduler.preemptions, 'preemption')}, {count(scheduler.steps, 'step')}",
        f"  tokens  {_pending(scheduler)}, {scheduler.refused_deadline} refused for their deadline",
        f"  prefix  {_hit_rate(scheduler)}, index {scheduler.prefix_index}",
    ]
    if drafts := scheduler.accepted_draft_tokens:
        lines.append(f"  drafts  {drafts} of {count(scheduler.output_tokens, 'output token')} were drafts")
    if not scheduler.workers:
        return "\n".join([*lines, "  no worker has registered yet"])
    has_adapters = any(worker.adapters_loaded for worker in scheduler.workers)
    headers = ["worker", "state", "rows", "of", "free", "cached", "used", "steps", "address"]
    headers += ["adapters", "resident", "swaps"] if has_adapters else []
    has_roles = any(worker.role != "both" for worker in scheduler.workers)
    headers += ["role"] if has_roles else []
    rows = [_worker_row(worker, has_adapters) + ((worker.role,) if has_roles else ()) for worker in scheduler.workers]
    lines += [f"  {line}" for line in table(headers, rows).splitlines()]
    slower = ((worker.worker_id, reason) for worker in scheduler.workers for reason in worker.degradations)
    return "\n".join([*lines, *(f"  {worker_id} serves slower: {reason}" for worker_id, reason in slower)])


def _pinned(status: Status) -> str:
    if status.pinned_sessions is None:
        return ""
    owners = ", ".join(f"{owner} {num_sessions}" for owner, num_sessions in status.pins_by_owner.items() if owner)
    return f", pinned sessions: {status.pinned_sessions}" + (f" ({owners})" if owners else "")


def _pending(scheduler: SchedulerStatus) -> str:
    limit = f" (queue: at most {scheduler.max_waiting_tokens})" if scheduler.max_waiting_tokens else ""
    return f"{scheduler.pending_tokens} pending{limit}"


def _hit_rate(scheduler: SchedulerStatus) -> str:
    if not scheduler.prefix_query_tokens:
        return "no prompt yet"
    percent = 100 * scheduler.prefix_hit_tokens / scheduler.prefix_query_tokens
    return (
        f"{scheduler.prefix_hit_tokens} of {scheduler.prefix_query_tokens} prompt tokens from cache ({percent:.0f} %)"
    )


def _worker_row(worker: WorkerStatus, has_adapters: bool) -> tuple[object, ...]:
    blocks = (worker.blocks_free, worker.blocks_cached, worker.blocks_used)
    adapters = (worker.adapters_loaded, worker.adapters_resident, worker.adapter_swaps) if has_adapters else ()
    rows = worker.rows_used, worker.rows_total
    return (worker.worker_id, worker.state, *rows, *blocks, worker.steps, worker.address, *adapters)


def _model_row(model: ModelInfo) -> tuple[object, ...]:
    sizes = (model.ready_workers, model.max_model_len, model.vocab_size)
    numbers = f"{model.dtype}, {model.quantization}" if model.quantization else model.dtype
    return (model.name, *sizes, numbers, model.determinism)
