"""The system under attack: gateways, schedulers and workers with tokens and keys, and all of their ports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from quire.internal.v1 import scheduler_pb2
from quire.internal.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.v1 import types_pb2
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from svc_common.serve import REFLECTION_V1
from tests.hostile import examples
from tests.processes.ports import free_port
from tests.processes.stack import POLL_S, READY_DEADLINE_S, Service, Stack

TOKENS = {role: f"{role}-token-0123456789" for role in ("gateway", "scheduler", "worker")}
API_KEY, OPERATOR_KEY = "sk-attacker-0123456789", "sk-operator-0123456789"
GOOD_KEY = "sk-good-0123456789"
SIM = ("--executor", "sim", "--sim-step-ms", "25", "--num-blocks", "2048", "--max-num-seqs", "64")
STRANGER: Mapping[str, str] = {}  # no credentials for any method


def bearer(credential: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {credential}"),)


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one process. `credentials`: what an insider sends, by method name; "" is every other method."""

    name: str
    service: Service
    address: str
    services: Sequence[ServiceDescriptor] = ()  # empty: the port speaks HTTP/1
    credentials: Mapping[str, str] = field(default_factory=dict)
    path: str = "/metrics"  # HTTP/1: a path that an insider may get

    @property
    def is_grpc(self) -> bool:
        return bool(self.services)


async def _with_its_services(port: Port) -> Port:
    """The port with all services that reflection names, so that a new one is attacked."""
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async with grpc.aio.insecure_channel(port.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(asked, timeout=READY_DEADLINE_S, metadata=bearer(port.credentials[""]))
        (answer,) = [answer async for answer in answers]
    names = sorted(found.name for found in answer.list_services_response.service)
    pool = descriptor_pool.Default()
    return replace(port, services=[pool.FindServiceByName(name) for name in names if name != REFLECTION_V1])


async def ready_workers(scheduler: Service) -> set[str]:
    """The ids of the workers that this scheduler can use."""
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = SchedulerServiceStub(channel)
        try:
            response = await stub.GetSchedulerStatus(
                scheduler_pb2.GetSchedulerStatusRequest(), timeout=5.0, metadata=bearer(TOKENS["gateway"])
            )
        except grpc.RpcError:
            return set()
    return {w.worker_id for w in response.status.workers if w.state == types_pb2.WORKER_STATE_READY}


class Target:
    """Owns the processes. Leaving the block ends them."""

    def __init__(self, folder: Path, *, gateways: int = 2, schedulers: int = 2, workers: int = 2) -> None:
        self.stack = Stack(folder)
        self.model_dir = demo_model_dir()
        self._folder = folder
        self._sizes = (gateways, schedulers, workers)
        self.ports: list[Port] = []
        self.gateways: list[Service] = []
        self.schedulers: list[Service] = []
        self.workers: list[Service] = []

    def __enter__(self) -> Target:
        try:
            self._start()
        except BaseException:
            self.stack.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.__exit__(*exc)

    @property
    def services(self) -> list[Service]:
        return self.stack.services

    def port(self, name: str) -> Port:
        return next(port for port in self.ports if port.name == name)

    async def connect(self) -> AsyncClient:
        """A client of all gateways for the good streams, once every worker is leased."""
        for gateway in self.gateways:
            await asyncio.to_thread(gateway.wait_ready)
        targets = ",".join(gateway.address for gateway in self.gateways)
        client = await AsyncClient.connect(targets, timeout_s=300.0, api_key=GOOD_KEY)
        await self.wait_leased()
        self.ports = [
            await _with_its_services(port) if examples.REFLECTION in port.services else port for port in self.ports
        ]
        return client

    async def wait_leased(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until each worker is leased by its scheduler. Raises TimeoutError with all logs."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        while not all(await asyncio.gather(*map(self._is_whole, range(len(self.schedulers))))):
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"not all workers are leased after {deadline_s:g} s\n{self.stack.logs()}")
            await asyncio.sleep(POLL_S)

    async def _is_whole(self, index: int) -> bool:
        """Whether a scheduler has its workers, and they are ready."""
        expected = {worker.name for worker in self.workers[index :: len(self.schedulers)]}
        return expected <= await ready_workers(self.schedulers[index])

    def start_worker(self, module: str, *arguments: str) -> Service:
        """Start one more worker of the first scheduler with another entry point, for a test."""
        first = self.workers[0].command
        at = first.index("-m") + 2
        address = f"127.0.0.1:{free_port()}"
        flags = ["--listen", address, "--scheduler", self.schedulers[0].address, "--worker-id", "another"]
        flags += ["--model", str(self.model_dir), "--threads", "1", *SIM, "--token-file", str(self._folder / "tokens")]
        service = Service(
            "another", [*first[: at - 1], module, *arguments, *flags], address, self._folder / "another.log"
        )
        self.services.append(service)
        service.start()
        return service

    # -- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        token_file, keys, admin_keys, block_key = self._write_secrets()
        trust = ("--token-file", str(token_file))
        num_gateways, num_schedulers, num_workers = self._sizes
        for _ in range(num_schedulers):
            service = self._probed(self.stack.start_scheduler, *trust, "--block-key-file", str(block_key))
            self.schedulers.append(service)
            credentials = {"": TOKENS["gateway"], "Register": TOKENS["worker"]}
            self._add(service, "grpc", service.address, [examples.SCHEDULER], credentials)
        for index in range(num_workers):
            scheduler = self.schedulers[index % num_schedulers]
            service = self._probed(self.stack.start_worker, scheduler, self.model_dir, *SIM, *trust)
            self.workers.append(service)
            self._add(service, "grpc", service.address, [examples.WORKER], {"": TOKENS["scheduler"]})
        for _ in range(num_gateways):
            self._start_gateway(trust, ("--api-keys", str(keys), "--admin-keys", str(admin_keys)))

    def _start_gateway(self, trust: tuple[str, ...], keys: tuple[str, ...]) -> None:
        http, operations, console = (f"127.0.0.1:{free_port()}" for _ in range(3))
        own = ("--http-listen", http, "--admin-listen", operations, "--console-listen", console, "--max-streams", "512")
        own += ("--batch-dir", str(self.stack.folder / "batches"))
        own += ("--grpc-compat", "loads")

        def start(*flags: str) -> Service:
            return self.stack.start_gateway(*self.schedulers, flags=(*trust, *keys, *own, *flags))

        service = self._probed(start)
        self.gateways.append(service)
        self._add(
            service,
            "grpc",
            service.address,
            [
                examples.INFERENCE,
                examples.SESSIONS,
                examples.KSERVE,
                examples.ENGINE,
                examples.ORCA,
                examples.REFLECTION,
            ],
            {"": API_KEY},
        )
        self._add(
            service,
            "operations",
            operations,
            [examples.ADMIN, examples.ROLLOUTS, examples.REFLECTION],
            {"": OPERATOR_KEY},
        )
        self.ports.append(
            Port(f"{service.name}/http", service, http, (), {"": API_KEY, "operator": OPERATOR_KEY}, "/v1/models")
        )

        credentials = {"": OPERATOR_KEY}
        self.ports.append(Port(f"{service.name}/console", service, console, (), credentials, "/console/api/state"))

    def _probed(self, start: object, *flags: object) -> Service:
        """Start a service with ports for metrics and probes."""
        metrics, health = (f"127.0.0.1:{free_port()}" for _ in range(2))
        service: Service = start(*flags, "--metrics-listen", metrics, "--health-listen", health)  # type: ignore[operator]
        self.ports.append(Port(f"{service.name}/metrics", service, metrics))
        self.ports.append(Port(f"{service.name}/health", service, health, (examples.HEALTH,)))
        return service

    def _add(
        self,
        service: Service,
        kind: str,
        address: str,
        services: Sequence[ServiceDescriptor],
        credentials: Mapping[str, str],
    ) -> None:
        name = f"{service.name}/{kind}"
        self.ports.append(Port(name, service, address, (*services, examples.HEALTH), credentials))

    def _write_secrets(self) -> tuple[Path, Path, Path, Path]:
        tokens, keys, admin_keys, block_key = (
            self._folder / name for name in ("tokens", "keys", "admin-keys", "block-key")
        )
        tokens.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
        block_key.write_text("5a" * 32)
        for folder in (keys, admin_keys):
            folder.mkdir()
        (keys / "good").write_text(GOOD_KEY)
        (keys / "attacker").write_text(API_KEY)
        (admin_keys / "operator").write_text(OPERATOR_KEY)
        return tokens, keys, admin_keys, block_key
