"""`quire batch`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from quire_client.channel import api_key_of
from quire_client.errors import QuireError

from quire_cli.batch.files import BatchFileError, ResultFile, check_input, read_requests
from quire_cli.batch.http import Connections, parse_servers
from quire_cli.batch.progress import Progress
from quire_cli.batch.run import BatchRun, Counts
from quire_cli.connection import tls_option
from quire_cli.output import complain, count, to_json

BASE_URL_ENV = "QUIRE_BASE_URL"
DEFAULT_BASE_URL = "http://localhost:8000"
EXIT_UNANSWERED, EXIT_BAD_FILE, EXIT_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 if all answers are 200; 1 if requests are unanswered; 2 for a bad file; 3 if answers are errors."""
    source, output = Path(args.input), Path(args.output)
    try:
        if output.exists() and source.exists() and output.samefile(source):
            raise BatchFileError("the input and the output are the same file; choose another output file")
        ids = check_input(source)
        with ResultFile(output) as results:
            return _send(args, source, ids, results)
    except BatchFileError as error:
        complain(str(error))
        return EXIT_BAD_FILE


def _send(args: argparse.Namespace, source: Path, ids: list[str], results: ResultFile) -> int:
    done = results.done.copy()
    waiting = (request for request in read_requests(source) if request.custom_id not in done)
    num_done = sum(custom_id in done for custom_id in ids)
    batch = BatchRun(
        waiting,
        results,
        _connections(args),
        num_total=len(ids) - num_done,
        concurrency=args.concurrency,
        priority=args.priority,
        retry_timeout_s=args.retry_timeout_s,
    )
    progress = Progress(num_done)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_interrupted = False
    try:
        batch.run(progress.show)
    except KeyboardInterrupt:
        is_interrupted = True
    except QuireError as error:
        batch.counts.last_error = error.message
    finally:
        progress.end()
    summary = _summary(args, batch.counts, len(ids), num_done, results.num_errors, time.monotonic() - started)
    print(to_json(summary) if args.json else _text(summary, batch.counts), flush=True)
    return EXIT_INTERRUPTED if is_interrupted else _exit_code(summary)


def _connections(args: argparse.Namespace) -> Connections:
    servers = parse_servers(args.base_url or os.environ.get(BASE_URL_ENV) or DEFAULT_BASE_URL)
    return Connections(servers, api_key=api_key_of(args.api_key), tls=tls_option(args), timeout_s=args.timeout_s)


def _summary(
    args: argparse.Namespace, counts: Counts, num_requests: int, num_before: int, num_errors: int, seconds: float
) -> dict[str, Any]:
    num_answered = num_before + counts.num_answered
    return {
        "output": args.output,
        "num_requests": num_requests,
        "num_answered": num_answered,
        "num_skipped": num_before,
        "num_errors": num_errors,
        "num_unanswered": num_requests - num_answered,
        "num_retries": counts.num_retries,
        "input_tokens": counts.input_tokens,
        "output_tokens": counts.output_tokens,
        "seconds": round(seconds, 3),
    }


def _exit_code(summary: dict[str, Any]) -> int:
    if summary["num_unanswered"]:
        return EXIT_UNANSWERED
    return EXIT_ERRORS if summary["num_errors"] else 0


def _text(summary: dict[str, Any], counts: Counts) -> str:
    known = f" ({summary['num_skipped']} by an earlier run)" if summary["num_skipped"] else ""
    lines = [
        f"{summary['num_answered']} of {count(summary['num_requests'], 'request')} answered{known}, "
        f"{count(counts.output_tokens, 'output token')}, {summary['seconds']:.1f} s; results in {summary['output']}"
    ]
    if summary["num_errors"]:
        lines.append(
            f"{summary['num_errors']} of the answers {'are errors' if summary['num_errors'] > 1 else 'is an error'}"
            ": response.status_code is not 200"
        )
    if summary["num_unanswered"]:
        reason = f" Last error: {counts.last_error}" if counts.last_error else ""
        lines.append(f"{summary['num_unanswered']} not answered: run the same command again to continue.{reason}")
    return "\n".join(lines)
