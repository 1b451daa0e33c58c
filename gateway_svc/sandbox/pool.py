"""Several sandbox processes of one kind; each serves one caller at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway_svc.sandbox.process import SandboxProcess

MakeProcess = Callable[[], SandboxProcess]


class SandboxPool:
    """Owns `num_processes` processes. They start when they are needed; the one that was used last is used first."""

    def __init__(self, make: MakeProcess, num_processes: int, spares: Spares | None = None) -> None:
        self._processes = [make() for _ in range(num_processes)]
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        self._spares = spares
        for index in range(num_processes):
            self._free.put_nowait(index)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def is_idle(self) -> bool:
        """Whether no process is in use."""
        return self._free.qsize() == len(self._processes)

    @asynccontextmanager
    async def take(self, timeout_s: float) -> AsyncIterator[SandboxProcess]:
        """A process that no other caller uses. Raises TimeoutError if none becomes free in time."""
        async with asyncio.timeout(timeout_s):
            index = await self._free.get()
        try:
            if self._spares is not None and self._processes[index].pid is None:
                self._processes[index] = self._spares.swap(self._processes[index])
            yield self._processes[index]
        finally:
            self._free.put_nowait(index)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()


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
