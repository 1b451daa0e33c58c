"""One HTTP connection. Adds time limits and a connection limit to uvicorn's h11 protocol.

    accepted --header--> request --answer--> idle --header--> request ...
             HEADER_TIMEOUT_S               keep-alive timeout, then HEADER_TIMEOUT_S from the first byte

If a client stops reading an answer, its connection is closed after STALL_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway_svc.http.errors import error_body, error_headers
from gateway_svc.http.json_text import encode
from svc_common.errors import InvalidRequestError, QuireError, UnavailableError

HEADER_TIMEOUT_S = 20.0  # from the first byte of a request, or from the connection, to the end of its header
STALL_TIMEOUT_S = 300.0  # for a client that reads nothing of its answer
# The kernel probes an idle peer after 60 s, and closes the connection after 4 unanswered probes (100 s).
KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))


class HttpProtocol(H11Protocol):
    """Closes connections that are too slow, and refuses connections beyond `max_connections`."""

    max_connections = 0  # set by `limited`
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    @classmethod
    def limited(cls, max_connections: int) -> type[HttpProtocol]:
        """The protocol with this limit, for uvicorn, which creates one object per connection."""
        return type("LimitedHttpProtocol", (cls,), {"max_connections": max_connections})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        if self.transport.is_closing():
            return
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._start_header_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in OpenAI's format."""
        if self.cycle is not None and not self.cycle.response_complete:  # the body of the current request is malformed
            self.cycle.disconnected = True  # its handler gets a disconnect and its answer is discarded
            self.cycle.message_event.set()
        self._refuse(InvalidRequestError(f"{msg.rstrip('.')}: the bytes are not HTTP/1.1, or the header is too large"))

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

    def _refuse(self, error: QuireError) -> None:
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
