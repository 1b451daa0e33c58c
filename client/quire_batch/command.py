"""`quire batch`: answer a file of requests in OpenAI's batch format.

The servers run the batch. The command uploads the input, follows the batch and writes its results to the output. The id
of the batch is kept in OUTPUT.batch until then, so that the same command follows the same batch again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from quire_cli.connection import tls_option
from quire_cli.output import complain, count, to_json
from quire_client.connection.channel import Tls, api_key_of
from quire_client.errors import ConnectionFailed, InvalidRequest, Overloaded, QuireError, Unauthenticated
from quire_client.retry import RetryPolicy

from quire_batch.drafts import BatchFileError, write_with_drafts

RETRYABLE = (408, 429, 502, 503, 504)
RETRY = RetryPolicy(max_attempts=1_000_000, initial_s=0.2, max_s=10.0)  # the time limit ends the attempts
TIMEOUT_S = 60.0
PIECE_BYTES = 256 << 10
BOUNDARY = "quire-batch-5d1f7a0c2b"
HEAD = (
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    'content-disposition: form-data; name="file"; filename="input.jsonl"\r\n\r\n'
).encode()
TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()


def parse_servers(urls: str) -> list[str]:
    """The servers of a comma-separated list of base URLs, without the final /v1. Raises InvalidRequest."""
    found = []
    for url in filter(None, map(str.strip, urls.split(","))):
        parts = urllib.parse.urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise InvalidRequest(f"--base-url {url!r} is not a URL of an HTTP server; use http://host:port")
        found.append(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}")
    if not found:
        raise InvalidRequest(f"--base-url {urls!r} has no URL; use http://host:port")
    return found


class Api:
    """Calls one of several servers of a deployment; the next one after a failure.

    A call is repeated for `retry_timeout_s`; `warn` gets the error of each failed attempt. Raises QuireError.
    """

    def __init__(
        self, servers: list[str], api_key: str, tls: Tls | None, retry_timeout_s: float, warn: Callable[[str], None]
    ) -> None:
        self._servers = servers
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._retry_timeout_s = retry_timeout_s
        self._warn = warn
        context = _ssl_context(tls or Tls()) if any(server.startswith("https") for server in servers) else None
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._repeat(path, lambda: None, {}, json.load)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a body."""
        return self._repeat(path, lambda: json.dumps(body).encode(), {"content-type": "application/json"}, json.load)

    def upload(self, source: Path) -> Any:
        """Upload a file of requests."""

        def pieces() -> Iterable[bytes]:
            yield HEAD
            with source.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece
            yield TAIL

        size = len(HEAD) + source.stat().st_size + len(TAIL)
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-length": str(size)}
        return self._repeat("/v1/files", pieces, headers, json.load)

    def download(self, path: str, target: IO[bytes]) -> None:
        """Append what is at a path to a file."""
        start = target.tell()

        def copy(answer: IO[bytes]) -> None:
            target.seek(start)
            target.truncate()
            while piece := answer.read(PIECE_BYTES):
                target.write(piece)

        self._repeat(path, lambda: None, {}, copy)

    def _repeat(self, path: str, data: Callable[[], Any], headers: dict[str, str], read: Callable[[Any], Any]) -> Any:
        rng, num_attempts = random.Random(), 0
        give_up_at = time.monotonic() + self._retry_timeout_s
        while True:
            server = self._servers[0]
            request = urllib.request.Request(server + path, data=data(), headers=self._headers | headers)
            try:
                with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                    return read(answer)
            except (OSError, http.client.HTTPException, ValueError) as found:
                error = _error_of(server, path, found)
            num_attempts += 1
            delay_s = RETRY.delay_s(error, num_attempts, give_up_at - time.monotonic(), rng)
            if delay_s is None or not isinstance(error, ConnectionFailed | Overloaded):
                raise error
            self._warn(error.message)
            self._servers.append(self._servers.pop(0))
            time.sleep(delay_s)


def _ssl_context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:  # includes SSLError
        raise InvalidRequest(f"the TLS files cannot be used: {error}") from None
    return context


def _error_of(server: str, path: str, error: Exception) -> QuireError:
    if isinstance(error, urllib.error.HTTPError):
        return _error_of_answer(f"{server}: {_message_of(error.read())}", path, error)
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLError):
        return InvalidRequest(f"{server}: TLS failed; does the server use it? {reason}")
    if isinstance(error, ValueError) or type(error) is http.client.BadStatusLine:
        words = "if it is a gateway's gRPC port, use its HTTP port (--http-listen), or https:// if it requires TLS"
        return InvalidRequest(f"{server} does not answer as an HTTP API; {words}")
    return ConnectionFailed(f"{server}: {reason or type(reason).__name__}")


def _error_of_answer(words: str, path: str, answer: urllib.error.HTTPError) -> QuireError:
    if answer.code in RETRYABLE:
        delay = answer.headers.get("retry-after", "")
        return Overloaded(f"{words} (HTTP {answer.code})", retry_after_s=float(delay) if delay.isdigit() else 0.0)
    if answer.code in (401, 403):
        return Unauthenticated(f"{words}; set --api-key or QUIRE_API_KEY")
    return InvalidRequest(f"{words} (HTTP {answer.code}, {path})")


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


BASE_URL_ENV = "QUIRE_BASE_URL"
DEFAULT_BASE_URL = "http://localhost:8000"
EXIT_UNANSWERED, EXIT_BAD_FILE, EXIT_ERRORS, EXIT_INTERRUPTED = 1, 2, 3, 130
POLL_S = 0.5
BAR_WIDTH = 24
ENDED = ("completed", "failed", "cancelled", "expired")


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
        with tempfile.TemporaryDirectory() as folder:
            sent = write_with_drafts(source, Path(args.drafts), Path(folder)) if args.drafts else source
            note.write_text(_started(api, sent, output, args.window))
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
