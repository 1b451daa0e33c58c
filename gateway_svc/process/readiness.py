"""Whether a gateway with several processes is ready: all processes that accept connections are.

    each child    its own state: at every change, and every REPEAT_S            -> parent
    the parent    whether all processes are ready: in answer, and at a change   -> each child

Both write to a socket pair, which is the standard input of the child. A state is one byte; the last one counts. A
process that has sent nothing for SILENT_S (it hangs) is not ready. One that has ended gets no connections, so it does
not count until its successor listens.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from svc_common.tasks import cancel

READY, UNREADY = b"1", b"0"
MAX_READ_BYTES = 4096
REPEAT_S = 1.0
SILENT_S = 5.0


class ReadyProcesses:
    """Of the parent: which of its processes are ready. `follow` runs once for each start of a process."""

    def __init__(self, num_processes: int) -> None:
        self._are_ready: list[bool | None] = [False] * num_processes  # None: it has ended
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def follow(self, index: int, link: socket.socket) -> None:
        """Follow one process until its end of the link is closed, or until this is cancelled."""
        reader, writer = await asyncio.open_unix_connection(sock=link)
        self._writers[index] = writer
        try:
            while state := await _next_state(reader):
                self._set(index, is_ready=state == READY)
                writer.write(self._state)
        finally:
            del self._writers[index]
            self._set(index, is_ready=None)
            await _close(writer)

    @property
    def _state(self) -> bytes:
        return UNREADY if False in self._are_ready else READY

    def _set(self, index: int, *, is_ready: bool | None) -> None:
        before = self._state
        self._are_ready[index] = is_ready
        if self._state == before:
            return
        for writer in self._writers.values():
            writer.write(self._state)


async def _next_state(reader: asyncio.StreamReader) -> bytes:
    """The newest state of a process; empty when it has closed the link."""
    try:
        async with asyncio.timeout(SILENT_S):
            return (await reader.read(MAX_READ_BYTES))[-1:]
    except TimeoutError:
        return UNREADY
    except ConnectionError:
        return b""


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()  # `close` would wait until a hanging process reads
    with suppress(ConnectionError):
        await writer.wait_closed()


class ReadyLink:
    """Of a child: reports its own state to the parent, and knows whether all processes are ready.

    `on_change` is called when `all_ready` changes. Without a `link` the gateway has one process; `all_ready` is true.
    """

    def __init__(self, link: socket.socket | None, on_change: Callable[[], None]) -> None:
        self.all_ready = link is None
        self._link = link
        self._on_change = on_change
        self._is_ready = False
        self._changed = asyncio.Event()

    def report(self, *, is_ready: bool) -> None:
        """Report whether this process can take requests."""
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self._changed.set()

    async def run(self) -> None:
        """Exchange states until the parent closes the link. Returns at once without a link."""
        if self._link is None:
            return
        reader, writer = await asyncio.open_unix_connection(sock=self._link)
        reports = asyncio.create_task(self._write(writer))
        try:
            with suppress(ConnectionError):
                while states := await reader.read(MAX_READ_BYTES):
                    self._set(all_ready=states[-1:] == READY)
        finally:
            self._set(all_ready=False)
            await cancel(reports)
            await _close(writer)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._changed.clear()
            writer.write(READY if self._is_ready else UNREADY)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_S):
                    await self._changed.wait()

    def _set(self, *, all_ready: bool) -> None:
        if all_ready != self.all_ready:
            self.all_ready = all_ready
            self._on_change()


def link_to_parent() -> socket.socket:
    """The link, which is the standard input of this process. The programs that it starts do not inherit it."""
    link = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return link
