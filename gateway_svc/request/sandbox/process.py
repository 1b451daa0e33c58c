"""The gateway's side of one sandbox process."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any, cast

from gateway_svc.request.sandbox.child import LENGTH

SET_DUMPABLE = 4  # an option of prctl(2)
SETUP_TIMEOUT_S = 120.0
MAX_SETUPS = 8  # a process that has more is replaced
# The environment may contain passwords, so a sandbox process gets only what Python needs.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class SandboxEndedError(Exception):
    """The process ended, or was killed, before it answered; `returncode` is negative for a signal."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"the process ended with status {returncode}")
        self.returncode = returncode

    @property
    def is_killed(self) -> bool:
        """Whether another process killed it, such as the kernel when the machine is out of memory."""
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def is_out_of_cpu_time(self) -> bool:
        """Whether it exceeded its limit on CPU time (child.limit_cpu)."""
        return self.returncode == -signal.SIGPROF


class OversizedAnswerError(Exception):
    """The answer is larger than allowed; the process was killed."""


class SandboxProcess:
    """One process that answers one message at a time (child.py). The first message starts it.

    If it does not answer, it is killed, and the next message starts a new process.
    """

    def __init__(self, module: str, max_answer_bytes: int) -> None:
        self._module = module
        self._max_answer_bytes = max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._connection: _Replies | None = None
        self._setups: set[str] = set()

    @property
    def pid(self) -> int | None:
        """Process id; None while the process does not run."""
        return None if self._process is None else self._process.pid

    def has_setup(self, key: str) -> bool:
        """Whether the process has this setup, e.g. a model's tokenizer."""
        return key in self._setups

    async def set_up(self, key: str, frame: bytes) -> str:
        """Send a setup message. Returns the error or "". Raises the errors of `ask`."""
        if len(self._setups) >= MAX_SETUPS:
            self.kill()
        answer: dict[str, Any] = json.loads(await self.ask(frame, SETUP_TIMEOUT_S))
        if not answer["error"]:
            self._setups.add(key)
        return str(answer["error"])

    async def ask(self, frame: bytes, timeout_s: float) -> bytes:
        """Send one message and return its answer, which is JSON.

        Raises SandboxEndedError, OversizedAnswerError or TimeoutError; the process has ended then.
        """
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect()
                answer = await connection.ask(frame)
            is_answered = True
            return answer
        except ConnectionError:
            raise SandboxEndedError(await self._returncode()) from None
        finally:
            if not is_answered:
                self.kill()

    def start(self) -> None:
        """Start the process, if it does not run."""
        if self._process is not None:
            return
        _hide_memory()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            )

    def kill(self) -> None:
        """End the process, if it runs."""
        process, self._process, self._setups = self._process, None, set()
        if self._connection is not None:
            self._connection.close()
        elif self._socket is not None:
            self._socket.close()
        self._connection = self._socket = None
        if process is not None and process.poll() is None:
            process.kill()
            # A process with much memory takes some time to end. A thread waits, so that none stays behind as a zombie.
            asyncio.get_running_loop().run_in_executor(None, process.wait)

    async def _connect(self) -> _Replies:
        self.start()
        if self._connection is None:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                lambda: _Replies(self._max_answer_bytes), sock=self._socket
            )
        return self._connection

    async def _returncode(self) -> int:
        process = self._process
        if process is None:
            return -signal.SIGKILL
        process.kill()  # in case it only closed its socket; a process that has ended keeps its status
        return await asyncio.to_thread(process.wait)


def _hide_memory() -> None:
    """Let no process of this user read the memory and environment of this one: they have prompts and passwords."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 0)


class _Replies(asyncio.Protocol):
    """The connection to one process: at most one message is unanswered."""

    def __init__(self, max_answer_bytes: int) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, frame: bytes) -> bytes:
        """Raises ConnectionError or OversizedAnswerError."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(frame)
        return await self._answer

    def close(self) -> None:
        """Close the connection, and discard what was not sent."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < LENGTH.size:
            return
        size = LENGTH.unpack_from(self._received)[0]
        if size > self._max_answer_bytes or len(self._received) > LENGTH.size + size:
            self._end(OversizedAnswerError())
        elif len(self._received) == LENGTH.size + size:
            answer = bytes(memoryview(self._received)[LENGTH.size :])
            self._received = bytearray()
            self._end(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionResetError())

    def _end(self, result: bytes | Exception) -> None:
        """Settle the message that is unanswered. Without one, the process sent bytes that were not asked for."""
        waiting, self._answer = self._answer, None
        if waiting is None or waiting.done():
            self.close()
        elif isinstance(result, Exception):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)
