"""Watches the processes during an attack: alive, answering, without internal errors, memory as before."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from tests.hostile import http1
from tests.hostile.http2 import Http2, frame_message
from tests.hostile.target import Port, bearer
from tests.processes.stack import Service

# Signs of a bug in a log. Refusals are logged in one line, without a traceback.
BUG_WORDS = (
    "Traceback (most recent call last)",
    " CRITICAL ",
    "was never retrieved",
    "was destroyed but it is pending",
)
PROBE_DEADLINE_S = 30.0
STALL_S = 10.0  # a probe during an attack that takes longer is a weakness
SETTLE_DEADLINE_S = 20.0
POLL_S = 0.2
KEPT_MIB = 64.0  # allocators keep this much after a flood; a leak grows with the attack and exceeds it
PEAK_MIB = 400.0
HEALTH_CHECK = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True, slots=True)
class Finding:
    """One weakness that an attack has found."""

    attack: str
    place: str  # a port or a process
    what: str

    def __str__(self) -> str:
        return f"{self.attack} on {self.place}: {self.what}"


@dataclass(slots=True)
class Memory:
    """Resident memory of one process in MiB."""

    before: float
    after: float = 0.0
    peak: float = 0.0


@dataclass(slots=True)
class Before:
    """The state of one process before an attack."""

    service: Service
    pid: int
    log_size: int
    memory: Memory


@dataclass
class Watch:
    """`async with Watch(attack, services, ports) as watch` around an attack; then `findings` and `memory`."""

    attack: str
    services: Sequence[Service]
    ports: Sequence[Port]
    kept_mib: float = KEPT_MIB
    peak_mib: float = PEAK_MIB
    stall_s: float = STALL_S
    settle_s: float = SETTLE_DEADLINE_S  # longest wait until memory has returned
    findings: list[Finding] = field(default_factory=list)
    slowest_probe_s: float = 0.0
    _before: list[Before] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def memory(self) -> dict[str, Memory]:
        return {before.service.name: before.memory for before in self._before}

    async def __aenter__(self) -> Watch:
        for service in self.services:
            assert service.process is not None
            pid = service.process.pid
            size = rss_mib(pid)
            self._before.append(Before(service, pid, len(service.log()), Memory(size, size, size)))
        self._tasks = [asyncio.create_task(self._sample()), asyncio.create_task(self._probe_often())]
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        await self._end_tasks()
        if kind is not None:
            return
        await self._check()
        for memory in self.memory.values():
            memory.peak = max(memory.peak, memory.after)

    async def _end_tasks(self) -> None:
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=1.0)

    def find(self, place: str, what: str) -> None:
        """Record a weakness, once."""
        finding = Finding(self.attack, place, what)
        if finding not in self.findings:
            self.findings.append(finding)

    async def _probe_often(self) -> None:
        """Probe the ports in turn during the attack."""
        while self.ports:
            for port in self.ports:
                began = time.monotonic()
                with contextlib.suppress(OSError):
                    await probe(port)
                self.slowest_probe_s = max(self.slowest_probe_s, time.monotonic() - began)
                await asyncio.sleep(POLL_S)

    async def _sample(self) -> None:
        while True:
            for before in self._before:
                if before.service.is_running:
                    before.memory.peak = max(before.memory.peak, rss_mib(before.pid))
            await asyncio.sleep(POLL_S)

    async def _check(self) -> None:
        for port in self.ports:
            await self._probe(port)
        if self.slowest_probe_s > self.stall_s:
            self.find("a port", f"a probe took {self.slowest_probe_s:.1f} s")
        for before in self._before:
            self._check_process(before)
            if before.service.is_running:
                await self._check_memory(before)

    async def _probe(self, port: Port) -> None:
        """Ask the port what any caller may ask."""
        began = time.monotonic()
        try:
            answer = await probe(port)
            if answer == "CANCELLED":  # gRPC drops some calls while it recovers from a flood of resets
                answer = await probe(port)
        except OSError as error:  # also TimeoutError
            self.find(port.name, f"no answer to a probe: {type(error).__name__}: {error}")
            return
        self.slowest_probe_s = max(self.slowest_probe_s, time.monotonic() - began)
        if answer not in ("OK", "200"):
            self.find(port.name, f"a probe got {answer}")

    def _check_process(self, before: Before) -> None:
        service = before.service
        if not service.is_running:
            self.find(service.name, f"the process has ended (exit code {service.exit_code})\n{service.log()[-3000:]}")
        new = service.log()[before.log_size :]
        for words in BUG_WORDS:
            if (at := new.find(words)) >= 0:
                self.find(
                    service.name, f"{len(re.findall(re.escape(words), new))} x {words!r} in its log{_end(new, at)}"
                )

    async def _check_memory(self, before: Before) -> None:
        memory, deadline = before.memory, time.monotonic() + self.settle_s
        memory.after = rss_mib(before.pid)
        while memory.after - memory.before > self.kept_mib and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            memory.after = rss_mib(before.pid)
        if memory.after - memory.before > self.kept_mib:
            self.find(before.service.name, f"memory grew from {memory.before:.0f} to {memory.after:.0f} MiB and stayed")
        if memory.peak - memory.before > self.peak_mib:
            self.find(before.service.name, f"memory grew from {memory.before:.0f} to {memory.peak:.0f} MiB at its peak")


def _end(log: str, at: int) -> str:
    lines = log[at:].splitlines()
    last = next((line for line in lines[1:] if line and not line.startswith((" ", "Traceback"))), "")
    return f"; the first: {lines[0][:100]} ... {last[:300]}"


def rss_mib(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def headers(port: Port) -> dict[str, str]:
    key = port.credentials.get("")
    return {} if key is None else dict(bearer(key))


async def probe(port: Port) -> str:
    """The status of a health check, or of a GET, on a new connection. Raises OSError."""
    async with asyncio.timeout(PROBE_DEADLINE_S):
        if not port.is_grpc:
            return await http1.get(port.address, port.path, headers(port))
        async with await Http2.open(port.address) as http2:
            return (await http2.call(HEALTH_CHECK, frame_message(b""), within_s=PROBE_DEADLINE_S)).code
