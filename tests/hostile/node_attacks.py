"""Attacks on `--node-listen`, where the other hosts of a GPU worker connect to its leader.

Each attack is a coroutine with a port and a size (`attacks.Size`). It returns what it found; `Watch` finds what is left
behind. Only the last one has the token of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import pickle
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from tests.hostile.attacks import Size, open_connections
from tests.hostile.target import Port
from worker_svc.node_links.frames import LENGTH, MAX_MESSAGE, MAX_TEXT
from worker_svc.node_links.identity import MAGIC, NONCE_BYTES

GREETING = len(MAGIC) + NONCE_BYTES
PROBE_S = 15.0  # handshakes that say nothing end after 10 s

Attack = Callable[[Port, Size], Coroutine[Any, Any, list[str]]]


@dataclass(frozen=True, slots=True)
class Stream:
    """A connection to the leader, and what it sent first."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    nonce: bytes

    async def read(self, size: int, within_s: float = PROBE_S) -> bytes:
        """The next `size` bytes; empty if the leader closes the connection, as for a refusal, or does not send them."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(within_s):
                return await self.reader.readexactly(size)
        return b""


@contextlib.asynccontextmanager
async def greeted(port: Port) -> AsyncIterator[Stream]:
    """A connection on which the leader has sent its greeting. Raises OSError, also if it sends none."""
    host, _, number = port.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    try:
        yield Stream(reader, writer, (await _greeting(reader))[len(MAGIC) :])
    finally:
        writer.close()


async def _greeting(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(PROBE_S):
            return await reader.readexactly(GREETING)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the leader closed the connection before its greeting") from None


def proof(token: str, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), b"".join((side, *nonces)), hashlib.sha256)


def frame(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


async def prove(stream: Stream, token: str) -> bytes:
    """Answer the greeting as a node with this token. Returns the leader's proof; empty: it refused."""
    answer = secrets.token_bytes(NONCE_BYTES)
    stream.writer.write(MAGIC + answer + proof(token, b"node", stream.nonce, answer))
    return await stream.read(NONCE_BYTES)


async def probe(port: Port) -> str:
    """The leader's answer to a second process that claims the place of node 1. Raises OSError."""
    async with asyncio.timeout(PROBE_S):
        while True:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # all handshakes are taken: retry
                return await _claim(port)
            await asyncio.sleep(0.1)


async def _claim(port: Port) -> str:
    async with greeted(port) as stream:
        if not await prove(stream, port.credentials[""]):
            raise ConnectionError("the leader refused the token of workers")
        claim = {"node_rank": 1, "session": "another", "purpose": "steps"}
        stream.writer.write(frame(json.dumps(claim).encode()))
        (length,) = LENGTH.unpack(await stream.reader.readexactly(LENGTH.size))
        return str(json.loads(await stream.reader.readexactly(length)).get("refused"))


# -- strangers -------------------------------------------------------------------------------------------------------


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (99,)


async def garbage(port: Port, size: Size) -> list[str]:
    """Other protocols, noise, a pickle, and frames that begin well."""
    rng = random.Random(port.name)
    contents = [
        b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
        pickle.dumps(Bomb()), frame(pickle.dumps(Bomb())), MAGIC, MAGIC + bytes(2 * NONCE_BYTES),
        MAGIC[:-1] + b"\0" + bytes(2 * NONCE_BYTES), b"\xff" * size.bomb_bytes,
        *(rng.randbytes(rng.randrange(1, 3000)) for _ in range(30)),
    ]  # fmt: skip

    async def send(content: bytes) -> None:
        with contextlib.suppress(OSError):
            async with greeted(port) as stream:
                stream.writer.write(content)
                await stream.writer.drain()

    await asyncio.gather(*map(send, contents))
    return []


async def wrong_tokens(port: Port, size: Size) -> list[str]:
    """Nodes with another token, with none, and with a proof of the other side."""
    right = port.credentials[""]
    found = []
    for token in ("", "another-token-0123456789", right[:-1], right + "\n"):
        async with greeted(port) as stream:
            if await prove(stream, token):
                found.append(f"the token {token!r} was accepted")
    async with greeted(port) as stream:
        answer = bytes(NONCE_BYTES)
        stream.writer.write(MAGIC + answer + proof(right, b"leader", answer, stream.nonce))
        if await stream.read(NONCE_BYTES):
            found.append("the proof of a leader was accepted from a node")
    return found


async def replays(port: Port, size: Size) -> list[str]:
    """Bytes that a node sent on an earlier connection, recorded by an attacker; and the leader's own bytes."""
    async with greeted(port) as stream:
        answer = secrets.token_bytes(NONCE_BYTES)
        recorded = MAGIC + answer + proof(port.credentials[""], b"node", stream.nonce, answer)
        stream.writer.write(recorded)
        answered = await stream.read(NONCE_BYTES)
    found = [] if answered else ["the node whose bytes are recorded was refused"]
    for _ in range(8):
        async with greeted(port) as stream:
            stream.writer.write(recorded)
            if await stream.read(NONCE_BYTES):
                found.append("recorded bytes of a node were accepted")
        async with greeted(port) as stream:
            stream.writer.write(MAGIC + stream.nonce + answered)
            if await stream.read(NONCE_BYTES):
                found.append("the leader accepted its own bytes")
    return found[:4]


async def slow_bytes(port: Port, size: Size) -> list[str]:
    """Handshakes that take one byte at a time, or say nothing."""
    loop = asyncio.get_running_loop()
    until = loop.time() + size.slow_s

    async def trickle() -> None:
        with contextlib.suppress(OSError):
            async with greeted(port) as stream:
                for byte in MAGIC + bytes(2 * NONCE_BYTES - 1):
                    if loop.time() > until:
                        return
                    stream.writer.write(bytes([byte]))
                    await stream.writer.drain()
                    await asyncio.sleep(0.1)

    await asyncio.gather(*(trickle() for _ in range(40)))
    return []


async def many_connections(port: Port, size: Size) -> list[str]:
    """More connections than may shake hands, open at once; then as many that close at once."""

    async def stay(writer: asyncio.StreamWriter) -> None:
        writer.write(MAGIC[: random.randrange(len(MAGIC))])

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    uses: tuple[Callable[[asyncio.StreamWriter], Awaitable[None]], ...] = (stay, close)
    for use in uses:
        await open_connections(port, size.connections, use)
    return []


# -- a process with the token ----------------------------------------------------------------------------------------


def bad_first_frames(size: Size) -> Iterator[bytes]:
    """Frames that are too long, shorter than they say, no JSON, or the wrong JSON."""
    for length in (MAX_TEXT + 1, MAX_MESSAGE + 1, 2**32 - 1):
        yield LENGTH.pack(length)
        yield LENGTH.pack(length) + b"x" * size.bomb_bytes
    yield LENGTH.pack(MAX_TEXT) + b"{"
    for content in (b"", b"null", b"\xff\xfe", b"[" * MAX_TEXT, b'{"a":' * (MAX_TEXT // 5), pickle.dumps(Bomb())):
        yield frame(content)
    hello: dict[str, Any] = {"node_rank": 1, "session": "s", "purpose": "steps"}
    values: list[Any] = [None, True, -1, 1e308, 2**70, "", "\ud800", [], {}, [[1]] * 100, "x" * 1000]
    for name in ("node_rank", "session", "purpose", "facts"):
        for value in values:
            yield frame(json.dumps(hello | {name: value}).encode())


async def bad_frames(port: Port, size: Size) -> list[str]:
    """First frames of a process with the token of workers that is no node of this worker."""

    async def send(content: bytes) -> None:
        with contextlib.suppress(OSError):
            async with greeted(port) as stream:
                if await prove(stream, port.credentials[""]):
                    stream.writer.write(content)
                    await stream.writer.drain()
                    await stream.read(1, within_s=0.2)

    room = asyncio.Semaphore(16)  # half of the handshakes that may be open

    async def send_in_turn(content: bytes) -> None:
        async with room:
            await send(content)

    await asyncio.gather(*map(send_in_turn, bad_first_frames(size)))
    return []


NODE_ATTACKS: tuple[Attack, ...] = (garbage, wrong_tokens, replays, slow_bytes, many_connections, bad_frames)
