"""The ports of a service for operators: metrics over HTTP, health for a kubelet. Both without TLS and off by default.

    --metrics-listen   GET /metrics, /startupz, /livez, /readyz
    --health-listen    grpc.health.v1: `startup`, `liveness` and `readiness` ("" is readiness)

`startup` fails until the service has loaded what it needs. `liveness` fails when only a restart can help. `readiness`
fails while the service should get no requests. All run on the service's event loop, so any answer shows that the loop
is running. None but `readiness` depends on another service: the loss of one service must not restart others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from svc_common.calls import MAX_PROBE_BYTES, ErrorInterceptor
from svc_common.channels import ConnectionLimits
from svc_common.config import OFF
from svc_common.errors import NotFoundError, UnimplementedError
from svc_common.serve import SERVER_OPTIONS, BindError

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 16_384
MAX_PAGES_PER_S = 20  # limit for pages of metrics
STATUS_TEXT = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
PLAIN = "text/plain; charset=utf-8"
# The encoder compares versions as numbers and raises TypeError for anything else.
BAD_VERSION = re.compile(r"\bversion=(?!\d{1,4}(\.\d{1,4})*\s*([;,]|$))")

Check = Callable[[], bool]


class ProbeServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Implements Check only, because a kubelet polls and does not watch."""

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._checks = checks

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        check = self._checks.get(request.service)
        if check is None:
            names = ", ".join(name for name in self._checks if name)
            raise NotFoundError(f"unknown service {request.service[:200]!r}; known services: {names}", field="service")
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if check() else response.NOT_SERVING)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> NoReturn:
        raise UnimplementedError("this port is for probes and has no Watch; call Check, or Watch on --listen")


class AdminServer:
    """Owns both ports. `start` binds the ports that are not off. Call `close` after everything else has stopped."""

    def __init__(
        self,
        *,
        metrics_listen: str,
        health_listen: str,
        registry: CollectorRegistry,
        is_alive: Check,
        is_ready: Check,
        is_started: Check = lambda: True,
    ) -> None:
        self.metrics_address = ""
        self.health_address = ""
        self._metrics_listen = metrics_listen
        self._health_listen = health_listen
        self._registry = registry
        self._is_alive = is_alive
        self._is_ready = is_ready
        self._is_started = is_started
        self._pages: dict[str, bytes] = {}  # the last ones, by content type, of which there are few
        self._pages_second = self._num_pages = 0
        self._http: asyncio.Server | None = None
        self._grpc: grpc.aio.Server | None = None

    def metrics_text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return choose_encoder("")[0](self._registry)

    async def start(self) -> None:
        """Bind and serve. Raises BindError."""
        if self._metrics_listen != OFF:
            self.metrics_address = await self._start_http(self._metrics_listen)
            log.info("metrics on http://%s/metrics", self.metrics_address)
        if self._health_listen != OFF:
            self.health_address = await self._start_grpc(self._health_listen)
            log.info("health for probes on %s", self.health_address)

    async def close(self) -> None:
        """Stop serving."""
        if self._http is not None:
            self._http.close()
        if self._grpc is not None:
            await self._grpc.stop(0)

    async def _start_http(self, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        try:
            self._http = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise BindError(f"--metrics-listen: cannot listen on {listen}: {error.strerror or error}") from None
        return f"{host}:{self._http.sockets[0].getsockname()[1]}"

    async def _start_grpc(self, listen: str) -> str:
        # A probe is small. Without the limit, any caller could send 64 MiB.
        options = dict(SERVER_OPTIONS) | ConnectionLimits().options()
        options["grpc.max_receive_message_length"] = MAX_PROBE_BYTES
        self._grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=list(options.items()))
        checks = {
            "": self._is_ready,
            "startup": self._is_started,
            "liveness": self._is_alive,
            "readiness": self._is_ready,
        }
        health_pb2_grpc.add_HealthServicer_to_server(ProbeServicer(checks), self._grpc)
        try:
            port = self._grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise BindError(f"--health-listen: cannot listen on {listen}: {error}") from None
        await self._grpc.start()
        return f"{listen.rpartition(':')[0]}:{port}"

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head.decode("latin-1")))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            log.debug("a connection to the metrics port ended before its request was complete")
        finally:
            writer.close()

    def _respond(self, head: str) -> bytes:
        request_line, *lines = head.split("\r\n")
        words = request_line.split(" ")
        if len(words) != 3:
            return _response(400, PLAIN, b"not an HTTP request\n")
        if words[0] not in ("GET", "HEAD"):
            return _response(405, PLAIN, b"only GET and HEAD are supported\n")
        status, content_type, body = self._answer(words[1].partition("?")[0], _accept(lines))
        return _response(status, content_type, body, with_body=words[0] == "GET")

    def _page(self, content_type: str, encode: Callable[[], bytes]) -> bytes:
        """The metrics; beyond MAX_PAGES_PER_S those of the last page. A page takes milliseconds of the event loop."""
        second = int(time.monotonic())
        if second != self._pages_second:
            self._pages_second, self._num_pages = second, 0
        self._num_pages += 1
        if self._num_pages <= MAX_PAGES_PER_S or content_type not in self._pages:
            self._pages[content_type] = encode()
        return self._pages[content_type]

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            encode, content_type = choose_encoder("" if BAD_VERSION.search(accept) else accept)
            return 200, content_type, self._page(content_type, lambda: encode(self._registry))
        checks = {"/startupz": self._is_started, "/livez": self._is_alive, "/readyz": self._is_ready}
        check = checks.get(path)
        if check is None:
            return 404, PLAIN, b"not found; use /metrics, /startupz, /livez or /readyz\n"
        return (200, PLAIN, b"ok\n") if check() else (503, PLAIN, b"not ok\n")


def _accept(lines: list[str]) -> str:
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")


def _response(status: int, content_type: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {STATUS_TEXT[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
