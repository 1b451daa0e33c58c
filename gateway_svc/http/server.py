"""uvicorn in the gateway's event loop. The gateway starts and stops it, and owns the signal handlers."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway_svc.http.errors import error_body, error_headers
from gateway_svc.http.json_text import encode
from svc_common.channels import bind_tcp
from svc_common.errors import InvalidRequestError, ServiceError, UnavailableError
from svc_common.serve import BindError

HEADER_TIMEOUT_S = 20.0  # from the first byte of a request, or from the connection, to the end of its header
STALL_TIMEOUT_S = 300.0  # for a client that reads nothing of its answer
# A client may send its whole body before it reads the answer, and loses the answer if the socket is closed before.
LINGER_S = 5.0
MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_LINES = 256
MAX_SMALL_CHUNKS = 1000  # more chunks of a body need MIN_CHUNK_BYTES on average
MIN_CHUNK_BYTES = 64
HEADER_END = re.compile(rb"\n\r?\n")
# The kernel probes an idle peer after 60 s, and closes the connection after 4 unanswered probes (100 s).
KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))


class _Connection(h11.Connection):
    """Refuses a header of many lines, a body of many small chunks, and a body with two lengths."""

    _num_chunks = _num_bytes = 0
    refusal = ""

    def next_event(self) -> Any:
        """h11's next event. Raises RemoteProtocolError."""
        if self.their_state is h11.IDLE:
            header = HEADER_END.split(self.trailing_data[0], 1)[0]
            if header.count(b"\n") > MAX_HEADER_LINES:
                self._refuse(f"the header has more than {MAX_HEADER_LINES} lines")
        event = super().next_event()
        if type(event) is h11.Data:
            self._count(event)
        elif type(event) is h11.Request:
            self._num_chunks = self._num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                self._refuse("the header has content-length and transfer-encoding; send one of them")
        return event

    def _count(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > MAX_SMALL_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
            self._refuse(f"the chunks of the body have less than {MIN_CHUNK_BYTES} bytes on average; send larger ones")

    def _refuse(self, words: str) -> NoReturn:
        self.refusal = words
        raise h11.RemoteProtocolError(words)


class _Lingering:
    """A transport that discards what the client still sends for a moment before it closes."""

    def __init__(self, transport: asyncio.Transport, protocol: HttpProtocol) -> None:
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._transport.is_closing() or self._protocol.conn.their_state is not h11.SEND_BODY:
            self._transport.close()
        elif not self._protocol.is_discarding:
            self._protocol.is_discarding = True
            self._protocol.flow.resume_reading()
            self._protocol.loop.call_later(LINGER_S, self._transport.close)


class HttpProtocol(H11Protocol):
    """One connection. Adds time limits and a connection limit to uvicorn's h11 protocol.

        accepted --header--> request --answer--> idle --header--> request ...
                 HEADER_TIMEOUT_S               keep-alive timeout, then HEADER_TIMEOUT_S from the first byte

    If a client stops reading an answer, its connection is closed after STALL_TIMEOUT_S. h11 takes microseconds for each
    line of a header and each chunk of a body, so their numbers have limits. After an answer to a request whose body was
    not read, the rest is discarded and not parsed.
    """

    max_connections = 0  # set by `limited`, as the next one
    opening: ClassVar[WeakSet[HttpProtocol]] = WeakSet()  # in a TLS handshake; uvloop drops those whose handshake fails
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    is_discarding = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opening.add(self)
        self.conn: _Connection = _Connection(h11.SERVER, MAX_HEADER_BYTES)

    @classmethod
    def limited(cls, max_connections: int) -> type[HttpProtocol]:
        """The protocol with this limit, for uvicorn, which creates one object per connection."""
        return type("LimitedHttpProtocol", (cls,), {"max_connections": max_connections, "opening": WeakSet()})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.opening.discard(self)
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        _detect_dead_peer(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                UnavailableError(
                    "this gateway has reached the limit of open HTTP connections "
                    f"(--http-max-connections {self.max_connections}); retry later"
                )
            )
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_discarding or self.transport.is_closing():
            return
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._start_header_timer()
        super().data_received(data)

    def eof_received(self) -> None:
        if self.is_discarding:
            self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in OpenAI's format."""
        if self.cycle is not None and not self.cycle.response_complete:  # the body of the current request is malformed
            self.cycle.disconnected = True  # its handler gets a disconnect and its answer is discarded
            self.cycle.message_event.set()
        words = self.conn.refusal or f"{msg.rstrip('.')}: the bytes are not HTTP/1.1, or the header is too large"
        self._refuse(InvalidRequestError(words))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: ServiceError) -> None:
        """Send an error outside of a request, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            self.transport.close()
            return
        body = encode(error_body(error))
        headers: list[Any] = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *error_headers(error).items(),
        ]
        for event in (
            h11.Response(status_code=error.http_status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _detect_dead_peer(transport: asyncio.Transport) -> None:
    """Let the kernel probe idle connections, so that a request ends when its client's machine or network fails."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_OPTIONS:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


MAX_CONNECTIONS = 8192
KEEP_ALIVE_S = 75.0  # longer than in most clients, so that the client closes an idle connection first
STOP_TIMEOUT_S = 2.0  # for unfinished answers; generations have been drained before


class HttpServer:
    """Serves an app at an address."""

    def __init__(
        self, app: ASGIApp, listen: str, *, max_connections: int = MAX_CONNECTIONS, tls: ssl.SSLContext | None = None
    ) -> None:
        self._listen = listen
        http = HttpProtocol.limited(max_connections)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=http,  # h11 limits the size of headers
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )
        if tls is not None:
            _limit_handshakes(tls, http, self._server.server_state.connections)
        self.address = ("", 0)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and accept connections. Returns the URL. Raises BindError."""
        bound = self._bind()
        self.address = self._listen.rpartition(":")[0], bound.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([bound]))
        await self._server.listening.wait()
        return f"{'https' if self._server.config.is_ssl else 'http'}://{self.address[0]}:{self.address[1]}"

    def _bind(self) -> socket.socket:
        try:
            return bind_tcp(self._listen)
        except OSError as error:
            raise BindError(f"cannot listen on {self._listen}: {error.strerror or error}") from None

    async def stop(self) -> None:
        """Close the port, wait for unfinished answers, and close all connections."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task


def _limit_handshakes(tls: ssl.SSLContext, http: type[HttpProtocol], connections: Collection[object]) -> None:
    """Close a connection at the start of its handshake if there are too many. uvicorn sees it only after that."""
    wrap = tls.wrap_bio

    def limited(*args: Any, **kwargs: Any) -> ssl.SSLObject:
        if len(http.opening) + len(connections) > http.max_connections:
            raise ssl.SSLError("too many open connections")
        return wrap(*args, **kwargs)

    tls.wrap_bio = limited  # type: ignore[method-assign]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Set `listening` as soon as connections are accepted."""
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signal handlers alone: they belong to the gateway."""
        yield
