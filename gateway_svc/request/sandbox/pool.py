"""Several sandbox processes of one kind; each serves one caller at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway_svc.request.sandbox.process import SandboxEndedError, SandboxProcess
from svc_common.tasks import cancel

log = logging.getLogger(__name__)
T = TypeVar("T")

MakeProcess = Callable[[], SandboxProcess]


class NoFreeProcessError(Exception):
    """All processes stayed busy."""


class SandboxPool:
    """Owns `num_processes` processes. They start when they are needed; the one that was used last is used first.

    `spares`: gives a process that has started already, instead of a new one.
    """

    def __init__(self, make: MakeProcess, num_processes: int, spares: Spares | None = None) -> None:
        self._processes = [make() for _ in range(num_processes)]
        self._spares = spares
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        self._tasks: set[asyncio.Task[object]] = set()
        for index in range(num_processes):
            self._free.put_nowait(index)

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
        if not self._free.empty():
            return self._free.get_nowait()
        try:
            async with asyncio.timeout(wait_s):
                return await self._free.get()
        except TimeoutError:
            raise NoFreeProcessError from None

    async def _run(self, index: int, work: Callable[[SandboxProcess], Awaitable[T]]) -> T:
        try:
            return await work(self._started(index))
        except SandboxEndedError as error:
            if not error.is_killed:
                raise
            log.warning("a sandbox process was killed; its message is repeated in a new process")
            return await work(self._started(index))
        finally:
            self._free.put_nowait(index)

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
