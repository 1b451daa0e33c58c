"""HTTP calls of a batch, with the standard library only."""

from __future__ import annotations

import http.client
import json
import random
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from quire_client.connection.tls import Tls
from quire_client.errors import ConnectionFailed, InvalidRequest, Overloaded, QuireError, Unauthenticated
from quire_client.retry import RetryPolicy

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
