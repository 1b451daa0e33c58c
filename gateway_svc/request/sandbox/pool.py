"""The gateway's side of sandbox processes. Several of one kind are a pool; each serves one caller at a time."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

from gateway_svc.callers.caller import current_caller
from gateway_svc.request.sandbox.child import LENGTH
from svc_common.errors import InvalidRequestError, OverloadedError
from svc_common.tasks import cancel

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


log = logging.getLogger(__name__)
T = TypeVar("T")

MakeProcess = Callable[[], SandboxProcess]
RETRY_S = 1.0


class NoFreeProcessError(Exception):
    """All processes stayed busy."""


class SlowAnswerError(OverloadedError):
    """A process was killed because it did not answer in time."""


class ModelSetup(NamedTuple):
    """The message that a process needs before those of a model."""

    key: str
    frame: Callable[[], bytes]
    failed: str  # words of the error if it fails


@dataclass(frozen=True, slots=True)
class Job:
    """Work of sandbox processes of one kind: their module, their limits and the words of their errors."""

    module: str  # in this folder
    what: str
    advice: str  # for the caller of a message that exceeds a limit
    cpu_s: float
    timeout_s: float  # longer than cpu_s, because the machine may be busy
    wait_s: float  # for a free process
    max_answer_bytes: int

    def new_process(self) -> SandboxProcess:
        return SandboxProcess(f"{__package__}.{self.module}", self.max_answer_bytes)

    async def ask(
        self,
        pool: SandboxPool,
        frame: bytes | Callable[[], bytes],
        refused: Callable[[str], InvalidRequestError],
        setup: ModelSetup | None = None,
        *,
        of: str = "",
    ) -> bytes:
        """The answer of a process of the pool to one message. A thread makes a message that is given as a function.

        `refused` makes the error of the field that the message is about. It is raised if the message exceeds a limit or
        the setup fails, and an OverloadedError if the processes are busy, slow or killed by others.
        """
        try:
            return await pool.run(partial(self._ask, frame, refused, setup), self.wait_s)
        except NoFreeProcessError:
            raise _overloaded(f"all processes that {self.what}{of} are busy") from None
        except TimeoutError:
            words = f"a process did not {self.what}{of} within {self.timeout_s:g} s; retry later"
            raise SlowAnswerError(words, retry_after_s=RETRY_S) from None
        except OversizedAnswerError:
            raise refused(f"has a result that is too large; {self.advice}") from None
        except SandboxEndedError as error:
            if error.is_out_of_cpu_time:
                raise refused(f"takes more than {self.cpu_s:g} s of CPU time; {self.advice}") from None
            if error.is_killed:
                raise _overloaded(f"processes that {self.what}{of} were killed twice") from None
            log.warning("a sandbox process ended with status %d", error.returncode)
            raise refused(
                f"ended its process with status {error.returncode}, probably by a limit on memory; {self.advice}"
            ) from None

    async def _ask(
        self,
        frame: bytes | Callable[[], bytes],
        refused: Callable[[str], InvalidRequestError],
        setup: ModelSetup | None,
        process: SandboxProcess,
    ) -> bytes:
        needed = setup if setup is not None and not process.has_setup(setup.key) else None
        if needed is not None and (error := await process.set_up(needed.key, await asyncio.to_thread(needed.frame))):
            raise refused(f"{needed.failed}: {error}")
        if not isinstance(frame, bytes):
            frame = await asyncio.to_thread(frame)
        return await process.ask(frame, self.timeout_s)


def _overloaded(words: str) -> OverloadedError:
    return OverloadedError(f"{words}; retry later", retry_after_s=RETRY_S)


class SandboxPool:
    """Owns `num_processes` processes. They start when they are needed; the one that was used last is used first.

    Owners take turns: while all processes are busy, one caller of each owner waits for the next one.
    `spares`: gives a process that has started already, instead of a new one.
    """

    def __init__(self, make: MakeProcess, num_processes: int, spares: Spares | None = None) -> None:
        self._processes = [make() for _ in range(num_processes)]
        self._spares = spares
        self._free = list(range(num_processes))
        self._places = asyncio.Semaphore(num_processes)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def is_idle(self) -> bool:
        """Whether no process is in use."""
        return not self._tasks

    async def run(self, work: Callable[[SandboxProcess], Awaitable[T]], wait_s: float) -> T:
        """Call `work` with a process that no other caller uses, and repeat it once if another process kills that one.

        If the caller is cancelled, `work` continues, because killing its process would cost more. Raises
        NoFreeProcessError if no process becomes free within `wait_s`.
        """
        index = await self._take(wait_s)
        task = asyncio.create_task(self._run(index, work))
        self._tasks.add(task)
        task.add_done_callback(self._settle)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the processes."""
        await cancel(*self._tasks)
        for process in self._processes:
            process.kill()

    async def _take(self, wait_s: float) -> int:
        turn = self._turns.setdefault(current_caller.get().owner, asyncio.Lock())
        try:
            async with asyncio.timeout(wait_s), turn:
                await self._places.acquire()
        except TimeoutError:
            raise NoFreeProcessError from None
        return self._free.pop()

    async def _run(self, index: int, work: Callable[[SandboxProcess], Awaitable[T]]) -> T:
        try:
            return await work(self._started(index))
        except SandboxEndedError as error:
            if not error.is_killed:
                raise
            log.warning("a sandbox process was killed; its message is repeated in a new process")
            return await work(self._started(index))
        finally:
            self._free.append(index)
            self._places.release()

    def _started(self, index: int) -> SandboxProcess:
        if self._spares is not None and self._processes[index].pid is None:
            self._processes[index] = self._spares.swap(self._processes[index])
        return self._processes[index]

    def _settle(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller may have been cancelled


class Spares:
    """A process that has started and waits, so that a pool need not wait while a new process starts."""

    def __init__(self, make: MakeProcess) -> None:
        self._spare = make()

    def start(self) -> None:
        """Start the spare process."""
        self._spare.start()

    def swap(self, process: SandboxProcess) -> SandboxProcess:
        """The spare process, in exchange for a process that does not run, which becomes the spare."""
        process.start()
        spare, self._spare = self._spare, process
        return spare

    def close(self) -> None:
        """End the spare process."""
        self._spare.kill()
