"""Several sandbox processes of one kind; each serves one caller at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
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


@dataclass(frozen=True, slots=True)
class SandboxErrors:
    """The errors of a client when a sandbox process does not answer its message."""

    refused: Callable[[str], InvalidRequestError]  # the error of the field that the message is about
    busy: str
    slow: str
    killed: str  # by another process
    oversized: str
    out_of_cpu_time: str
    ended: str  # {status}: of the process

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the errors of `SandboxPool.run` and `SandboxProcess.ask` as InvalidRequestError or OverloadedError."""
        try:
            yield
        except NoFreeProcessError:
            raise _overloaded(self.busy) from None
        except TimeoutError:
            raise _overloaded(self.slow) from None
        except OversizedAnswerError:
            raise self.refused(self.oversized) from None
        except SandboxEndedError as error:
            if error.is_out_of_cpu_time:
                raise self.refused(self.out_of_cpu_time) from None
            if error.is_killed:
                raise _overloaded(self.killed) from None
            log.warning("a sandbox process ended with status %d", error.returncode)
            raise self.refused(self.ended.format(status=error.returncode)) from None


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
