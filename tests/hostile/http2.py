"""An HTTP/2 client that can break the rules: it sends any bytes, and counts how the server ends its calls.

    async with await Http2.open(address) as http2:
        outcome = await http2.call("/package.Service/Method", frame_message(data), metadata)
        http2.send(frame(RST_STREAM, 0, stream_id, bytes(4)))

A call ends with a gRPC status, with a reset of its stream, or with the end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, ACK = 0x1, 0x4, 0x8, 0x1
HEADER_TABLE_SIZE, MAX_FRAME_SIZE, INITIAL_WINDOW_SIZE = 1, 5, 4
FRAME_HEADER = 9
LARGEST_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65_535
MAX_FRAME = 16_384
CODES = {code.value[0]: code.name for code in grpc.StatusCode}

Metadata = Sequence[tuple[str, str]]


class ConnectionEndedError(ConnectionError):
    """The server closed the connection."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: the name of a gRPC status, `RST_STREAM n`, or `cancelled` by this client."""

    code: str
    details: str = ""
    num_messages: int = 0


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"", length: int | None = None) -> bytes:
    """One frame. `length` differs from the payload's length in a malformed frame."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def settings(**values: int) -> bytes:
    """The payload of SETTINGS, from names of this module in lower case."""
    numbers = {"initial_window_size": INITIAL_WINDOW_SIZE, "header_table_size": HEADER_TABLE_SIZE}
    return b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items())


def frame_message(data: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A gRPC message with its prefix. `length` differs from that of the data in a malformed message."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def literal(name: str, value: str | bytes) -> bytes:
    """A header as HPACK literal that is neither indexed nor compressed."""
    raw = value.encode() if isinstance(value, str) else value
    return b"\x00" + _hpack_string(name.encode()) + _hpack_string(raw)


def _hpack_string(raw: bytes) -> bytes:
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    rest, out = len(raw) - 127, bytearray(b"\x7f")
    while rest >= 128:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes(out) + bytes([rest]) + raw


def grpc_headers(path: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """The header block of a call."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "127.0.0.1"),
        ("te", "trailers"), ("content-type", "application/grpc"), *metadata,
    ]  # fmt: skip
    return b"".join(literal(name, value) for name, value in fields)


class _Call:
    """A call that has not ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.window = DEFAULT_WINDOW
        self.num_messages = 0
        self.headers: dict[str, str] = {}

    def end(self, code: str, details: str = "") -> None:
        if not self.ended.done():
            self.ended.set_result(Outcome(code, details, self.num_messages))


class Http2:
    """One connection. `reads` is False for a client that never reads what the server sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._window = DEFAULT_WINDOW
        self._stream_window = DEFAULT_WINDOW  # window of new streams
        self._moved = asyncio.Event()  # a window has grown, or the connection has ended
        self._decoder = hpack.Decoder(max_header_list_size=1 << 20)
        self._pong = asyncio.Event()  # a PING was answered, or the connection has ended
        self._block = bytearray()
        self._reading: asyncio.Task[None] | None = None
        self.error_code: int | None = None  # code of GOAWAY
        self.is_closed = False

    @classmethod
    async def open(cls, address: str, *, window: int = LARGEST_WINDOW, reads: bool = True) -> Http2:
        """Connect and send the preface. `window`: bytes that the server may send before it waits."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        http2 = cls(reader, writer)
        http2.send(PREFACE + frame(SETTINGS, payload=settings(initial_window_size=window)))
        if window > DEFAULT_WINDOW:
            http2.send(frame(WINDOW_UPDATE, payload=struct.pack(">I", window - DEFAULT_WINDOW)))
        if reads:
            http2._reading = asyncio.create_task(http2._read())
        return http2

    async def __aenter__(self) -> Http2:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)  # raises if this task is cancelled
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send any bytes."""
        if not (self.is_closed or self._writer.is_closing()):
            self._writer.write(data)

    async def drain(self) -> None:
        """Wait until the kernel has taken most of the bytes. Raises ConnectionEndedError."""
        try:
            await self._writer.drain()
        except OSError:
            self._end()
        if self.is_closed:
            raise ConnectionEndedError(f"the server closed the connection (GOAWAY {self.error_code})")

    async def ping(self, within_s: float = 10.0) -> bool:
        """Whether the server has answered a PING, and so has read everything that was sent before it."""
        self._pong.clear()
        self.send(frame(PING, payload=b"finished"))
        with contextlib.suppress(ConnectionEndedError, TimeoutError):
            async with asyncio.timeout(within_s):
                await self.drain()
                await self._pong.wait()
        return self._pong.is_set() and not self.is_closed

    def begin(self, path: str, metadata: Metadata = (), *, flags: int = END_HEADERS) -> int:
        """Send the headers of a call. Returns its stream id."""
        stream_id, self._next_stream = self._next_stream, self._next_stream + 2
        call = _Call()
        call.window = self._stream_window
        self._calls[stream_id] = call
        self.send(frame(HEADERS, flags, stream_id, grpc_headers(path, metadata)))
        return stream_id

    async def write(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Send data within the windows of the server. Raises ConnectionEndedError."""
        call = self._calls.get(stream_id)
        position = 0
        while call is not None and not call.ended.done() and (position < len(data) or end):
            room = min(self._window, call.window, MAX_FRAME)
            part = data[position : position + room]
            if not part and position < len(data):
                await self._wait_moved()
                continue
            position += len(part)
            self._window -= len(part)
            call.window -= len(part)
            is_last = position == len(data)
            self.send(frame(DATA, END_STREAM if end and is_last else 0, stream_id, part))
            if is_last:
                break
        await self.drain()

    async def _wait_moved(self) -> None:
        self._moved.clear()
        async with asyncio.timeout(30.0):
            await self._moved.wait()
        if self.is_closed:
            raise ConnectionEndedError("the server closed the connection")

    def reset(self, stream_id: int) -> None:
        """Cancel a call."""
        self.send(frame(RST_STREAM, 0, stream_id, struct.pack(">I", 8)))
        self._end_call(stream_id, "cancelled")

    async def call(self, path: str, body: bytes, metadata: Metadata = (), *, within_s: float = 30.0) -> Outcome:
        """One call with these bytes as its only data. It is cancelled after `within_s`."""
        stream_id = self.begin(path, metadata)
        call = self._calls[stream_id]
        try:
            async with asyncio.timeout(within_s):
                await self.write(stream_id, body, end=True)
                return await asyncio.shield(call.ended)
        except TimeoutError:
            self.reset(stream_id)
        except ConnectionEndedError as error:
            call.end("connection closed", str(error))
        return await call.ended

    def outcome(self, stream_id: int) -> asyncio.Future[Outcome]:
        """The end of a call that was begun and has not ended."""
        return self._calls[stream_id].ended

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(FRAME_HEADER)
                kind, flags, stream_id = struct.unpack(">BBI", head[3:])
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(kind, flags, stream_id, payload)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self.is_closed = True
        self._moved.set()
        self._pong.set()
        for call in self._calls.values():
            call.end("connection closed", f"GOAWAY {self.error_code}")
        self._calls.clear()

    def _end_call(self, stream_id: int, code: str, details: str = "") -> None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.end(code, details)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._apply_settings(payload)
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == PING and payload == b"finished":
            self._pong.set()
        elif kind == WINDOW_UPDATE:
            self._grow(stream_id, struct.unpack(">I", payload)[0])
        elif kind in (HEADERS, CONTINUATION):
            self._take_headers(flags, stream_id, payload)
        elif kind == DATA and stream_id in self._calls:
            self._calls[stream_id].num_messages += 1
        elif kind == RST_STREAM:
            self._end_call(stream_id, f"RST_STREAM {struct.unpack('>I', payload)[0]}")
        elif kind == GOAWAY:
            self.error_code = struct.unpack(">I", payload[4:8])[0]

    def _apply_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self.send(frame(SETTINGS, ACK))
        self._moved.set()

    def _grow(self, stream_id: int, size: int) -> None:
        if stream_id == 0:
            self._window += size
        elif stream_id in self._calls:
            self._calls[stream_id].window += size
        self._moved.set()

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._block += payload
        if not flags & END_HEADERS:
            return
        fields = {str(name): str(value) for name, value in self._decoder.decode(bytes(self._block))}
        self._block.clear()
        if (call := self._calls.get(stream_id)) is None:
            return
        call.headers |= fields
        if flags & END_STREAM:
            code = call.headers.get("grpc-status")
            name = f"HTTP {call.headers.get(':status')}" if code is None else CODES.get(int(code), code)
            self._end_call(stream_id, name, call.headers.get("grpc-message", ""))
