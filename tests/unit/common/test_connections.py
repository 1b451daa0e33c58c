"""Limits on connections, as a client without gRPC sees them."""

from __future__ import annotations

import asyncio
import resource
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common import channels
from svc_common.channels import MAX_METADATA_BYTES, ConnectionLimits
from svc_common.serve import GrpcServer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty SETTINGS
SETTINGS, HEADERS, RST_STREAM, MAX_CONCURRENT_STREAMS = 4, 1, 3, 3
ENHANCE_YOUR_CALM = 11

Serve = Callable[[ConnectionLimits], Awaitable[GrpcServer]]
Dial = Callable[[GrpcServer], Awaitable["RawConnection"]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[GrpcServer] = []

    async def start(limits: ConnectionLimits) -> GrpcServer:
        servers.append(GrpcServer(listen="127.0.0.1:0", service_names=["a.B"], connections=limits))
        await servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        await server.grpc.stop(None)


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    dialled: list[RawConnection] = []

    async def connect(server: GrpcServer) -> RawConnection:
        host, _, port = server.address.rpartition(":")
        dialled.append(RawConnection(*await asyncio.open_connection(host, int(port))))
        return dialled[-1]

    yield connect
    for connection in dialled:
        connection.writer.close()


class RawConnection:
    """An HTTP/2 connection without gRPC."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def frame(self) -> tuple[int, int, bytes]:
        """Type, stream and payload of the next frame. Raises IncompleteReadError at the end of the connection."""
        async with asyncio.timeout(30):
            header = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(header[:3]))
        return header[3], int.from_bytes(header[5:]) & 0x7FFFFFFF, payload

    async def is_accepted(self) -> bool:
        self.writer.write(PREFACE)
        try:
            return (await self.frame())[0] == SETTINGS
        except (OSError, asyncio.IncompleteReadError):
            return False


async def check(server: GrpcServer, *metadata: tuple[str, str]) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(service="a.B"), timeout=20, metadata=metadata)


async def test_connections_above_the_limit_are_closed(serve: Serve, dial: Dial) -> None:
    server = await serve(ConnectionLimits(max_connections=3))
    dialled = [await dial(server) for _ in range(5)]
    assert [await connection.is_accepted() for connection in dialled].count(True) == 3
    for connection in dialled:
        connection.writer.close()
    async with asyncio.timeout(30):
        while not await (await dial(server)).is_accepted():  # noqa: ASYNC110  (the server has no event to await)
            await asyncio.sleep(0.02)
    await check(server)


async def test_a_connection_that_sends_nothing_is_closed(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_TIMEOUT_S", 0.3)
    server = await serve(ConnectionLimits())
    silent = await dial(server)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await read_to_end(silent)
    await check(server)


async def test_an_idle_connection_is_closed(serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "IDLE_TIMEOUT_S", 0.3)
    server = await serve(ConnectionLimits())
    idle = await dial(server)
    assert await idle.is_accepted()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await read_to_end(idle)
    await check(server)


async def read_to_end(connection: RawConnection) -> None:
    while True:
        await connection.frame()


async def test_calls_above_the_limit_of_a_connection_are_refused(serve: Serve, dial: Dial) -> None:
    """gRPC clients wait; this one ignores the SETTINGS, as a flood of HEADERS and RST_STREAM does."""
    server = await serve(ConnectionLimits(max_streams=2))
    flood = await dial(server)
    flood.writer.write(PREFACE)
    kind, _, payload = await flood.frame()
    settings = dict(struct.iter_unpack(">HI", payload))
    assert (kind, settings[MAX_CONCURRENT_STREAMS]) == (SETTINGS, 2)
    for stream in (1, 3, 5, 7):
        flood.writer.write(frame(HEADERS, 4, stream, watch_headers()))
    refused: set[int] = set()
    while len(refused) < 2:
        kind, stream, payload = await flood.frame()
        if kind == RST_STREAM:
            assert int.from_bytes(payload) == ENHANCE_YOUR_CALM
            refused.add(stream)
    assert refused == {5, 7}
    await check(server)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def watch_headers() -> bytes:
    """HPACK of a call that stays open."""
    path, kind = b"/grpc.health.v1.Health/Watch", b"application/grpc"
    pseudo = b"\x83\x86\x04" + bytes([len(path)]) + path + b"\x01\x01a"  # POST, http, path, authority
    return pseudo + b"\x0f\x10" + bytes([len(kind)]) + kind + b"\x00\x02te\x08trailers"


async def test_headers_above_the_limit_are_refused(serve: Serve) -> None:
    server = await serve(ConnectionLimits())
    await check(server, ("authorization", "x" * (MAX_METADATA_BYTES // 2)))
    with pytest.raises(grpc.aio.AioRpcError, match="metadata size") as caught:
        await check(server, ("authorization", "x" * (2 * MAX_METADATA_BYTES)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_connections_leave_files_for_other_uses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for hard, expected in ((100, 75), (10_000, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, hard=hard: (64, hard))
        assert ConnectionLimits().options()["grpc.max_allowed_incoming_connections"] == expected
    assert [record.message[:43] for record in caplog.records] == ["at most 75 of 4096 connections are accepted"]


def test_a_service_may_open_as_many_files_as_the_hard_limit() -> None:
    code = "; ".join(
        (
            "import resource, svc_common.channels as c",
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))",
            "c.raise_file_limit()",
            "print(resource.getrlimit(resource.RLIMIT_NOFILE))",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "(128, 128)"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 128
