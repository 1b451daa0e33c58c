"""uvicorn in the gateway's event loop. The gateway starts and stops it, and owns the signal handlers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway_svc.http.protocol import HttpProtocol
from svc_common.channels import bind_tcp
from svc_common.serve import BindError

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
