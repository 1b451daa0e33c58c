"""The real services as processes on the loopback interface, for tests that may kill them.

    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, "--dtype", "float32")
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client: ...

Leaving the block ends every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir
from quire_client.types import SchedulerStatus, WorkerStatus

from tests.processes.nursery import Forked, start_service
from tests.processes.ports import free_port
from worker_svc.engine.kernels.build import KernelBuildError, load_kernels

ROOT = Path(__file__).resolve().parents[2]
WORKER = "worker_svc.service"
READY_DEADLINE_S = 180.0
EXIT_DEADLINE_S = 20.0
POLL_S = 0.05


@functools.cache
def compile_kernels() -> None:
    """Compile the CPU kernels before the first worker starts, so that no deadline covers the compilation."""
    with contextlib.suppress(KernelBuildError):  # workers fall back to torch
        load_kernels()


@dataclass
class Service:
    """One service process. It serves at `address`; the log file has its output."""

    name: str
    command: list[str]
    address: str
    log_path: Path
    process: subprocess.Popen[bytes] | Forked | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it, or start it again with the same address."""
        variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = start_service(self.command, self.log_path, uses_torch=self._uses_torch, **variables)

    @property
    def _uses_torch(self) -> bool:
        return self.command[2] == WORKER and "sim" not in self.command

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        """Send SIGTERM and wait until the process has ended. Returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float = EXIT_DEADLINE_S) -> int:
        """Wait for the end of the process and return its exit code. Raises TimeoutError with the log."""
        assert self.process is not None, f"{self.name} was not started"
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} is still running after {timeout_s} s\n{self.log()}") from None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until its health service answers SERVING. Raises RuntimeError with the log if that takes too long."""
        deadline = time.monotonic() + deadline_s
        with grpc.insecure_channel(self.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while not self._is_serving(check):
                if not self.is_running or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not become ready (exit code {self.exit_code})\n{self.log()}")
                time.sleep(POLL_S)

    @staticmethod
    def _is_serving(check: Any) -> bool:
        try:
            # After a failed attempt a channel reconnects only while a call waits for it.
            response = check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class Stack:
    """Owns the service processes of one test or module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: list[Service] = []

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *exc: object) -> None:
        for service in self.services:
            service.signal(signal.SIGKILL)
        for service in self.services:
            service.wait()

    def start_scheduler(self, *flags: str, module: str = "scheduler_svc.service") -> Service:
        return self._start("scheduler", module, [*flags])

    def start_worker(self, scheduler: Service, model_dir: Path | str, *flags: str, module: str = WORKER) -> Service:
        """Start a worker with one compute thread. Its worker id is its name: worker-0, worker-1, ..."""
        compile_kernels()
        name = self._next_name("worker")
        own = ["--model", str(model_dir), "--scheduler", scheduler.address, "--worker-id", name, "--threads", "1"]
        return self._start("worker", module, [*own, *flags])

    def start_gateway(
        self, *schedulers: Service, flags: tuple[str, ...] = (), module: str = "gateway_svc.service"
    ) -> Service:
        own = [word for scheduler in schedulers for word in ("--scheduler", scheduler.address)]
        return self._start("gateway", module, [*own, *flags])

    def _start(self, kind: str, module: str, flags: list[str]) -> Service:
        name, address = self._next_name(kind), f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", module, "--listen", address, *flags]
        service = Service(name, command, address, self.folder / f"{name}.log")
        self.services.append(service)
        service.start()
        return service

    def _next_name(self, kind: str) -> str:
        return f"{kind}-{sum(service.name.startswith(kind) for service in self.services)}"

    async def connect(self, gateway: Service, *, workers: int = 1) -> AsyncClient:
        """Waits until each scheduler has `workers` ready workers and the gateway serves its model. Returns a client.

        With `workers=0` it waits for the gateway only, for tests in which a scheduler is down.
        """
        gateway.wait_ready()
        client = await AsyncClient.connect(gateway.address)
        if not workers:
            return client
        # A ready worker is leased a moment later, and the gateway learns its model after that.
        schedulers = await self.until(client, lambda all_: all(s.model and num_ready(s) >= workers for s in all_))
        deadline = time.monotonic() + READY_DEADLINE_S
        while missing := {s.model for s in schedulers} - {model.name for model in await client.models()}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not served after {READY_DEADLINE_S} s: {missing}\n{self.logs()}")
            await asyncio.sleep(POLL_S)
        return client

    async def until(
        self,
        client: AsyncClient,
        holds: Callable[[tuple[SchedulerStatus, ...]], bool],
        deadline_s: float = READY_DEADLINE_S,
    ) -> tuple[SchedulerStatus, ...]:
        """Wait until `holds(status of all schedulers)`. Raises TimeoutError with the last status and all logs."""
        deadline = time.monotonic() + deadline_s
        while True:
            schedulers = (await client.status()).schedulers
            if holds(schedulers):
                return schedulers
            if time.monotonic() > deadline:
                raise TimeoutError(f"the condition does not hold after {deadline_s} s: {schedulers}\n{self.logs()}")
            await asyncio.sleep(POLL_S)

    def logs(self) -> str:
        return "\n".join(f"--- {service.name}\n{service.log()}" for service in self.services)


def num_ready(scheduler: SchedulerStatus) -> int:
    return sum(worker.state == "ready" for worker in scheduler.workers)


def is_ready(schedulers: tuple[SchedulerStatus, ...], worker: Service) -> bool:
    """Whether a scheduler uses the worker. Its own state is `ready` before the scheduler has leased it."""
    found = (w for s in schedulers for w in s.workers if w.worker_id == worker.name)
    return any(w.state == "ready" and w.rows_total > 0 for w in found)


def worker_status(schedulers: tuple[SchedulerStatus, ...], worker: Service) -> WorkerStatus:
    """The status of one worker, as its scheduler reports it."""
    return next(w for s in schedulers for w in s.workers if w.worker_id == worker.name)


def read_page(port: int) -> str:
    """The metrics of a service."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return str(page.read().decode())


async def wait_idle(stack: Stack, client: AsyncClient) -> tuple[SchedulerStatus, ...]:
    """Wait until no sequence waits or runs and no block is in use."""
    return await stack.until(client, lambda schedulers: all(is_idle(s) for s in schedulers), deadline_s=20.0)


def is_idle(scheduler: SchedulerStatus) -> bool:
    is_quiet = scheduler.num_waiting == 0 and scheduler.num_running == 0
    return is_quiet and all(worker.blocks_used == 0 for worker in scheduler.workers)


@contextlib.contextmanager
def demo_gateway(folder: Path) -> Iterator[str]:
    """One process of each service with the bundled model. Yields the gateway's address when it answers."""
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, demo_model_dir(), "--kv-cache-memory", "64M")
        gateway = stack.start_gateway(scheduler)
        worker.wait_ready()
        gateway.wait_ready()
        yield gateway.address
