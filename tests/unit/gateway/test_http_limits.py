"""Limits of HTTP connections: slow headers, stalled readers, too many connections; bytes that are not HTTP; CORS."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import trustme
import uvloop

from gateway_svc.callers.authenticator import ApiKeys, Authenticator
from gateway_svc.http import server
from gateway_svc.http.app import HttpApp
from gateway_svc.http.server import HttpServer
from svc_common.calls import RpcStats
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, until
from tests.unit.gateway.test_http import COMPLETIONS, HttpGateway, ids_of

SHORT_S = 0.2
REQUEST = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.fixture
async def http(gateway: TestGateway) -> AsyncIterator[HttpGateway]:
    async with HttpGateway(gateway) as http:
        yield http


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def of(cls, http: HttpGateway) -> AsyncIterator[Peer]:
        reader, writer = await asyncio.open_connection(*http.server.address)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer, which must have a content-length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line.partition(":")[2]) for line in head.split("\r\n") if line.startswith("content-length"))
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def wait_closed(self) -> None:
        """Wait until the server closes the connection. It must send nothing before."""
        with suppress(ConnectionResetError):  # closed while bytes were in transit
            assert await asyncio.wait_for(self.reader.read(), 60) == b""

    async def trickle(self, data: bytes) -> None:
        """Send a byte every 20 ms until the server closes the connection, or all are sent."""
        for byte in data:
            if self.reader.at_eof() or self.reader.exception() is not None:
                return
            self.writer.write(bytes([byte]))
            await asyncio.sleep(0.02)


async def test_a_connection_without_a_request_is_closed(http: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", SHORT_S)
    async with Peer.of(http) as peer:
        await peer.wait_closed()


@pytest.mark.parametrize("is_second", [False, True])
async def test_a_header_that_arrives_byte_by_byte(
    http: HttpGateway, monkeypatch: pytest.MonkeyPatch, is_second: bool
) -> None:
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", SHORT_S)
    async with Peer.of(http) as peer:
        if is_second:
            peer.writer.write(REQUEST)
            assert (await peer.answer())[0] == 200
        sending = asyncio.create_task(peer.trickle(b"GET /version HTTP/1.1\r\nx-slow: " + b"a" * 10_000))
        await peer.wait_closed()
        await sending


async def test_the_header_limit_does_not_end_a_long_request(
    http: HttpGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", SHORT_S)
    call = asyncio.create_task(http.post(COMPLETIONS, {"prompt": "a"}))
    await until(lambda: len(scheduler.submits) == 1)
    await asyncio.sleep(2 * SHORT_S)
    scheduler.finish(scheduler.submits[0].handle, ids=ids_of("hi"))
    assert (await call)[0] == 200


async def test_a_client_that_stops_reading_is_closed(
    http: HttpGateway, scheduler: FakeScheduler, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STALL_TIMEOUT_S", SHORT_S)
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 200, "n": 8}).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, http.server.address)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(raw, head + body)
    await until(lambda: len(scheduler.submits) == 1)
    (connection,) = http.server._server.server_state.connections
    connection.transport.set_write_buffer_limits(high=1024)  # type: ignore[union-attr]
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # type: ignore[union-attr]
    handle, hi = scheduler.submits[0].handle, ids_of("hi")

    async def feed() -> None:
        for offset in range(0, 150 * len(hi), len(hi)):
            for sample in range(8):
                scheduler.send(handle, hi, offset=offset, sample=sample)
            await asyncio.sleep(0.001)

    feeding = asyncio.create_task(feed())
    await until(lambda: len(scheduler.cancels) == 1 and gateway.num_open == 0)
    feeding.cancel()
    raw.close()


async def test_connections_beyond_the_limit_get_503(gateway: TestGateway) -> None:
    async with HttpGateway(gateway, max_connections=1) as http:
        async with Peer.of(http) as first, Peer.of(http) as second:
            status, body = await second.answer()
            assert (status, json.loads(body)["error"]["type"]) == (503, "server_error")
            assert await second.reader.read() == b""
            first.writer.write(REQUEST)
            assert (await first.answer())[0] == 200
        await until(lambda: not http.server._server.server_state.connections)
        assert (await http.get("/version"))[0] == 200


def test_connections_whose_handshake_is_under_way_count() -> None:
    authority = trustme.CA()
    served, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(served)
    authority.configure_trust(trusted)

    async def connect() -> None:
        app = HttpApp([], authenticator=None, stats=RpcStats())
        server = HttpServer(app, "127.0.0.1:0", max_connections=2, tls=served)
        await server.start()
        half_open = [await asyncio.open_connection(*server.address) for _ in range(2)]
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*server.address, ssl=trusted)
        for _, writer in half_open:
            writer.close()
        await until(lambda: not server._server.config.http.opening)
        _, writer = await asyncio.open_connection(*server.address, ssl=trusted)
        writer.close()
        await server.stop()

    uvloop.run(connect())


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\r\n\r\n", b"GET /version HTTP/1.1\r\nx: " + b"a" * 70_000])
async def test_bytes_that_are_not_http(http: HttpGateway, data: bytes) -> None:
    async with Peer.of(http) as peer:
        peer.writer.write(data)
        status, body = await peer.answer()
    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")


async def test_methods_of_a_path(http: HttpGateway) -> None:
    async with http.session.options(COMPLETIONS) as reply:
        assert (reply.status, reply.headers["allow"]) == (204, "OPTIONS, POST")
    async with http.session.head("/v1/models") as reply:
        assert (reply.status, await reply.read()) == (200, b"")
        assert int(reply.headers["content-length"]) > 0
    status, headers, answer = await http.get(COMPLETIONS)
    assert (status, headers["allow"]) == (405, "OPTIONS, POST")
    assert answer["error"]["message"] == "/v1/completions does not accept GET; send one of OPTIONS, POST"
    async with http.session.options("/nothing") as reply:
        assert reply.status == 404


async def test_web_pages_of_an_allowed_origin(gateway: TestGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(ids_of("hi"))
    page, other = {"origin": "https://chat.example.com"}, {"origin": "https://example.com"}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with HttpGateway(gateway, origins=["https://chat.example.com"]) as http:
        async with http.session.options(COMPLETIONS, headers={**page, **preflight}) as reply:
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, page["origin"])
            assert reply.headers["access-control-allow-headers"] == "authorization"
        async with http.session.options(COMPLETIONS, headers={**other, **preflight}) as reply:
            assert (reply.status, "access-control-allow-origin" in reply.headers) == (400, False)
        _, headers, _ = await http.post(COMPLETIONS, {"prompt": "a"}, headers=page)
        assert headers["access-control-allow-origin"] == page["origin"]
        assert "x-request-id" in headers["access-control-expose-headers"]
        _, headers, _ = await http.post(COMPLETIONS, {"prompt": ""}, headers=page)
        assert headers["access-control-allow-origin"] == page["origin"]  # the page can read the error
    async with HttpGateway(gateway) as http:
        assert "access-control-allow-origin" not in (await http.get("/version", headers=page))[1]


async def test_a_request_without_an_answer_in_time(
    http: HttpGateway, scheduler: FakeScheduler, gateway: TestGateway
) -> None:
    scheduler.on_submit = lambda submit: scheduler.send(submit.handle, ids_of("hi"))
    status, headers, answer = await http.post(COMPLETIONS, {"prompt": "a", "timeout": SHORT_S})
    assert (status, headers["x-should-retry"]) == (408, "false")
    assert (answer["error"]["type"], answer["error"]["code"]) == ("timeout_error", "deadline_exceeded")
    first, error = await http.stream(COMPLETIONS, {"prompt": "a", "timeout": SHORT_S})
    assert (first["choices"][0]["text"], error["error"]["code"]) == ("hi", "deadline_exceeded")
    await until(lambda: len(scheduler.cancels) == 2 and gateway.num_open == 0)
    assert 0 < scheduler.submits[0].deadline_ms < 1000


async def test_an_answer_in_time(http: HttpGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(ids_of("hi"))
    status, _, answer = await http.post(COMPLETIONS, {"prompt": ["a", "b"], "timeout": 60})
    assert (status, [choice["text"] for choice in answer["choices"]]) == (200, ["hi", "hi"])


async def test_503_names_a_delay(http: HttpGateway) -> None:
    http.is_serving = False
    _, headers, _ = await http.get("/health")
    assert (headers["retry-after-ms"], headers["retry-after"]) == ("1000", "1")


async def test_a_client_that_resets_its_connection(http: HttpGateway, scheduler: FakeScheduler) -> None:
    with pytest.raises((aiohttp.ClientError, asyncio.TimeoutError)):
        await http.post(COMPLETIONS, {"prompt": "a"}, timeout=aiohttp.ClientTimeout(total=0.3))
    await until(lambda: len(scheduler.cancels) == 1)


POST = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\n".encode()
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET /version HTTP/1.1\r\nhost: a\r\n" + b"a:b\n" * 10_000 + b"\r\n", "more than 256 lines"),
        (CHUNKED + b"1\r\n \r\n" * 40_000 + b"0\r\n\r\n", "less than 64 bytes on average"),
        (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "content-length and"),
    ],
)
async def test_what_costs_much_per_byte_is_refused(http: HttpGateway, data: bytes, words: str) -> None:
    num_events = 0

    def count(connection: server._Connection) -> object:
        nonlocal num_events
        num_events += 1
        return next_event(connection)

    next_event = server._Connection.next_event
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server._Connection, "next_event", count)
        async with Peer.of(http) as peer:
            peer.writer.write(data)
            status, body = await peer.answer()
            assert (status, words in json.loads(body)["error"]["message"]) == (400, True), body
            await peer.wait_closed()
    assert num_events < 1100


async def test_chunks_of_a_usual_size_are_a_body(http: HttpGateway, scheduler: FakeScheduler) -> None:
    scheduler.play(ids_of("hi"))
    body = json.dumps({"prompt": "a", "user": "u" * 100_000}).encode()
    parts = [body[at : at + 70] for at in range(0, len(body), 70)]
    async with Peer.of(http) as peer:
        peer.writer.write(CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
        assert (await peer.answer())[0] == 200


@pytest.mark.parametrize("length", [b"transfer-encoding: chunked\r\n\r\n", b"content-length: 999999999\r\n\r\n"])
async def test_the_body_of_a_refused_request_is_discarded_and_the_connection_closed(
    gateway: TestGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: bytes
) -> None:
    monkeypatch.setattr(server, "LINGER_S", 10 * SHORT_S)
    (tmp_path / "me").write_text("secret")
    async with HttpGateway(gateway, Authenticator(ApiKeys(tmp_path))) as http, Peer.of(http) as peer:
        peer.writer.write(POST + length + b"1\r\na\r\n")
        head = (await peer.reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 401 " in head and b"connection: close" in head  # noqa: PT018
        (connection,) = http.server._server.server_state.connections
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server._Connection, "receive_data", None)  # the rest is not parsed
            for _ in range(50):
                peer.writer.write(b"1\r\na\r\n" * 10_000)
                await peer.writer.drain()
        assert connection in http.server._server.server_state.connections
        assert b"authentication_error" in await peer.reader.read()
    await until(lambda: not http.server._server.server_state.connections)
