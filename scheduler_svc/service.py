"""The scheduler process: its parts, start, health, drain."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from quire.internal.v1 import scheduler_pb2_grpc

from prefix_index.index import PrefixChanges, PrefixIndex
from prefix_index.keys import make_owner
from prefix_index.redis_index import RedisPrefixIndex
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.flags import make_parser
from scheduler_svc.gateways.streams import Gateways
from scheduler_svc.history import SAMPLE_S, RequestTimelines
from scheduler_svc.metrics import SPECS, SchedulerReader
from scheduler_svc.other_schedulers import OtherSchedulers
from scheduler_svc.servicer import CALLERS, MAX_REGISTER_BYTES, SERVICE_NAME, SchedulerParts, SchedulerServicer
from scheduler_svc.step_loop import StepLoop
from scheduler_svc.workers.leased_worker import Dialer, LinkTimeouts
from scheduler_svc.workers.pool import WorkerPool
from scheduler_svc.workers.seals import read_block_keys
from svc_common.channels import SCHEDULER_PINGS, reachable_address
from svc_common.config import parse
from svc_common.memory import Intake, MemoryLimit
from svc_common.observe.admin import AdminServer
from svc_common.observe.inspection import Inspector
from svc_common.observe.logs import setup_logging
from svc_common.observe.metrics import ServiceMetrics, make_registry
from svc_common.observe.tracing import make_tracer
from svc_common.redis.server import redis_server
from svc_common.security.tls import TlsError, certificate_files
from svc_common.security.trust import Trust, check_reach, make_trust
from svc_common.serve import BindError, GrpcServer, run_service, settle_gc

log = logging.getLogger(__name__)

CHANGES_WAIT_S = 0.02  # see SchedulerConfig


def build(args: argparse.Namespace, trust: Trust) -> SchedulerParts:
    """Make all components. Raises ValueError for an invalid setting."""
    config = SchedulerConfig(
        max_waiting=args.max_waiting,
        max_waiting_tokens=args.max_waiting_tokens,
        max_input_bytes=args.max_input_bytes,
        watermark=args.watermark,
        aging_s=args.aging_s,
        aging_tokens_per_s=args.aging_tokens_per_s,
        burst_s=args.burst_ms / 1000,
        max_step_s=args.max_step_ms / 1000,
        changes_wait_s=CHANGES_WAIT_S,
        worker_patience_s=args.worker_patience_s,
        prefix_caching=not args.no_prefix_caching,
    )
    keys = read_block_keys(args.block_key_file)
    scheduler_id, epoch = args.scheduler_id or socket.gethostname(), secrets.randbits(64)
    index = make_index(args, make_owner(scheduler_id, epoch), lambda: step_loop.core.cached_prefixes())
    tracer = make_tracer(args, "scheduler", scheduler_id)
    step_loop = StepLoop(config, index, RequestTimelines(tracer))
    gateways = Gateways(step_loop, epoch, args.gateway_heartbeat_s, MemoryLimit.of_flag(args.max_memory_bytes))
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
    others = None
    if isinstance(index, RedisPrefixIndex):
        others = OtherSchedulers(step_loop, index, trust.channels_to("scheduler"))
        step_loop.lenders = others.follow
    return SchedulerParts(step_loop, index, gateways, pool, dialer, tracer, others)


def make_index(args: argparse.Namespace, owner: str, snapshot: Callable[[], Iterable[PrefixChanges]]) -> PrefixIndex:
    """The prefix index, in Redis if --redis is set. Raises RedisSettingsError."""
    server = redis_server(args)
    if server is None:
        return PrefixIndex()
    return RedisPrefixIndex(server, owner=owner, snapshot=snapshot, namespace=args.redis_namespace)


def _towards(address: str, redis: str) -> str:
    """The address at which a process near Redis, or near its first Sentinel, reaches this one."""
    host = urlsplit(redis).netloc.rpartition("@")[2].partition(",")[0]
    return reachable_address(address, towards=host if re.search(r":\d+$", host) else f"{host}:6379")


class SchedulerProcess:
    """Everything of one scheduler process. Raises TlsError."""

    def __init__(self, args: argparse.Namespace, parts: SchedulerParts, trust: Trust) -> None:
        self._args = args
        self._parts = parts
        self._trust = trust
        self._server = GrpcServer(
            listen=args.listen,
            service_names=[SERVICE_NAME],
            pings=SCHEDULER_PINGS,
            credentials=trust.server_credentials(),
            has_reflection=not trust.is_on,
            max_bytes={f"{SERVICE_NAME}/Register": MAX_REGISTER_BYTES},
            admit=trust.admit(CALLERS),
            intake=Intake(MemoryLimit.of_flag(args.max_memory_bytes)),
        )
        self._admin = self._make_admin()
        instance = args.scheduler_id or socket.gethostname()
        inspector = Inspector("scheduler", instance, args.shown_settings, self._admin.metrics_text)
        self._servicer = SchedulerServicer(parts, trust, inspector)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self._servicer, self._server.grpc)

    def _make_admin(self) -> AdminServer:
        """Metrics and probes. The scheduler is ready until it drains."""
        parts, args = self._parts, self._args
        redis = parts.index if isinstance(parts.index, RedisPrefixIndex) else None
        read = SchedulerReader(parts.step_loop, parts.pool, lambda: parts.gateways.num_attached, redis)
        has_vllm = args.metrics_compat != "none"
        metrics = ServiceMetrics("scheduler", SPECS, read, self._server.rpc, has_vllm, certificate_files(args))
        return AdminServer(
            metrics_listen=args.metrics_listen,
            health_listen=args.health_listen,
            registry=make_registry(metrics),
            is_alive=lambda: True,
            is_ready=lambda: self._server.is_serving,
        )

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT. Returns the process's exit status. Raises BindError. What starts first ends
        last.
        """
        parts, args, server = self._parts, self._args, self._server
        async with AsyncExitStack() as closing:
            if parts.tracer is not None:
                closing.push_async_callback(parts.tracer.close)
            closing.push_async_callback(self._admin.close)
            await self._admin.start()
            self._servicer.address = await server.start()
            closing.push_async_callback(parts.index.close)
            if isinstance(parts.index, RedisPrefixIndex):
                parts.index.scheduler_address = args.advertise or _towards(self._servicer.address, args.redis)
                parts.index.start()
            if parts.others is not None:
                closing.push_async_callback(parts.others.close)
            sampling = asyncio.create_task(keep_samples(parts.step_loop))
            closing.callback(sampling.cancel)
            steps = asyncio.create_task(parts.step_loop.run())
            steps.add_done_callback(lambda _: server.stopping.set())
            server.set_serving(True)
            settle_gc()
            index = "redis" if args.redis else "memory"
            log.info("listening on %s, %s, prefix index in %s", self._servicer.address, self._trust, index)
            await server.run_until_stopped(lambda: drain(parts, steps, args.drain_timeout_s))
            parts.step_loop.stop()
            return await _exit_status(steps)


async def keep_samples(step_loop: StepLoop) -> None:
    """Take a sample at each multiple of SAMPLE_S, until cancelled."""
    clock, times = asyncio.get_running_loop().time, step_loop.times
    while True:
        counters = (times.output_tokens, *times.first_token.counts)
        step_loop.samples.add(SAMPLE_S * round(clock() / SAMPLE_S), step_loop.core.load(), counters)
        await asyncio.sleep(SAMPLE_S - clock() % SAMPLE_S)


async def drain(parts: SchedulerParts, loop_task: asyncio.Task[None], timeout_s: float) -> None:
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


async def _exit_status(steps: asyncio.Task[None]) -> int:
    failure = (await asyncio.gather(steps, return_exceptions=True))[0]
    if failure is None:
        return 0
    log.critical("the step loop failed; this is a bug", exc_info=failure)
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
        return run_service(_run(args, parts, trust))
    except (BindError, TlsError) as error:
        parser.error(str(error))


async def _run(args: argparse.Namespace, parts: SchedulerParts, trust: Trust) -> int:
    return await SchedulerProcess(args, parts, trust).run()


if __name__ == "__main__":
    raise SystemExit(main())
