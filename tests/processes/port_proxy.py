"""A TCP proxy for tests, with TLS if it is given a context."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from ssl import SSLContext

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PIPE_BYTES = 1 << 16


class PortProxy:
    """Accepts connections and forwards each to a connection that `dial` opens."""

    def __init__(self, dial: Callable[[], Awaitable[Streams]]) -> None:
        self._dial = dial
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, ip: str, port: int, ssl: SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._accept, ip, port, ssl=ssl)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._connect(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await self._dial()
        except OSError:
            writer.transport.abort()  # no endpoint: the client sees a broken connection
            return
        pipes = [asyncio.ensure_future(_pipe(reader, back)), asyncio.ensure_future(_pipe(there, writer))]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe, end in zip(pipes, (writer, back), strict=True):
                pipe.cancel()
                end.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIPE_BYTES):
            writer.write(data)
            await writer.drain()
