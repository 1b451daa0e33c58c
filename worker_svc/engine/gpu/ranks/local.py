"""The ranks that are child processes of this one, and the pipes that carry messages to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from worker_svc.engine.backend import BackendUnavailableError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.gpu.collectives.rendezvous import join, leave, open_store
from worker_svc.engine.gpu.runner import DeviceRunner

EXIT_BAD_SETTING = 2
EXIT_RANK_LOST = 70  # same code as for other faults that may corrupt the pool
JOIN_TIMEOUT_S = 30.0


class LocalRanks:
    """Child processes, one for each of `ranks`. They run the messages of `outboxes` until STOP, and end with this
    process."""

    def __init__(self, config: EngineConfig, ranks: Sequence[int], store: Any) -> None:
        self._store = store
        self.outboxes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for rank in ranks:
            inbox, outbox = context.Pipe(duplex=False)
            process = context.Process(
                target=_follow, args=(config, rank, store.port, inbox), name=f"rank-{rank}", daemon=True
            )
            process.start()
            inbox.close()  # this process's copy: writing to a rank that has ended must fail
            self.outboxes.append(outbox)
            self.processes.append(process)

    def end_within(self, timeout_s: float) -> tuple[str, int] | None:
        """The reason and the exit code for this process, if a rank ends within `timeout_s`."""
        ended = wait([process.sentinel for process in self.processes], timeout_s)
        return self._reason([process for process in self.processes if process.sentinel in ended]) if ended else None

    def _reason(self, lost: list[BaseProcess]) -> tuple[str, int]:
        for process in lost:
            process.join()  # sets its exit code
        refused = [process.name for process in lost if self._store.check([process.name])]
        if refused:
            return "; ".join(f"{name}: {self._store.get(name).decode()}" for name in refused), EXIT_BAD_SETTING
        return ", ".join(f"{process.name} ended (exit code {process.exitcode})" for process in lost), EXIT_RANK_LOST

    def join(self) -> None:
        """Waits until they end, after STOP."""
        for process in self.processes:
            process.join(JOIN_TIMEOUT_S)

    def kill(self) -> None:
        """Kills them: a rank that is suspended or waits in a collective cannot be stopped otherwise."""
        for process in self.processes:
            process.kill()


def _follow(config: EngineConfig, rank: int, store_port: int, inbox: Connection) -> None:
    """Main function of a rank. It ignores signals, which a terminal or service manager sends to all processes, and
    exits with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    store = open_store(store_port, config.tensor_parallel_size)
    try:
        runner = DeviceRunner(config, None, join(config, rank, store, inbox=inbox))
    except (ValueError, BackendUnavailableError) as error:
        store.set(f"rank-{rank}", str(error))
        os._exit(EXIT_BAD_SETTING)
    runner.follow()
    leave()


def _leave_with_parent() -> None:
    """Exits when the parent dies. It may die in the middle of a step, and this rank would then wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(EXIT_RANK_LOST)
