"""The whole system as processes on the loopback interface: several of each kind, each of which may be killed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.internal.v1 import scheduler_pb2
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.v1 import types_pb2
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.chaos.parameters import ADAPTER
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack

KINDS = ("gateway", "scheduler", "worker", "redis")
POLL_S = 0.1
CALL_TIMEOUT_S = 2.0
READY_DEADLINE_S = 90.0
BUG_WORDS = (
    "Traceback (most recent call last)",
    " CRITICAL ",
    "was never retrieved",
    "was destroyed but it is pending",
)
# Reconnect quickly: the runner measures how long a process was unavailable.
CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
]

# Short enough that the longer freezes count as failures, and the shorter ones do not.
GATEWAY_FLAGS = ("--drain-timeout-s", "1", "--scheduler-patience-s", "60")
SCHEDULER_FLAGS = ("--heartbeat-timeout-s", "2", "--gateway-heartbeat-s", "0.5", "--drain-timeout-s", "1")
STALL_TIMEOUT_S = 1.5
HOST_MEMORY = "4M"  # evicts to the files below it
WORKER_FLAGS = (
    *("--dtype", "float32", "--num-blocks", "768", "--drain-timeout-s", "15"),
    *("--max-num-seqs", "64", "--max-num-batched-tokens", "256"),
)


class Cluster:
    """Owns the processes. Leaving the block ends them."""

    def __init__(
        self, folder: Path, *, gateways: int, schedulers: int, workers: int, executor: str, model: str = "demo"
    ) -> None:
        self.model_dir = demo_model_dir()
        self._model = model
        self.redis = RedisServer(folder)
        self._stack = Stack(folder)
        self._sizes = {"gateway": gateways, "scheduler": schedulers, "worker": workers}
        self._executor = executor
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.members: dict[str, list[Service]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*exc)
        self.redis.stop()

    def _start(self) -> None:
        self.redis.start()
        index = ("--redis", self.redis.url)
        flags_of = self._sim_flags if self._executor == "sim" else self._cpu_flags()
        schedulers = [self._stack.start_scheduler(*index, *SCHEDULER_FLAGS) for _ in range(self._sizes["scheduler"])]
        own = [word for scheduler in schedulers[1:] for word in ("--scheduler", scheduler.address)]
        workers = [
            self._stack.start_worker(
                schedulers[0], self.model_dir, *WORKER_FLAGS, *own, *self._tiers(number), *flags_of(number)
            )
            for number in range(self._sizes["worker"])
        ]
        flags = (*index, *GATEWAY_FLAGS)
        gateways = [self._stack.start_gateway(*schedulers, flags=flags) for _ in range(self._sizes["gateway"])]
        self.members = {"gateway": gateways, "scheduler": schedulers, "worker": workers}

    def _tiers(self, number: int) -> tuple[str, ...]:
        """Blocks move: a worker that is back reads its files, one that drains sends its streams' blocks ahead."""
        disk = ("--kv-disk", str(self._stack.folder / f"tier-{number}"), "--kv-disk-size", "128M")
        return ("--kv-transfer", *disk, *(("--kv-host-memory", HOST_MEMORY) if number % 2 == 0 else ()))

    def _sim_flags(self, number: int) -> tuple[str, ...]:
        return ("--executor", "sim", *(("--speculate", "suffix") if number % 2 == 0 else ()))

    def _cpu_flags(self) -> Callable[[int], tuple[str, ...]]:
        """Each worker proposes drafts in its own way, or none."""
        from tests.chaos.models import write_model  # imports transformers, which simulated runs do without

        model = write_model(self._stack.folder, self._model)
        self.model_dir = model.folder
        own = "--adapter-dir", str(model.adapter.parent), "--adapter", f"{ADAPTER}={model.adapter}"

        def flags(number: int) -> tuple[str, ...]:
            proposer = model.proposers[number % len(model.proposers)]
            return own if proposer is None else (*own, "--speculate", proposer)

        return flags

    @property
    def services(self) -> list[Service]:
        return self._stack.services

    async def connect(self) -> AsyncClient:
        """Wait until every process is ready. Returns a client of all gateways. Call once; call `close` at the end."""
        self._channels = {
            service.address: grpc.aio.insecure_channel(service.address, CHANNEL_OPTIONS) for service in self.services
        }
        for kind, services in self.members.items():
            for member in range(len(services)):
                await self.wait_recovered(kind, member)
        targets = ",".join(gateway.address for gateway in self.members["gateway"])
        return await AsyncClient.connect(targets, timeout_s=300.0, stall_timeout_s=STALL_TIMEOUT_S)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def wait_recovered(self, kind: str, member: int) -> None:
        """Wait until this member serves and every worker has a scheduler. Raises TimeoutError with the member's log."""
        if kind == "redis":
            await asyncio.to_thread(self.redis.wait_ready)
            return
        service = self.members[kind][member]
        deadline = asyncio.get_running_loop().time() + READY_DEADLINE_S
        while not (await self._is_serving(service) and (kind == "gateway" or await self._is_whole(kind, member))):
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"{service.name} not ready after {READY_DEADLINE_S:.0f} s\n{service.log()}")
            await asyncio.sleep(POLL_S)

    async def _is_whole(self, kind: str, member: int) -> bool:
        """Whether this worker (for a scheduler: every running worker) is ready at a scheduler."""
        ready = await self.ready_workers()
        workers = self.members["worker"]
        wanted = [workers[member]] if kind == "worker" else [worker for worker in workers if worker.is_running]
        return all(worker.name in ready for worker in wanted)

    async def ready_workers(self) -> set[str]:
        """The ids of workers that are ready at a scheduler."""
        lists = await asyncio.gather(*(self._ready_at(scheduler) for scheduler in self.members["scheduler"]))
        return set().union(*lists)

    async def _ready_at(self, scheduler: Service) -> set[str]:
        stub: Any = SchedulerServiceStub(self._channels[scheduler.address])
        try:
            request = scheduler_pb2.GetSchedulerStatusRequest()
            response = await stub.GetSchedulerStatus(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return set()
        return {worker.worker_id for worker in response.status.workers if worker.state == types_pb2.WORKER_STATE_READY}

    async def _is_serving(self, service: Service) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(self._channels[service.address])
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def complaints(self) -> list[tuple[str, str]]:
        """(service, words) for each log that contains a sign of a bug."""
        logs = [(service.name, service.log()) for service in self.services]
        return [(name, words) for name, log in logs for words in BUG_WORDS if words in log]

    def memory_mib(self) -> dict[str, float]:
        """The resident memory of every running process."""
        pids = {s.name: s.process.pid for s in self.services if s.process is not None and s.is_running}
        if self.redis.pid is not None:
            pids["redis"] = self.redis.pid
        return {name: _resident_mib(pid) for name, pid in pids.items()}


def _resident_mib(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return math.nan
