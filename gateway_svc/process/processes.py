"""Several gateway processes behind one port.

    quire-gateway --processes 4          the parent: reserves the port; starts, monitors and stops the children
      gateway_svc.child 0 ... 3          complete gateways that share the port (SO_REUSEPORT)

Each child tells the parent whether it is ready, and learns whether all are (readiness.py).

The kernel assigns every new connection to one child. Children are independent, like gateways on several machines: if
one dies, clients resume its streams through another, and Abort reaches streams of other children through the
schedulers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from child_processes import Backoff, Death, keep_running, spawn
from gateway_svc.process.readiness import ReadyProcesses
from svc_common.config import OFF
from svc_common.serve import BindError
from svc_common.sockets import bind_tcp
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CANNOT_START = 3  # the process reported why it cannot start
BACKOFF = Backoff(first_s=0.2, max_s=5.0, steady_s=5.0)  # a steady process has started successfully


class ChildFailedError(RuntimeError):
    """A process failed at its first start; a restart would not help."""


class SharedPort:
    """Reserves the port without listening, so that all processes can bind it and no other program can."""

    def __init__(self, listen: str) -> None:
        host = listen.rpartition(":")[0]
        try:
            # First bind without SO_REUSEPORT: with it, this gateway would silently share another gateway's port.
            with bind_tcp(listen) as probe:
                self.address = f"{host}:{probe.getsockname()[1]}"
            self._socket = bind_tcp(self.address, shares_port=True)
        except OSError as error:
            raise BindError(f"cannot listen on {listen}: {error.strerror or error}") from None

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


@dataclass(slots=True, eq=False)
class Child:
    """One gateway process and its restarts. `command_of(n)` returns the command line of start n, from 0."""

    index: int
    command_of: Callable[[int], list[str]]
    process: asyncio.subprocess.Process | None = None
    num_starts: int = 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is running."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Supervisor:
    """Owns the processes: restarts any that dies, and drains all on SIGTERM."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = list(children)
        self._readiness = ReadyProcesses(len(self._children))
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, then until all processes have ended. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        tasks = [asyncio.create_task(self._keep_running(child)) for child in self._children]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        self._stop()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        if errors and not isinstance(errors[0], ChildFailedError):
            raise errors[0]
        if errors:
            log.error("%s", errors[0])
            return EXIT_FAILED
        return EXIT_FAILED if any(isinstance(end, int) and end > 0 for end in ends) else 0

    def _stop(self) -> None:
        """Forward the signal: the first signal drains all processes, the second stops them at once."""
        self._stopping.set()
        for child in self._children:
            child.signal(signal.SIGTERM)

    async def _keep_running(self, child: Child) -> int:
        """Raises ChildFailedError if the first process fails to start."""

        def on_death(death: Death) -> None:
            failed = death.status == EXIT_CANNOT_START or (death.status > 0 and not death.was_steady)
            if death.start == 0 and failed:
                raise ChildFailedError(
                    f"process {child.index} failed to start (status {death.status}); its log has the cause"
                )
            log.error("process %d died (status %d); restarting it in %.1f s", child.index, death.status, death.pause_s)

        return await keep_running(lambda start: self._run_once(child, start), self._stopping, BACKOFF, on_death)

    async def _run_once(self, child: Child, start: int) -> int:
        """Run a process until it ends. Returns its exit status, negative for a signal."""
        child.num_starts += 1
        with ExitStack() as links:
            try:
                link, link_of_child = map(links.enter_context, socket.socketpair())
                child.process = await spawn(child.command_of(start), stdin=link_of_child.fileno())
            except OSError as error:  # e.g. out of memory or process ids: the other processes keep running
                log.error("cannot start process %d: %s", child.index, error)
                return EXIT_CANNOT_START
            link_of_child.close()
            return await self._follow(child, child.process, link)

    async def _follow(self, child: Child, process: asyncio.subprocess.Process, link: socket.socket) -> int:
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        following = asyncio.create_task(self._readiness.follow(child.index, link))
        try:
            return await process.wait()
        finally:
            await cancel(following)


def supervise(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run `args.processes` gateways with the settings of `argv`. Returns the exit status; raises BindError."""
    listens = [args.listen, *([] if args.http_listen == OFF else [args.http_listen])]
    with ExitStack() as stack:
        ports = [stack.enter_context(closing(SharedPort(listen))) for listen in listens]
        addresses = [port.address for port in ports]
        log.info("%d gateway processes listen on %s", args.processes, " and ".join(addresses))
        return asyncio.run(_run(args.processes, addresses, argv))


async def _run(num_processes: int, addresses: Sequence[str], argv: Sequence[str]) -> int:
    def make(index: int) -> Child:
        own = [sys.executable, "-P", "-m", "gateway_svc.child", str(index), ",".join(addresses)]
        return Child(index, lambda start: [*own, str(start), *argv])

    return await Supervisor([make(index) for index in range(num_processes)]).run()


def port_of_child(listen: str, index: int) -> str:
    """The metrics or health address of one process: the configured port plus its index. Port 0 and `off` are kept."""
    host, _, port = listen.rpartition(":")
    if listen == OFF or int(port) == 0:
        return listen
    return f"{host}:{int(port) + index}"
