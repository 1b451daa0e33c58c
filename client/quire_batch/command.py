"""`quire batch`: answer a file of requests in OpenAI's batch format. Threads send them, and append each answer."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quire_cli.connection import tls_option
from quire_cli.output import complain, count, to_json
from quire_client.connection.channel import api_key_of
from quire_client.errors import ConnectionFailed, Overloaded, QuireError
from quire_client.retry import RetryPolicy

from quire_batch.files import BatchFileError, BatchRequest, Response, ResultFile, check_input, read_requests
from quire_batch.http import Connections, parse_servers

RETRY = RetryPolicy(max_attempts=1_000_000, initial_s=0.2, max_s=10.0)  # the time limit ends the attempts
POLL_S = 0.2


class Sender(Protocol):
    """Sends one request. Raises ConnectionFailed or Overloaded if it should be sent again."""

    def post(self, path: str, body: dict[str, Any]) -> Response: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class BatchCounts:
    """The progress of one run."""

    num_total: int  # requests of this run
    num_answered: int = 0
    num_errors: int = 0  # answers whose status is not 200
    num_unanswered: int = 0  # requests without an answer after `retry_timeout_s`
    num_retries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    last_error: str = ""  # error of the last failed attempt

    def add(self, response: Response) -> None:
        self.num_answered += 1
        self.num_errors += response.status_code != 200
        usage = response.body.get("usage") if isinstance(response.body, dict) else None
        if isinstance(usage, dict):
            self.input_tokens += usage.get("prompt_tokens") or 0
            self.output_tokens += usage.get("completion_tokens") or 0


class BatchRun:
    """Sends `requests` over at most `concurrency` connections and writes each answer to `results` when it arrives.

    A request without an answer, or with a retryable status, is retried for `retry_timeout_s` and then stays unanswered.
    The run ends if no other request was answered in that time.
    """

    def __init__(
        self,
        requests: Iterator[BatchRequest],
        results: ResultFile,
        sender: Sender,
        *,
        num_total: int,
        concurrency: int,
        priority: int,
        retry_timeout_s: float,
    ) -> None:
        self.counts = BatchCounts(num_total)
        self._requests = requests
        self._results = results
        self._sender = sender
        self._concurrency = concurrency
        self._priority = priority
        self._retry_timeout_s = retry_timeout_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._last_answer_at = time.monotonic()
        self._failure: BaseException | None = None

    def run(self, show: Callable[[BatchCounts], None]) -> BatchCounts:
        """Run to the end; calls `show` a few times per second. Raises KeyboardInterrupt, or the error that ended the
        run. Every answer received before is in the output.
        """
        threads = [
            threading.Thread(target=self._work, name=f"quire-batch-{i}", daemon=True)
            for i in range(min(self._concurrency, self.counts.num_total))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_S)
                    show(self.counts)
        finally:
            self._stopping.set()
            self._sender.interrupt()
            for thread in threads:
                thread.join()
            self._sender.close()
        if self._failure is not None:
            raise self._failure
        return self.counts

    def _work(self) -> None:
        try:
            while (request := self._next()) is not None:
                response = self._answer(request)
                if response is not None:
                    self._store(request, response)
        except BaseException as error:
            self._failure = error
            self._stopping.set()
            self._sender.interrupt()

    def _next(self) -> BatchRequest | None:
        with self._lock:
            return None if self._stopping.is_set() else next(self._requests, None)

    def _answer(self, request: BatchRequest) -> Response | None:
        """The answer to one request; None after the time limit or the end of the run."""
        body = {"priority": self._priority} | request.body
        rng = random.Random()
        num_attempts, give_up_at = 0, float("inf")
        while not self._stopping.is_set():
            try:
                return self._sender.post(request.url, body)
            except (ConnectionFailed, Overloaded) as error:
                now = time.monotonic()
                num_attempts += 1
                give_up_at = min(give_up_at, now + self._retry_timeout_s)
                delay_s = RETRY.delay_s(error, num_attempts, give_up_at - now, rng)
                if not self._note(error, delay_s, now):
                    return None
                self._stopping.wait(delay_s)
        return None

    def _note(self, error: QuireError, delay_s: float | None, now: float) -> bool:
        """Count a failed attempt. Returns whether to retry it."""
        with self._lock:
            if self._stopping.is_set():
                return False
            self.counts.last_error = error.message
            if delay_s is not None:
                self.counts.num_retries += 1
                return True
            self.counts.num_unanswered += 1
            if now - self._last_answer_at >= self._retry_timeout_s:
                self._stopping.set()
            return False

    def _store(self, request: BatchRequest, response: Response) -> None:
        with self._lock:
            self._last_answer_at = time.monotonic()
            self._results.write(request.custom_id, response)
            self.counts.add(response)


BASE_URL_ENV = "QUIRE_BASE_URL"
DEFAULT_BASE_URL = "http://localhost:8000"
EXIT_UNANSWERED, EXIT_BAD_FILE, EXIT_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130


LINE_INTERVAL_S = 10.0
BAR_WIDTH = 24


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
    args: argparse.Namespace, counts: BatchCounts, num_requests: int, num_before: int, num_errors: int, seconds: float
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


def _text(summary: dict[str, Any], counts: BatchCounts) -> str:
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


class Progress:
    """Shows the counts of a run. `num_before`: requests that an earlier run has answered."""

    def __init__(self, num_before: int) -> None:
        self._num_before = num_before
        self._is_tty = sys.stderr.isatty()
        self._started = time.monotonic()
        self._shown_at = self._started
        self._has_warned = False

    def show(self, counts: BatchCounts) -> None:
        now = time.monotonic()
        if self._is_tty:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{self.text(counts, now - self._started)[:width]}")
            sys.stderr.flush()
        elif counts.num_retries and not self._has_warned:
            self._has_warned = True
            print(f"no answer yet, trying again: {counts.last_error}", file=sys.stderr, flush=True)
        elif now - self._shown_at >= LINE_INTERVAL_S:
            self._shown_at = now
            print(self.text(counts, now - self._started), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._is_tty:
            sys.stderr.write("\r\x1b[K")

    def text(self, counts: BatchCounts, elapsed_s: float) -> str:
        """One line: done of total, rates, remaining time, errors."""
        total = self._num_before + counts.num_total
        done = self._num_before + counts.num_answered
        parts = [f"{done}/{total} {_bar(done / total)} {100 * done // total} %"]
        if counts.num_answered and elapsed_s > 0:
            rate = counts.num_answered / elapsed_s
            remaining_s = (counts.num_total - counts.num_answered) / rate
            parts.append(f"{rate:.1f} requests/s, {counts.output_tokens / elapsed_s:.0f} tokens/s")
            parts.append(f"{_duration(remaining_s)} left")
        if counts.num_errors:
            parts.append(f"{counts.num_errors} error{'s' if counts.num_errors > 1 else ''}")
        if counts.num_retries:
            parts.append(f"{counts.num_retries} retr{'ies' if counts.num_retries > 1 else 'y'}: {counts.last_error}")
        return ", ".join(parts)


def _bar(fraction: float) -> str:
    filled = int(BAR_WIDTH * fraction)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
