"""Several sandbox processes of one kind; each serves one caller at a time. What they do is a `Job`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from gateway_svc.callers.caller import current_caller
from gateway_svc.request.sandbox.process import OversizedAnswerError, SandboxEndedError, SandboxProcess
from svc_common.errors import InvalidRequestError, OverloadedError
from svc_common.tasks import cancel

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
