"""The services as simulated processes: real classes, connected as in their server modules."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.internal.v1 import scheduler_pb2_grpc, worker_pb2_grpc
from quire.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.request.models import BundleCache
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from gateway_svc.servicer import make_servicer
from prefix_index.index import PrefixIndex
from prefix_index.reader import RedisPrefixReader
from prefix_index.redis_index import RedisPrefixIndex
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gateways.streams import Gateways
from scheduler_svc.service import drain as drain_scheduler
from scheduler_svc.servicer import SchedulerParts, SchedulerServicer
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.leased_worker import Dialer, LinkTimeouts
from scheduler_svc.workers.pool import WorkerPool
from svc_common.observe.inspection import Inspector
from svc_common.security.trust import Trust
from tests.sim.symbolic_worker import SymbolicWorker
from tests.sim.system.network import Server
from tests.sim.system.virtual_loop import Process
from tests.sim.system.worker import ModelThread, SymbolicRunner, engine_info
from worker_svc.bundle import Bundle
from worker_svc.lifecycle import Lifecycle
from worker_svc.registration import Registration
from worker_svc.service import WorkerProcess
from worker_svc.servicer import WorkerServicer
from worker_svc.steps.executor import StepExecutor
from worker_svc.wire import capacity_to_proto

if TYPE_CHECKING:
    from tests.sim.system.world import World

NO_INSPECTOR = Inspector("simulated", "", "", lambda: b"")


class Health(health_pb2_grpc.HealthServicer):
    """Health with the serving status of the process's server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._server.is_serving else status.NOT_SERVING)


class Service:
    """One service through all its lives: `start` after `kill` is a restart."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.address = f"{name}:1"
        self.num_lives = 0
        self.process: Process
        self.server: Server

    @property
    def is_up(self) -> bool:
        return not self.process.is_dead

    @property
    def is_running(self) -> bool:
        """Neither dead nor frozen."""
        return self.is_up and not self.process.is_frozen

    def start(self) -> None:
        self.num_lives += 1
        self.process = Process(self.name, self.world.loop)
        self.world.network.processes[self.name] = self.process
        self.server = Server(self.world.network, self.process, self.address)
        health_pb2_grpc.add_HealthServicer_to_server(Health(self.server), self.server)
        self.process.context.run(self._build)

    def kill(self, *, is_silent: bool = False) -> None:
        """SIGKILL. Silent: its host is gone too, so that no peer gets a FIN."""
        if self.is_up:
            self.world.network.lose(self.process, is_silent=is_silent)
            self.process.kill()

    def _build(self) -> None:
        raise NotImplementedError


class SchedulerService(Service):
    """quire-scheduler."""

    def _build(self) -> None:
        world, epoch = self.world, self.world.rng.getrandbits(64)
        sizes = world.setup
        index: PrefixIndex = PrefixIndex()
        if sizes.uses_redis:
            index = RedisPrefixIndex(
                "redis://nowhere",
                owner=f"{self.name}:{epoch:016x}",
                snapshot=lambda: self.step_loop.core.cached_prefixes(),
            )
            index.start()
        self.step_loop = StepLoop(sizes.scheduler_config, index)
        self.gateways = Gateways(self.step_loop, epoch, sizes.gateway_heartbeat_s)
        timeouts = LinkTimeouts(heartbeat_s=sizes.heartbeat_timeout_s, step_s=sizes.step_timeout_s)
        dialer = Dialer(index, self.name, timeouts, open_worker=lambda address, _: world.network.channel(address))
        self.pool = WorkerPool(
            self.step_loop, dialer, heartbeat_timeout_s=sizes.heartbeat_timeout_s, on_change=self.gateways.announce
        )
        self.parts = SchedulerParts(self.step_loop, index, self.gateways, self.pool, dialer)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
            SchedulerServicer(self.parts, Trust("scheduler"), NO_INSPECTOR), self.server
        )
        self.loop_task = self.process.start(self.step_loop.run())

    @property
    def core(self) -> Scheduler:
        return self.step_loop.core

    def drain(self, timeout_s: float) -> None:
        """SIGTERM: it drains and ends."""
        self.server.is_serving = False
        self.process.start(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        await drain_scheduler(self.parts, self.loop_task, timeout_s)
        self.world.loop.call_soon(self.kill)


class WorkerService(Service):
    """quire-worker."""

    def __init__(self, world: World, name: str, capacity: WorkerCapacity) -> None:
        super().__init__(world, name)
        self.capacity = capacity
        self.slow_next_s = 0.0  # delay of the next step

    def _build(self) -> None:
        world, setup = self.world, self.world.setup
        epoch = world.rng.getrandbits(63) | 1
        thread = ModelThread(self.process)
        self.executor = StepExecutor(worker_epoch=epoch, on_fatal=world.loop.fail)
        self.executor._thread = thread
        self.symbolic = SymbolicWorker(self.capacity, world.chains, setup.vocab_size)
        self.symbolic.failed_requests = world.failed_requests
        info = engine_info(self.capacity, setup.vocab_size, setup.eos_token_ids)
        self.runner = SymbolicRunner(
            self.symbolic,
            thread,
            info,
            group_of=world.group_of,
            acked=lambda step_id: world.acked_when_sent(epoch, self.executor.current_lease().epoch, step_id),
            step_s=self._step_s,
        )
        self.executor._runner = self.runner
        self.lifecycle = Lifecycle()
        bundle = Bundle(b"", b"", ())
        self.servicer = WorkerServicer(
            executor=self.executor,
            lifecycle=self.lifecycle,
            bundle=bundle,
            drain=self._leave,
            inspector=NO_INSPECTOR,
            pipeline_depth=self.capacity.pipeline_depth,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.server)
        self.lifecycle.set_ready(
            capacity_to_proto(info, bundle_digest=b"", pipeline_depth=self.capacity.pipeline_depth)
        )
        self.registration = Registration(
            schedulers=[scheduler.address for scheduler in world.schedulers],
            worker_id=self.name,
            address_towards=lambda scheduler: self.address,
            worker_epoch=epoch,
            lifecycle=self.lifecycle,
            work=self.executor,
            busy_move_s=world.setup.busy_move_s,
            rng=Random(world.rng.random()),
            open_channel=world.network.channel,
        )
        self._shell = self._make_shell()
        self.process.start(self.registration.run())

    def _step_s(self, query_lens: Any) -> float:
        extra, self.slow_next_s = self.slow_next_s, 0.0
        return extra + self.world.setup.step_s * (0.5 + self.world.rng.random()) if len(query_lens) else 0.0

    async def _leave(self, timeout_s: float) -> int:
        self.drain(timeout_s)
        await self._shell._drained.wait()
        return self.executor.rows_used

    def drain(self, timeout_s: float) -> None:
        """SIGTERM: its rows move to other workers, then it exits."""
        self._shell._drain_timeout_s = timeout_s
        if not self.lifecycle.is_draining:
            self.server.is_serving = False
            self.process.start(self._drain())

    async def _drain(self) -> None:
        await self._shell._drain()
        self.world.loop.call_later(0.05, self.kill)

    def _make_shell(self) -> WorkerProcess:
        """A WorkerProcess with only the parts that a drain uses; it needs no flags and no port."""
        shell = WorkerProcess.__new__(WorkerProcess)
        shell._lifecycle, shell._executor, shell._servicer = self.lifecycle, self.executor, self.servicer
        shell._registration, shell._blocks = self.registration, self.servicer._blocks
        shell._drained = asyncio.Event()
        return shell


class GatewayService(Service):
    """quire-gateway."""

    def _build(self) -> None:
        world = self.world
        bundles = BundleCache()
        self.clients = [
            SchedulerClient(
                s.address,
                gateway_id=f"{self.name}-{self.num_lives}",
                bundles=bundles,
                open_channel=world.network.channel,
            )
            for s in world.schedulers
        ]
        self.dispatcher = Dispatcher(self.clients, patience_s=world.setup.patience_s)
        self.servicer = make_servicer(
            ModelDirectory(self.clients),
            self.dispatcher,
            PromptReaders(Threads(), TemplateRenderer()),
            GrammarChecker(),
            OpenStreams(1000, 1 << 30),
            reader=self._reader(),
        )
        self.streams = self.servicer.generation.streams
        add_InferenceServiceServicer_to_server(self.servicer, self.server)
        for client in self.clients:
            self.process.start(client.run())

    def _reader(self) -> RedisPrefixReader | None:
        if not self.world.setup.uses_redis:
            return None
        reader = RedisPrefixReader("redis://nowhere")
        reader.start()
        return reader

    def drain(self, timeout_s: float) -> None:
        """SIGTERM."""
        self.server.is_serving = False
        self.process.start(self._drain(timeout_s))

    async def _drain(self, timeout_s: float) -> None:
        await self.streams.drain(timeout_s)
        self.world.loop.call_later(0.05, self.kill)
