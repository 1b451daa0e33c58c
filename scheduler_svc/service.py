"""The scheduler's process: flags, servicer, start and drain."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.v1 import types_pb2

from prefix_index.changes import PrefixChanges
from prefix_index.index import NoPrefixIndex, PrefixIndex
from prefix_index.keys import make_owner
from prefix_index.redis_index import RedisPrefixIndex
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.flags import make_parser
from scheduler_svc.gateways.streams import Gateways
from scheduler_svc.metrics import SPECS, SchedulerReader
from scheduler_svc.request_traces import RequestTraces
from scheduler_svc.status import Snapshots, describe
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.leased_worker import Dialer, LinkTimeouts
from scheduler_svc.workers.pool import WorkerPool
from scheduler_svc.workers.seals import read_block_keys
from svc_common.admin import AdminServer
from svc_common.config import parse
from svc_common.errors import NotFoundError
from svc_common.inspection import Inspector
from svc_common.logs import setup_logging
from svc_common.metrics import ServiceMetrics, make_registry
from svc_common.own_certificate import certificate_files
from svc_common.redis_server import redis_server
from svc_common.serve import BindError, GrpcServer, run_service, settle_gc
from svc_common.tls import TlsError
from svc_common.tracing import make_tracer
from svc_common.trust import Trust, check_reach, make_trust

if TYPE_CHECKING:
    from svc_common.otlp import Tracer

log = logging.getLogger(__name__)

SERVICE_NAME = "quire.internal.v1.SchedulerService"
CALLERS = {
    f"/{SERVICE_NAME}/{method}": {role}
    for method, role in {
        "Attach": "gateway",
        "GetBundle": "gateway",
        "AbortRequests": "gateway",
        "GetSchedulerStatus": "gateway",
        "GetPools": "gateway",
        "AddAdapter": "gateway",
        "RemoveAdapter": "gateway",
        "GetAdapters": "gateway",
        "InspectScheduler": "gateway",
        "ReleaseWorker": "gateway",
        "Register": "worker",
        "CountWorkers": "worker",
    }.items()
}
BUNDLE_PIECE_BYTES = 1 << 20
CHANGES_WAIT_S = 0.02  # see SchedulerConfig
MAX_REGISTER_BYTES = 256 << 10  # of one message of a worker, with the names and paths of its adapters

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of one scheduler."""

    step_loop: StepLoop
    index: PrefixIndex
    gateways: Gateways
    pool: WorkerPool
    dialer: Dialer
    tracer: Tracer | None = None


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Implements SchedulerService: decodes a request, calls one component, encodes the response."""

    def __init__(self, parts: Parts, trust: Trust, inspector: Inspector) -> None:
        self._parts = parts
        self._inspector = inspector
        self._snapshots = Snapshots(parts.step_loop, time.monotonic)
        self._trust = trust
        self.address = ""

    async def Attach(
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        async for response in self._parts.gateways.attach(request_iterator):
            yield response

    async def Register(
        self, request_iterator: AsyncIterator[scheduler_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        may_use_id = functools.partial(self._trust.check_worker_id, context)
        async for response in self._parts.pool.register(request_iterator, may_use_id):
            yield response

    async def CountWorkers(
        self, request: scheduler_pb2.CountWorkersRequest, context: Context
    ) -> scheduler_pb2.CountWorkersResponse:
        pool = self._parts.pool
        served = pool.served or types_pb2.ModelInfo()
        return scheduler_pb2.CountWorkersResponse(
            num_workers=pool.num_members, model=served.model, revision=served.revision
        )

    async def GetBundle(
        self, request: scheduler_pb2.GetBundleRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.GetBundleResponse]:
        data = self._parts.dialer.bundles.get(request.digest)
        if data is None:
            raise NotFoundError(
                f"no bundle has digest {request.digest.hex() or '(empty)'}; use the digest in Welcome.info",
                field="digest",
            )
        for start in range(0, len(data), BUNDLE_PIECE_BYTES):
            yield scheduler_pb2.GetBundleResponse(data=data[start : start + BUNDLE_PIECE_BYTES])

    async def ReleaseWorker(
        self, request: scheduler_pb2.ReleaseWorkerRequest, context: Context
    ) -> scheduler_pb2.ReleaseWorkerResponse:
        num_moved = await self._parts.pool.release(request.worker_id, request.timeout_s)
        return scheduler_pb2.ReleaseWorkerResponse(num_moved=num_moved)

    async def AddAdapter(
        self, request: scheduler_pb2.AddAdapterRequest, context: Context
    ) -> scheduler_pb2.AddAdapterResponse:
        return scheduler_pb2.AddAdapterResponse(adapter=await self._parts.pool.add_adapter(request.name, request.path))

    async def RemoveAdapter(
        self, request: scheduler_pb2.RemoveAdapterRequest, context: Context
    ) -> scheduler_pb2.RemoveAdapterResponse:
        return scheduler_pb2.RemoveAdapterResponse(was_loaded=await self._parts.pool.remove_adapter(request.name))

    async def GetAdapters(
        self, request: scheduler_pb2.GetAdaptersRequest, context: Context
    ) -> scheduler_pb2.GetAdaptersResponse:
        return scheduler_pb2.GetAdaptersResponse(adapters=self._parts.pool.describe_adapters())

    async def AbortRequests(
        self, request: scheduler_pb2.AbortRequestsRequest, context: Context
    ) -> scheduler_pb2.AbortRequestsResponse:
        aborted_ids = await self._parts.step_loop.abort(request.request_ids)
        return scheduler_pb2.AbortRequestsResponse(aborted_ids=aborted_ids)

    async def GetSchedulerStatus(
        self, request: scheduler_pb2.GetSchedulerStatusRequest, context: Context
    ) -> scheduler_pb2.GetSchedulerStatusResponse:
        return scheduler_pb2.GetSchedulerStatusResponse(
            status=describe(self._parts.step_loop, self._parts.pool, self._parts.index, self.address)
        )

    async def GetPools(
        self, request: scheduler_pb2.GetPoolsRequest, context: Context
    ) -> scheduler_pb2.GetPoolsResponse:
        return self._snapshots.newest()

    async def InspectScheduler(
        self, request: scheduler_pb2.InspectSchedulerRequest, context: Context
    ) -> scheduler_pb2.InspectSchedulerResponse:
        times = request.seconds, request.hz
        if request.worker_id:
            data = await self._parts.pool.inspect(request.worker_id, request.kind, *times)
        else:
            data = await self._inspector.inspect(request.kind, *times)
        return scheduler_pb2.InspectSchedulerResponse(data=data)


def build(args: argparse.Namespace, trust: Trust) -> Parts:
    """Make all components. Raises ValueError for an invalid setting."""
    config = SchedulerConfig(
        max_waiting=args.max_waiting,
        max_waiting_tokens=args.max_waiting_tokens,
        max_input_bytes=args.max_input_bytes,
        watermark=args.watermark,
        aging_s=args.aging_s,
        aging_tokens_per_s=args.aging_tokens_per_s,
        burst_s=args.burst_ms / 1000,
        changes_wait_s=CHANGES_WAIT_S,
        worker_patience_s=args.worker_patience_s,
        prefix_caching=not args.no_prefix_caching,
    )
    keys = read_block_keys(args.block_key_file)
    scheduler_id, epoch = args.scheduler_id or socket.gethostname(), secrets.randbits(64)
    index = make_index(args, make_owner(scheduler_id, epoch), lambda: step_loop.core.cached_prefixes())
    tracer = make_tracer(args, "scheduler", scheduler_id)
    step_loop = StepLoop(config, index, None if tracer is None else RequestTraces(tracer))
    gateways = Gateways(step_loop, epoch, args.gateway_heartbeat_s)
    timeouts = LinkTimeouts(heartbeat_s=args.heartbeat_timeout_s, step_s=args.step_timeout_s)
    dialer = Dialer(
        index, scheduler_id, timeouts, step_loop.times.steps, trust.open_worker, keys, args.max_bundle_bytes
    )
    pool = WorkerPool(
        step_loop,
        dialer,
        heartbeat_timeout_s=args.heartbeat_timeout_s,
        on_change=gateways.announce,
        revision=args.revision,
    )
    return Parts(step_loop, index, gateways, pool, dialer, tracer)


def make_index(args: argparse.Namespace, owner: str, snapshot: Callable[[], Iterable[PrefixChanges]]) -> PrefixIndex:
    """The prefix index, in Redis if --redis is set. Raises RedisSettingsError."""
    server = redis_server(args)
    if server is None:
        return NoPrefixIndex()
    return RedisPrefixIndex(server, owner=owner, snapshot=snapshot, namespace=args.redis_namespace)


async def serve(args: argparse.Namespace, parts: Parts, trust: Trust) -> int:
    """Run until SIGTERM or SIGINT. Returns the process's exit status. Raises BindError or TlsError."""
    server = GrpcServer(
        listen=args.listen,
        service_names=[SERVICE_NAME],
        credentials=trust.server_credentials(),
        has_reflection=not trust.is_on,
        max_bytes={f"{SERVICE_NAME}/Register": MAX_REGISTER_BYTES},
        interceptors=trust.interceptors(CALLERS),
    )
    admin = make_admin(args, parts, server)
    instance = args.scheduler_id or socket.gethostname()
    servicer = SchedulerServicer(
        parts, trust, Inspector("scheduler", instance, args.shown_settings, admin.metrics_text)
    )
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server.grpc)
    await admin.start()
    servicer.address = await server.start()
    if isinstance(parts.index, RedisPrefixIndex):
        parts.index.start()
    loop_task = asyncio.create_task(parts.step_loop.run())
    loop_task.add_done_callback(lambda _: server.stopping.set())
    server.set_serving(True)
    settle_gc()
    index = "redis" if args.redis else "memory"
    log.info("listening on %s, %s, prefix index in %s", servicer.address, trust, index)
    await server.run_until_stopped(lambda: drain(parts, loop_task, args.drain_timeout_s))
    exit_code = await _finish(parts, loop_task)
    await admin.close()
    if parts.tracer is not None:
        await parts.tracer.close()
    return exit_code


def make_admin(args: argparse.Namespace, parts: Parts, server: GrpcServer) -> AdminServer:
    """Metrics and probes. The scheduler is ready until it drains."""
    redis = parts.index if isinstance(parts.index, RedisPrefixIndex) else None
    read = SchedulerReader(parts.step_loop, parts.pool, lambda: parts.gateways.num_attached, redis)
    has_vllm = args.metrics_compat != "none"
    metrics = ServiceMetrics("scheduler", SPECS, read, server.rpc, has_vllm, certificate_files(args))
    return AdminServer(
        metrics_listen=args.metrics_listen,
        health_listen=args.health_listen,
        registry=make_registry(metrics),
        is_alive=lambda: True,
        is_ready=lambda: server.is_serving,
    )


async def drain(parts: Parts, loop_task: asyncio.Task[None], timeout_s: float) -> None:
    """Refuse new requests, let running ones finish for `timeout_s`, then end every stream."""
    parts.gateways.announce_stop()
    parts.step_loop.refuse_new("this scheduler is stopping; retry on another scheduler")
    idle = asyncio.create_task(parts.step_loop.wait_idle())
    await asyncio.wait([idle, loop_task], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        log.warning("some requests did not finish during the drain; their gateways move them to other schedulers")
    idle.cancel()
    parts.gateways.close()
    await parts.pool.close()


async def _finish(parts: Parts, loop_task: asyncio.Task[None]) -> int:
    parts.step_loop.stop()
    result = (await asyncio.gather(loop_task, return_exceptions=True))[0]
    await parts.index.close()
    if result is None:
        return 0
    log.critical("the step loop failed; this is a bug", exc_info=result)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """The `quire-scheduler` command."""
    parser = make_parser()
    args = parse(parser, argv)
    setup_logging("scheduler", args.log_format, args.log_level, instance=args.scheduler_id or socket.gethostname())
    try:
        trust = make_trust(args, "scheduler", args.internal_tls_worker_name)
        check_reach(args, trust, args.listen)
        parts = build(args, trust)
    except ValueError as error:
        parser.error(str(error))
    try:
        return run_service(serve(args, parts, trust))
    except (BindError, TlsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
