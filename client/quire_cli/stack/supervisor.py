"""Runs services as child processes: starts, watches and restarts them, and stops them in order.

Every child is one `python -m SERVICE.service`. Ctrl-C in the terminal reaches only this process,
which then stops the children in order. The output of a child goes to NAME.log.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio
from quire_client.connection.channel import HEALTH_METHOD, Tls, health_request, health_state, open_channel

# Linux sends SIGTERM to the child when its parent dies (PR_SET_PDEATHSIG = 1); the setting survives exec.
LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses before restarts: they double, and begin again after a process has run for `steady_s`."""

    first_s: float
    max_s: float
    steady_s: float


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that should run. `status` is negative for a signal."""

    status: int
    start: int  # 0: the first process
    was_steady: bool
    pause_s: float  # until the next start


async def start_program(
    command: Sequence[str], *, stdin: int, output: IO[bytes] | None = None, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start a program, by its path. It gets SIGTERM when this process dies for any reason. Raises OSError.

    It runs in a session of its own, so that Ctrl-C in a terminal reaches only this process. `output`: stdout and
    stderr; None: those of this process.
    """
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())] if sys.platform == "linux" else []
    return await asyncio.create_subprocess_exec(
        *launcher, *command, stdin=stdin, stdout=output, stderr=output, start_new_session=True, env=environment
    )


async def keep_running(
    run_once: Callable[[int], Awaitable[int]],
    stopping: asyncio.Event,
    backoff: Backoff,
    on_death: Callable[[Death], None],
) -> int:
    """Run a process, and again whenever it dies, until `stopping` is set. Returns its last exit status, 0 in a pause.

    `run_once(n)` runs the process of start n, from 0, to its end. `on_death` reports the death of a process; it
    raises if a restart would not help.
    """
    pause_s, start = backoff.first_s, 0
    while True:
        started = time.monotonic()
        status = await run_once(start)
        if stopping.is_set():
            return status
        was_steady = time.monotonic() - started >= backoff.steady_s
        pause_s = backoff.first_s if was_steady else pause_s
        on_death(Death(status, start, was_steady, pause_s))
        if await is_set_within(stopping, pause_s):
            return 0
        pause_s, start = min(2 * pause_s, backoff.max_s), start + 1


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most for `seconds`. Returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


POLL_S = 0.1
BACKOFF = Backoff(first_s=0.5, max_s=30.0, steady_s=60.0)
HURRY_S = 1.0
QUIET_S = 5.0  # report the last log line of a starting service that has made no progress for this long
TAIL_LINES = 12
TAIL_BYTES = 16_384
PORT_RANGE = (20_000, 32_000)  # below the ephemeral ports of the system

Report = Callable[[str, str, dict[str, Any]], None]  # event, service, facts


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service: its command, and the address on which it answers health checks."""

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    stop_phase: int  # services with a lower phase are stopped first
    metrics: str = ""  # host:port of /metrics, if enabled
    environment: tuple[tuple[str, str], ...] = ()  # extra variables
    tls: Tls | None = None  # for its health checks


class StartFailedError(Exception):
    """A service ended before it was ready for the first time: its settings or its model are wrong."""

    def __init__(self, name: str, how: str, tail: list[str]) -> None:
        reason = setting_error(tail)
        super().__init__(f"{name}: {reason}" if reason else f"{name} {how} before it was ready")
        self.name = name
        self.tail = [] if reason else tail


@dataclass(slots=True)
class Service:
    """A service and its current process."""

    spec: ServiceSpec
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    was_ready: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.returncode is None else None


class Stack:
    """Runs services until `stop`.

    `report` receives these events: started, progress, waiting, ready, died, stopping, stopped, killed.
    """

    def __init__(self, specs: Iterable[ServiceSpec], log_dir: Path, report: Report) -> None:
        self.services = [Service(spec, log_dir / f"{spec.name}.log") for spec in specs]
        self._report = report
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Start all services and keep them running. Returns after `stop`. Raises StartFailedError."""
        try:
            async with asyncio.TaskGroup() as group:
                for service in self.services:
                    group.create_task(self._supervise(service))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def wait_ready(self) -> None:
        """Return when all services are ready at the same time."""
        while not all(service.ready.is_set() for service in self.services):
            for service in self.services:
                await service.ready.wait()

    async def stop(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Send SIGTERM phase by phase. Kill processes still running after `timeout_s`, or soon after `hurry` is set."""
        self._is_stopping.set()
        for phase in sorted({service.spec.stop_phase for service in self.services}):
            members = [service for service in self.services if service.spec.stop_phase == phase]
            await asyncio.gather(*(self._stop_one(service, timeout_s, hurry) for service in members))

    async def _supervise(self, service: Service) -> None:
        def on_death(death: Death) -> None:
            how, tail = _describe_exit(death.status), log_tail(service.log_path)
            if not service.was_ready:
                raise StartFailedError(service.spec.name, how, tail)
            facts = {"how": how, "restart_in_s": death.pause_s, "log_tail": tail}
            self._report("died", service.spec.name, facts)

        await keep_running(lambda start: self._run_once(service), self._is_stopping, BACKOFF, on_death)

    async def _run_once(self, service: Service) -> int:
        """Run a service's process to its end. Returns its exit code."""
        service.process = await spawn(service.spec, service.log_path)
        self._report("started", service.spec.name, {"pid": service.process.pid, "log": str(service.log_path)})
        watcher = asyncio.create_task(self._watch(service, service.log_path.stat().st_size))
        try:
            return await service.process.wait()
        except asyncio.CancelledError:
            await self._kill(service)
            raise
        finally:
            watcher.cancel()
            service.ready.clear()

    async def _watch(self, service: Service, log_start: int) -> None:
        """Report progress, or the last log line without progress, until the service is SERVING."""
        started = reported = time.monotonic()
        last_percent = last_step = None
        tls, address = service.spec.tls, service.spec.address
        security = (None, ()) if tls is None else (tls.credentials(), tls.options())
        async with open_channel(grpc.aio, address, *security) as channel:
            while not await _is_serving(channel):
                step = starting_step(service.log_path, log_start)
                percent = loading_percent(service.log_path, log_start)
                if step not in (None, last_step):
                    self._report("step", service.spec.name, {"step": step})
                    last_step, reported = step, time.monotonic()
                elif percent not in (None, last_percent):
                    self._report("progress", service.spec.name, {"percent": percent})
                    last_percent, reported = percent, time.monotonic()
                elif time.monotonic() - reported > QUIET_S:
                    self._report(
                        "waiting",
                        service.spec.name,
                        {"log_tail": [last_step] if last_step else log_tail(service.log_path, 1)},
                    )
                    reported = time.monotonic()
                await asyncio.sleep(POLL_S)
        service.was_ready = True
        service.ready.set()
        facts = {"address": service.spec.address, "seconds": round(time.monotonic() - started, 1)}
        self._report("ready", service.spec.name, {**facts, "pid": service.pid})

    async def _stop_one(self, service: Service, timeout_s: float, hurry: asyncio.Event) -> None:
        process = service.process
        if process is None or process.returncode is not None:
            return
        self._report("stopping", service.spec.name, {})
        _signal(process, signal.SIGTERM)
        gone = asyncio.create_task(process.wait())
        if not await _first_within(gone, hurry, timeout_s):
            _signal(process, signal.SIGTERM)  # a second SIGTERM makes a service skip its drain
            await asyncio.wait([gone], timeout=HURRY_S)
        if process.returncode is None:
            self._report("killed", service.spec.name, {})
            await self._kill(service)
        await gone
        self._report("stopped", service.spec.name, {})

    async def _kill(self, service: Service) -> None:
        if service.process is not None and service.process.returncode is None:
            _signal(service.process, signal.SIGKILL)
            await service.process.wait()


async def spawn(spec: ServiceSpec, log_path: Path) -> asyncio.subprocess.Process:
    """Start the service's process. Its output is appended to the log."""
    command = [sys.executable, "-u", "-P", "-m", spec.module, *spec.arguments]
    environment = os.environ | dict(spec.environment)
    with log_path.open("ab") as log:
        return await start_program(command, stdin=asyncio.subprocess.DEVNULL, output=log, environment=environment)


def free_ports(count: int, *, excluded: Sequence[int] = ()) -> list[int]:
    """Distinct ports of 127.0.0.1 that are free now."""
    found: list[int] = []
    candidates = random.sample(range(*PORT_RANGE), 2_000)
    for port in candidates:
        if len(found) == count:
            break
        if port not in excluded and is_free("127.0.0.1", port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"found fewer than {count} free ports between {PORT_RANGE[0]} and {PORT_RANGE[1]}")
    return found


def is_free(host: str, port: int) -> bool:
    """Whether this process can listen on the port. Raises OSError if `host` is not an address of this machine."""
    family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # gRPC sets it too: TIME_WAIT does not count
        try:
            probe.bind(sockaddr)
        except OSError as error:
            if error.errno in (98, 48, 13, 10048):  # in use, or not allowed
                return False
            raise
    return True


def log_tail(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    return _read_end(path, 0).decode("utf-8", "replace").splitlines()[-num_lines:]


def loading_percent(path: Path, start: int) -> int | None:
    """The last percentage in a log after byte `start`: the loaded part of the weights."""
    found = re.findall(rb"(\d{1,3}) ?%", _read_end(path, start))
    return min(100, int(found[-1])) if found else None


def starting_step(path: Path, start: int) -> str | None:
    """The last startup step in a log after byte `start`, such as "importing torch"."""
    found = re.findall(rb"starting: ([^\n\"]+)", _read_end(path, start))
    return found[-1].decode("utf-8", "replace").strip() if found else None


def setting_error(tail: Sequence[str]) -> str:
    """The wrong setting that a service names in the end of its log; empty if it ended for another reason."""
    said = [found[1] for line in tail if (found := re.match(r"quire-\w+: (?:error: )?(.+)", line))]
    logged = re.match(r"\S+ \S+ ERROR (.+)", tail[-1]) if tail else None
    return said[-1] if said else logged[1] if logged else ""


def _read_end(path: Path, start: int) -> bytes:
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start, size - TAIL_BYTES))
        return log.read()


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)
    try:
        return health_state(await check(health_request(""), timeout=2.0)) == "serving"
    except grpc.RpcError:
        return False


async def _first_within(gone: asyncio.Task[int], hurry: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the process has ended, `hurry` is set or `timeout_s` has passed. True if the process has ended."""
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([gone, hurried], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    return gone.done()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        return  # already ended


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(num_workers: int, threads: int | None) -> int:
    """Threads per worker: `threads`, else an equal share of the cores."""
    return threads or max(1, cores() // num_workers)


def flag_arguments(flags: Sequence[tuple[str, object]]) -> tuple[str, ...]:
    """`--name value` for each flag that has a value, `--name` for a switch that is on."""
    given = ((f"--{name}", value) for name, value in flags if value is not None and value is not False)
    return tuple(part for name, value in given for part in ((name,) if value is True else (name, str(value))))
