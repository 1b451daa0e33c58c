"""An HTTP/1.1 client that can break the rules: it sends any bytes and reads the status of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping

READ_BYTES = 1 << 16


async def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> str:
    """The status of a GET."""
    return await exchange(address, request("GET", path, headers))


def request(method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    """A well-formed request that closes the connection."""
    fields = {"Host": "127.0.0.1", "Connection": "close", **(headers or {})}
    if body:
        fields["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def post_json(path: str, body: object, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST of a JSON value, or of bytes that need not be JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request("POST", path, {"Content-Type": "application/json", **(headers or {})}, data)


async def exchange(address: str, data: bytes, within_s: float = 10.0) -> str:
    """Send bytes on a new connection. Returns the status of the answer, or "closed" if there is none."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(within_s):
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return await _status(reader)
    except TimeoutError:
        return "timeout"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()


async def _status(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    words = line.split()
    if len(words) < 2:
        return "closed"
    while await reader.read(READ_BYTES):
        pass
    return words[1].decode("latin-1")
