"""HTTP calls of a batch, with the standard library only: one connection per thread."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import urllib.parse
from dataclasses import dataclass
from typing import Any

from quire_client.connection.tls import Tls
from quire_client.errors import ConnectionFailed, InvalidRequest, Overloaded, QuireError, Unauthenticated

from quire_batch.files import Response

RETRYABLE = (408, 429, 502, 503, 504)
# Keepalive closes the connection to a frozen host after a minute. A queued request can wait longer than that.
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


@dataclass(frozen=True, slots=True)
class Server:
    """The address of an OpenAI-compatible API, without the final /v1."""

    scheme: str
    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def parse_servers(urls: str) -> list[Server]:
    """The servers of a comma-separated list of base URLs. Raises InvalidRequest."""
    found = [_parse(url.strip()) for url in urls.split(",") if url.strip()]
    if not found:
        raise InvalidRequest(f"--base-url {urls!r} has no URL; use http://host:port")
    return found


def _parse(url: str) -> Server:
    parts = urllib.parse.urlsplit(url if "//" in url else f"//{url}", scheme="http")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise InvalidRequest(f"--base-url {url!r} is not a URL of an HTTP server; use http://host:port")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Server(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path)


class Connections:
    """Sends requests; each thread has one connection. Owns all connections."""

    def __init__(self, servers: list[Server], *, api_key: str, tls: Tls | None, timeout_s: float) -> None:
        self._servers = servers
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._ssl = _ssl_context(tls) if any(server.scheme == "https" for server in servers) else None
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: dict[int, http.client.HTTPConnection] = {}  # by thread id
        self._chosen: dict[int, int] = {}  # index of the server in use, by thread

    def interrupt(self) -> None:
        """Break all connections. Pending requests raise ConnectionFailed."""
        with self._lock:
            self._is_closed = True
            for connection in self._open.values():
                if connection.sock is not None:
                    _shut_down(connection.sock)

    def close(self) -> None:
        """Close all connections, after the threads have ended."""
        for connection in self._open.values():
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> Response:
        """Send one request. Raises ConnectionFailed or Overloaded if it should be sent again."""
        server, connection = self._connection()
        try:
            connection.request("POST", server.path + path, json.dumps(body).encode(), self._headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._leave()
            raise _connection_failed(server, error) from None
        if answer.will_close:
            self._drop()
        response = Response(answer.status, answer.getheader("x-request-id", ""), _decoded(data))
        if answer.status in RETRYABLE:
            raise _overloaded(server, response, answer)
        _check_access(server, path, response)
        return response

    def _connection(self) -> tuple[Server, http.client.HTTPConnection]:
        thread = threading.get_ident()
        with self._lock:
            server = self._servers[self._chosen.setdefault(thread, len(self._chosen)) % len(self._servers)]
            self._check_open()
            connection = self._open.get(thread)
            if connection is None:
                connection = self._open[thread] = self._new(server)
        if connection.sock is None:
            self._connect(server, connection)
        return server, connection

    def _connect(self, server: Server, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
            if connection.sock is not None:
                _keep_alive(connection.sock)
        except OSError as error:
            self._leave()
            raise _connection_failed(server, error) from None
        with self._lock:
            self._check_open()  # `interrupt` may have missed this connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionFailed("the batch was stopped")

    def _new(self, server: Server) -> http.client.HTTPConnection:
        if server.scheme == "https":
            return http.client.HTTPSConnection(server.host, server.port, timeout=self._timeout_s, context=self._ssl)
        return http.client.HTTPConnection(server.host, server.port, timeout=self._timeout_s)

    def _drop(self) -> None:
        with self._lock:
            connection = self._open.pop(threading.get_ident(), None)
        if connection is not None:
            connection.close()

    def _leave(self) -> None:
        """Use the next server for this thread's next request."""
        self._drop()
        with self._lock:
            self._chosen[threading.get_ident()] += 1


def _ssl_context(tls: Tls | None) -> ssl.SSLContext:
    tls = tls or Tls()
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:  # includes SSLError
        raise InvalidRequest(f"the TLS files cannot be used: {error}") from None
    return context


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already disconnected


def _connection_failed(server: Server, error: Exception) -> QuireError:
    if isinstance(error, ssl.SSLError):
        hint = "it does not use TLS; use http://" if "WRONG_VERSION_NUMBER" in str(error) else str(error)
        return InvalidRequest(f"{server}: {hint}")
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return InvalidRequest(
            f"{server} does not speak HTTP/1.1; if it is a gateway's gRPC port, use its HTTP port (--http-listen), "
            "or https:// if it requires TLS"
        )
    return ConnectionFailed(f"{server}: {error or type(error).__name__}")


def _check_access(server: Server, path: str, response: Response) -> None:
    """Raise an error if no request can succeed: the API key or the URL is wrong."""
    message = f"{server}: {error_message(response.body)}"
    if response.status_code in (401, 403):
        raise Unauthenticated(f"{message}; set --api-key or QUIRE_API_KEY")
    if response.status_code == 404 and not _names_a_model(response.body):
        raise InvalidRequest(f"{server} has no {path}: {message}; is --base-url an OpenAI-compatible server?")


def _names_a_model(body: Any) -> bool:
    """Whether the error concerns the model of the request, not the URL."""
    return "model" in error_message(body).lower()


def _overloaded(server: Server, response: Response, answer: http.client.HTTPResponse) -> Overloaded:
    message = f"{server}: HTTP {response.status_code}: {error_message(response.body)}"
    return Overloaded(message, retry_after_s=_retry_after_s(answer))


def _retry_after_s(answer: http.client.HTTPResponse) -> float:
    for header, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(0.0, float(answer.getheader(header, "")) * unit_s)
        except ValueError:
            continue  # the header is missing or is a date
    return 0.0


def _decoded(data: bytes) -> Any:
    """The parsed JSON of an answer, or its text if it is not JSON."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")


def error_message(body: Any) -> str:
    """The message in the body of an error."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(body)[:200]
