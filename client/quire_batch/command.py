"""`quire batch`: answer a file of requests in OpenAI's batch format.

The servers run the batch. The command uploads the input, follows the batch and writes its results to the output. The id
of the batch is kept in OUTPUT.batch until then, so that the same command follows the same batch again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from quire_cli.connection import tls_option
from quire_cli.output import complain, count, to_json
from quire_client.connection.channel import api_key_of
from quire_client.errors import QuireError

from quire_batch.http import Api, parse_servers

BASE_URL_ENV = "QUIRE_BASE_URL"
DEFAULT_BASE_URL = "http://localhost:8000"
EXIT_UNANSWERED, EXIT_BAD_FILE, EXIT_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130
POLL_S = 0.5
BAR_WIDTH = 24
ENDED = ("completed", "failed", "cancelled", "expired")


class BatchFileError(Exception):
    """An input or output file cannot be used. The message has the file and the reason."""


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 if all answers are 200; 1 if requests are unanswered; 2 for a bad file; 3 if answers are errors."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    note = Path(f"{args.output}.batch")
    try:
        return _run(args, Path(args.input), Path(args.output), note)
    except BatchFileError as error:
        complain(str(error))
        return EXIT_BAD_FILE
    except OSError as error:
        complain(f"cannot use {error.filename}: {error.strerror or error}")
        return EXIT_BAD_FILE
    except QuireError as error:
        complain(error.message)
        return EXIT_UNANSWERED
    except KeyboardInterrupt:
        words = "the batch goes on: run the same command again to follow it, or with --cancel to end it"
        print(words if note.exists() else "nothing was started", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(args: argparse.Namespace, source: Path, output: Path, note: Path) -> int:
    progress = Progress()
    servers = parse_servers(args.base_url or os.environ.get(BASE_URL_ENV) or DEFAULT_BASE_URL)
    api = Api(servers, api_key_of(args.api_key), tls_option(args), args.retry_timeout_s, progress.warn)
    if not note.exists():
        if args.cancel:
            raise BatchFileError(f"{note} does not exist: no batch of this output is open")
        note.write_text(_started(api, source, output, args.window))
    batch_id = note.read_text().strip()
    if args.cancel:
        api.post(f"/v1/batches/{batch_id}/cancel", {})
    elif args.detach:
        print(to_json({"id": batch_id}) if args.json else f"batch {batch_id} was started")
        return 0
    while (batch := api.get(f"/v1/batches/{batch_id}"))["status"] not in ENDED:
        progress.show(progress_of(batch))
        time.sleep(POLL_S)
    progress.show("")
    if batch["status"] != "failed":
        _write(api, batch, output)
    note.unlink()
    if batch["status"] == "failed":
        problems = [f"line {one['line']}: {one['message']}" for one in batch["errors"]["data"]]
        raise BatchFileError(f"{source} is invalid, nothing was sent: {'; '.join(problems)}")
    return _report(args, batch, output)


def _started(api: Api, source: Path, output: Path, window: str) -> str:
    """The id of a new batch."""
    with source.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        endpoint = json.loads(first)["url"]  # the server checks all lines
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BatchFileError(f"{source} has no requests: its first line has no url") from None
    if output.exists() and output.stat().st_size:
        raise BatchFileError(f"{output} exists; choose another output file")
    output.open("ab").close()
    body = {"endpoint": endpoint, "completion_window": window, "input_file_id": api.upload(source)["id"]}
    return str(api.post("/v1/batches", body)["id"])


def _write(api: Api, batch: dict[str, Any], output: Path) -> None:
    """Write the results to the output at once."""
    part = Path(f"{output}.part")
    with part.open("w+b") as file:
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            api.download(f"/v1/files/{file_id}/content", file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(output)


def _report(args: argparse.Namespace, batch: dict[str, Any], output: Path) -> int:
    total, num_unanswered, tokens = batch["request_counts"]["total"], 0, 0
    with output.open("rb") as file:
        for line in file:
            response = json.loads(line)["response"]
            num_unanswered += response is None
            body = response and response["body"]
            usage = (body.get("usage") if isinstance(body, dict) else None) or {}
            tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
    num_errors = batch["request_counts"]["failed"] - num_unanswered
    counts = {"num_requests": total, "num_answered": total - num_unanswered, "num_errors": num_errors}
    counts |= {"num_unanswered": num_unanswered, "output_tokens": tokens}
    if args.json:
        print(to_json({"id": batch["id"], "status": batch["status"], "output": str(output), **counts}), flush=True)
    else:
        answered = f"{total - num_unanswered} of {count(total, 'request')} answered, {count(tokens, 'output token')}"
        ends = [f"{num_errors} of the answers are errors: response.status_code is not 200"] * bool(num_errors)
        ends += [f"{num_unanswered} not answered: the batch is {batch['status']}"] * bool(num_unanswered)
        print(f"{answered}; results in {output}", *ends, sep="\n", flush=True)
    return EXIT_UNANSWERED if num_unanswered else EXIT_ERRORS if num_errors else 0


class Progress:
    """Shows how far a batch is on a terminal, and the first failed attempt of a call."""

    def __init__(self) -> None:
        self._is_tty = sys.stderr.isatty()
        self._has_warned = False

    def show(self, text: str) -> None:
        """Replace the text; without one, remove it."""
        if self._is_tty:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        """Print the first message."""
        if not self._has_warned:
            self._has_warned = True
            print(f"trying again: {message}", file=sys.stderr, flush=True)


def progress_of(batch: dict[str, Any]) -> str:
    """One line: done of total, status, errors."""
    counts = batch["request_counts"]
    done, total = counts["completed"] + counts["failed"], max(1, counts["total"])
    filled = BAR_WIDTH * done // total
    bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
    errors = f", {count(counts['failed'], 'error')}" if counts["failed"] else ""
    return f"{done}/{counts['total']} {bar} {100 * done // total} %, {batch['status']}{errors}"
