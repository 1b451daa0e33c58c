"""`quire bench`: measure a server under load."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_cli.connection import tls_option
from quire_cli.output import complain, to_json

from quire_bench import datasets
from quire_bench.backend import BackendError, BenchBackend, BenchRun, SendOptions, ServerInfo, arrival_times
from quire_bench.datasets import DatasetConversation, DatasetError, Lengths
from quire_bench.figures import Summary, parse_slo, report_text, summarize, summary_fields
from quire_bench.plot import PlotError, check_plot_path, write_plot

INTERRUPTED = 130
PROGRESS_INTERVAL_S = 0.2
BAR_WIDTH = 24
TEXT_DATASETS = ("demo", "sharegpt")
DEFAULT_VOCAB_SIZE = 2048  # for servers that report no vocabulary size; every model has at least this many ids
DEFAULT_NUM_PROMPTS = 100


class ArgumentsError(Exception):
    """An invalid combination of flags."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished or interrupted run."""

    server: ServerInfo
    run: BenchRun
    summary: Summary
    client_cpu: float  # CPU time of this process per second of the run
    is_interrupted: bool

    @property
    def num_missing(self) -> int:
        return self.run.num_requests - len(self.run.records) if self.is_interrupted else 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed: the client should use little of the CPU that the server needs."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def run(args: argparse.Namespace) -> int:
    try:
        _check(args)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            outcome = runner.run(_measure(args))
    except ArgumentsError as error:
        complain(str(error))
        return 2
    except (DatasetError, BackendError, PlotError) as error:
        complain(str(error))
        return 1
    text = report_text(outcome.summary, client_cpu=outcome.client_cpu, interrupted=outcome.num_missing)
    fields = _fields(args, outcome)
    print(to_json({name: value for name, value in fields.items() if name != "requests"}) if args.json else text)
    try:
        if args.output:
            Path(args.output).write_text(json.dumps(fields) + "\n")
        if args.plot:
            write_plot(Path(args.plot), outcome.run.records, _title(args, outcome.server), text)
            if not args.json:
                print(f"plots in {args.plot}")
    except OSError as error:
        complain(f"cannot write the result: {error}")
        return 1
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    summary = outcome.summary
    if outcome.is_interrupted:
        return INTERRUPTED
    if summary.num_failed:
        complain(f"{summary.num_failed} of {outcome.run.num_requests} requests failed; first: {_first_error(outcome)}")
    return 1 if summary.num_failed else 0


def _first_error(outcome: Outcome) -> str:
    return next(record.error for record in outcome.run.records if record.error)


def _check(args: argparse.Namespace) -> None:
    """Check the flags before any request is sent. Raises ArgumentsError."""
    if args.backend == "openai" and not args.base_url:
        raise ArgumentsError("--backend openai requires --base-url, e.g. --base-url http://localhost:8000")
    if args.dataset in ("trace", "sharegpt", "file") and not args.path:
        raise ArgumentsError(f"--dataset {args.dataset} requires --path FILE")
    if args.dataset == "trace" and args.request_rate is not None:
        raise ArgumentsError(
            "--request-rate has no effect with --dataset trace, which has its own timestamps; use --speed instead"
        )
    if args.plot:
        check_plot_path(Path(args.plot))
    if args.slo:
        try:
            parse_slo(args.slo)
        except ValueError as error:
            raise ArgumentsError(f"--slo: {error}") from None


async def _measure(args: argparse.Namespace) -> Outcome:
    backend = make_backend(args)
    try:
        server = await backend.connect()
        vocab_size = args.vocab_size or server.vocab_size or DEFAULT_VOCAB_SIZE
        await _warm_up(args, backend, server, vocab_size)
        run = make_run(args, backend, server, vocab_size)
        cpu_s = time.process_time()
        is_interrupted = await _until_done_or_interrupted(run, is_shown=not args.no_progress and sys.stderr.isatty())
        client_cpu = (time.process_time() - cpu_s) / max(run.elapsed_s, 1e-9)
        slo_ms = parse_slo(args.slo) if args.slo else None
        return Outcome(server, run, summarize(run.records, slo_ms), client_cpu, is_interrupted)
    finally:
        await backend.close()


def make_backend(args: argparse.Namespace) -> BenchBackend:
    """The backend that --backend selects. Only its module is imported."""
    is_text = args.dataset in TEXT_DATASETS
    options = SendOptions(
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=not is_text if args.ignore_eos is None else args.ignore_eos,
        chat=is_text if args.chat is None else args.chat,
        timeout_s=args.timeout_s or 600.0,
        text=is_text if args.text is None else args.text,
        cache_salt=args.cache_salt,
    )
    if args.backend == "openai":
        from quire_bench.openai_backend import OpenAIBackend

        return OpenAIBackend(args.base_url, args.model, options, args.extra_body, args.api_key)
    from quire_bench.backend import QuireBackend

    return QuireBackend(args.target, args.model, options, tls_option(args), args.api_key)


def make_run(args: argparse.Namespace, backend: BenchBackend, server: ServerInfo, vocab_size: int) -> BenchRun:
    """The requests and their times. Raises DatasetError."""
    conversations = make_conversations(args, vocab_size, args.seed)
    if server.max_model_len is not None and args.skip_too_long:
        conversations = datasets.without_too_long(conversations, server.max_model_len)
    elif server.max_model_len is not None:
        datasets.check_lengths(conversations, server.max_model_len)
    rate = math.inf if args.request_rate is None else args.request_rate
    planned = arrival_times(len(conversations), rate, args.burstiness, random.Random(f"{args.seed}/arrivals"))
    starts_s = [
        at if conversation.start_s is None else conversation.start_s
        for conversation, at in zip(conversations, planned, strict=True)
    ]
    return BenchRun(backend, conversations, starts_s, concurrency=args.concurrency, vocab_size=vocab_size)


def make_conversations(args: argparse.Namespace, vocab_size: int, seed: int) -> list[DatasetConversation]:
    """The dataset that the flags describe."""
    rng = random.Random(seed)
    count = args.num_prompts or DEFAULT_NUM_PROMPTS
    inputs = Lengths(args.input_len, args.range_ratio)
    outputs = Lengths(args.output_len or datasets.DEFAULT_OUTPUT_LEN, args.range_ratio)
    if args.dataset == "random":
        return datasets.random_prompts(count, inputs, outputs, vocab_size=vocab_size, rng=rng)
    if args.dataset == "shared-prefix":
        groups = {"num_groups": args.groups, "prefix_len": args.prefix_len}
        return datasets.shared_prefixes(count, inputs, outputs, **groups, vocab_size=vocab_size, rng=rng)
    if args.dataset == "multi-turn":
        return datasets.multi_turn(
            count,
            inputs,
            outputs,
            num_turns=args.turns,
            think_s=args.think_time_s,
            num_groups=args.groups,
            prefix_len=args.prefix_len,
            vocab_size=vocab_size,
            rng=rng,
        )
    return _read_conversations(args, count, vocab_size, seed, rng)


def _read_conversations(
    args: argparse.Namespace, count: int, vocab_size: int, seed: int, rng: random.Random
) -> list[DatasetConversation]:
    if args.dataset == "demo":
        from quire_client.demo import demo_model_dir

        return datasets.demo_questions(
            Path(demo_model_dir()) / "pairs.json", count=count, output_len=args.output_len, rng=rng
        )
    path = Path(args.path)
    if args.dataset == "trace":
        return datasets.trace(
            path,
            speed=args.speed,
            length_scale=args.length_scale,
            limit=args.num_prompts,
            vocab_size=vocab_size,
            seed=seed,
        )
    if args.dataset == "sharegpt":
        return datasets.texts_of_file(path, count=count, output_len=args.output_len, rng=rng)
    return datasets.requests_of_file(path, output_len=args.output_len, limit=args.num_prompts)


async def _warm_up(args: argparse.Namespace, backend: BenchBackend, server: ServerInfo, vocab_size: int) -> None:
    """Send requests of the same kind as the run, all at once and not counted. Raises BackendError if one fails.

    Synthetic prompts get other tokens than in the run, so they do not warm up the prefix cache.
    """
    if not args.warmup:
        return
    conversations = make_conversations(args, vocab_size, args.seed + 1)
    if server.max_model_len is not None:
        conversations = datasets.without_too_long(conversations, server.max_model_len)
    first = [DatasetConversation(conversation.turns[:1]) for conversation in conversations[: args.warmup]]
    run = BenchRun(backend, first, [0.0] * len(first), vocab_size=vocab_size)
    await run.run()
    failed = [record.error for record in run.records if record.error]
    if failed:
        raise BackendError(f"{len(failed)} of {len(first)} warm-up requests failed; first: {failed[0]}")


async def _until_done_or_interrupted(run: BenchRun, *, is_shown: bool) -> bool:
    """Wait for the end of the run. Returns True if Ctrl-C or SIGTERM ended it."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    running = asyncio.create_task(run.run())
    stop = asyncio.create_task(stopping.wait())
    shown = asyncio.create_task(_show_progress(run)) if is_shown else None
    try:
        await asyncio.wait([running, stop], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for task in (running, stop, *([shown] if shown else [])):
            task.cancel()
        await asyncio.wait([running, stop, *([shown] if shown else [])])
    if running.cancelled():
        return True
    running.result()  # raises the exception of `run`, if any
    return False


async def _show_progress(run: BenchRun) -> None:
    try:
        while True:
            sys.stderr.write(f"\r\x1b[K{progress_line(run)}")
            sys.stderr.flush()
            await asyncio.sleep(PROGRESS_INTERVAL_S)
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def progress_line(run: BenchRun) -> str:
    """Progress bar, requests, failures, rate and time."""
    done, total = len(run.records), run.num_requests
    filled = BAR_WIDTH * done // max(1, total)
    rate = run.num_tokens / max(run.elapsed_s, 1e-9)
    failed = f", {run.num_failed} failed" if run.num_failed else ""
    return (
        f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done}/{total} requests{failed}, {rate:.0f} tok/s, "
        f"{run.elapsed_s:.0f} s"
    )


def _fields(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """The result as JSON: settings, machine, figures and every request."""
    server = outcome.server
    hidden = {"module", "function", "parser", "api_key", "json", "output", "plot", "no_progress"}
    return {
        "backend": server.kind,
        "address": server.address,
        "model": server.model,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()},
        "settings": {name: value for name, value in vars(args).items() if name not in hidden},
        "interrupted": outcome.is_interrupted,
        "client_cpu": round(outcome.client_cpu, 3),
        **summary_fields(outcome.summary),
        "requests": _request_fields(outcome.run.records),
    }


def _request_fields(records: Sequence[Any]) -> list[dict[str, Any]]:
    names = ("num_input", "num_output", "num_cached", "error")
    return [
        {
            "sent_s": round(record.sent_s, 6),
            "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
            "e2e_s": round(record.e2e_s, 6),
            **{name: getattr(record, name) for name in names},
        }
        for record in records
    ]


def _title(args: argparse.Namespace, server: ServerInfo) -> str:
    load = f"{args.request_rate:g} requests/s" if args.request_rate else "all at once"
    load = f"{args.concurrency} at a time" if args.concurrency else load
    return f"quire bench: {server.model} on {server.address} ({server.kind}), {args.dataset}, {load}"
