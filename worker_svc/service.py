"""quire-worker: one model on one machine, served to a scheduler over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import NoReturn

from quire.internal.v1 import worker_pb2_grpc
from quire.v1 import types_pb2

from svc_common import config
from svc_common.channels import reachable_address
from svc_common.errors import UnavailableError
from svc_common.memory import trim
from svc_common.observe.admin import AdminServer
from svc_common.observe.inspection import Inspector
from svc_common.observe.logs import setup_logging
from svc_common.observe.tracing import make_tracer
from svc_common.scheduler_names import SchedulerNames
from svc_common.security.trust import Trust, check_reach, make_trust
from svc_common.serve import BindError, GrpcServer, run_service, settle_gc
from svc_common.tasks import cancel
from worker_svc.adapters import WorkerAdapters
from worker_svc.blocks import MovementSettings, WorkerBlocks
from worker_svc.bundle import Bundle
from worker_svc.check_model import SETTING_ERRORS, check_settings
from worker_svc.engine.config import EngineConfig, EngineInfo
from worker_svc.engine.nodes import Nodes
from worker_svc.engine.runner import Runner
from worker_svc.flags import make_parser, scheduler_addresses, sim_config
from worker_svc.lifecycle import DRAINING, Lifecycle
from worker_svc.metrics import WorkerReader
from worker_svc.node_links.leader_link import run_node
from worker_svc.node_links.node_server import NodeServer
from worker_svc.registration import Registration
from worker_svc.servicer import WorkerServicer
from worker_svc.simulator.runner import SimRunner
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.row_traces import RowTraces
from worker_svc.weights import WorkerWeights
from worker_svc.wire import capacity_to_proto

log = logging.getLogger(__name__)

SERVICE_NAME = "quire.internal.v1.WorkerService"
METHODS = (
    *("Lease", "StepStream", "StepBatch", "ListBlocks", "Drain", "GetWorkerBundle", "InspectWorker"),
    *("LoadWorkerAdapter", "UnloadWorkerAdapter", "SwapWorkerAdapter", "FetchBlocks", "WatchTier"),
    *("ChangeWeights", "WriteTensors"),
)
CALLERS = {f"{SERVICE_NAME}/{method}": {"scheduler"} for method in METHODS} | {f"{SERVICE_NAME}/ReadBlocks": {"worker"}}
EXIT_FAILED = 1
EXIT_BAD_SETTING = 2
DRAIN_ACK_TIMEOUT_S = 2.0
SETTLED_S = 0.2  # a step may still arrive after the last row has closed
ABANDONED_S = 3.0  # open rows without a step for this long are abandoned
DRAIN_POLL_S = 0.02
PROGRESS_STEP = 0.01
PROGRESS_LOG_STEP = 0.1  # `quire up` shows these lines


def make_runner(
    args: argparse.Namespace, settings: EngineConfig, progress: Callable[[float], None], nodes: Nodes | None
) -> Runner:
    """The simulation, or an engine with its model. Raises ValueError for settings that contradict the machine or the
    model."""
    if args.executor == "sim":
        return SimRunner(settings, sim_config(args))
    # After the flags are checked and the port is bound: importing torch takes seconds.
    log.info("starting: importing torch")  # `quire up` shows these lines
    from worker_svc.engine.backend import BackendUnavailableError
    from worker_svc.engine.engines import load_runner

    try:
        return load_runner(settings, progress, nodes)
    except BackendUnavailableError as error:
        raise ValueError(f"--backend {settings.backend}: {error}") from error


class WorkerProcess:
    """Everything of one worker process: server, model thread, registration."""

    def __init__(self, args: argparse.Namespace, settings: EngineConfig, bundle: Bundle, trust: Trust) -> None:
        self._args = args
        self._trust = trust
        self._settings = settings
        self._bundle = bundle
        self._lifecycle = Lifecycle()
        self._tracer = make_tracer(args, "worker", args.worker_id)
        row_traces = None if self._tracer is None else RowTraces(self._tracer, args.worker_id)
        self._executor = StepExecutor(worker_epoch=secrets.randbits(64), row_traces=row_traces)
        self._adapters = WorkerAdapters(lambda: self._executor.adapters, self._lifecycle, args.adapter_dir)
        names = [field.name for field in dataclasses.fields(MovementSettings)]
        movement = MovementSettings(**{name: getattr(args, name) for name in names})
        self._blocks = WorkerBlocks(self._executor, movement, trust.open_worker)
        self._weights = WorkerWeights(
            self._executor, self._lifecycle, args.weights_dir, self._announce, self._blocks.clear_tiers
        )
        self._servicer = WorkerServicer(
            executor=self._executor,
            lifecycle=self._lifecycle,
            bundle=bundle,
            drain=self._drain_for,
            inspector=Inspector(
                "worker",
                args.worker_id,
                args.shown_settings,
                metrics=lambda: self._admin.metrics_text(),
                memory=lambda: self._executor.memory,
            ),
            pipeline_depth=args.pipeline_depth,
            adapters=self._adapters,
            blocks=self._blocks,
            weights=self._weights,
        )
        self._server = GrpcServer(
            listen=args.listen,
            service_names=[SERVICE_NAME],
            credentials=trust.server_credentials(),
            has_reflection=not trust.is_on,
            admit=trust.admit(CALLERS),
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server.grpc)
        self._nodes = None if args.nnodes == 1 else _make_nodes(args, trust, self._stop_soon)
        self._admin = self._make_admin()
        self._registration: Registration | None = None
        self._info: EngineInfo | None = None
        self._drain_timeout_s: float = args.drain_timeout_s
        self._drained = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit_code = 0

    async def run(self) -> int:
        """Serve until SIGTERM or a Drain RPC. Returns the exit code of the process; raises BindError."""
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as closing:  # what starts first ends last
            if self._tracer is not None:
                closing.push_async_callback(self._tracer.close)
            closing.push_async_callback(self._admin.close)
            await self._admin.start()
            address = await self._server.start()
            folder = self._settings.model_dir
            log.info("worker %s listens on %s, %s; loading %s", self._args.worker_id, address, self._trust, folder)
            registering = asyncio.ensure_future(self._register(address))
            serving = asyncio.ensure_future(self._server.run_until_stopped(self._drain))
            loading = asyncio.ensure_future(self._load_or_cancel(serving))
            registering.add_done_callback(lambda _: self._cancel_if_failed(registering, serving))
            closing.push_async_callback(cancel, registering)
            if self._nodes is not None:
                closing.callback(self._nodes.stop)
            closing.callback(self._adapters.close)
            closing.callback(self._weights.close)
            closing.callback(self._executor.close)
            closing.push_async_callback(self._blocks.close)
            await asyncio.wait([serving])
        if self._exit_code:
            await self._server.grpc.stop(0)
            return self._exit_code
        serving.result()
        if not loading.done() or self._executor.num_in_flight:
            await cancel(loading)
            _exit_now()  # the model thread cannot be interrupted
        return 0

    def _make_admin(self) -> AdminServer:
        """Metrics; startup: the model is loaded; liveness: steps make progress; readiness: a scheduler leases it."""
        read = WorkerReader(
            self._executor,
            lambda: self._lifecycle.load_progress,
            self._is_ready,
            lambda: self._info,
            self._blocks.metrics,
        )
        return AdminServer(
            metrics_listen=self._args.metrics_listen,
            health_listen=self._args.health_listen,
            registry=read.registry(self._args, self._server.rpc),
            is_alive=lambda: self._executor.stalled_s < self._args.stuck_after_s,
            is_ready=self._is_ready,
            is_started=lambda: self._info is not None,
        )

    def _is_ready(self) -> bool:
        if not self._server.is_serving:
            return False
        registration = self._registration
        return registration is None or (registration.is_connected and self._executor.is_leased)

    # -- start -----------------------------------------------------------------------------------------------------

    async def _register(self, address: str) -> None:
        schedulers = scheduler_addresses(self._args)
        if not schedulers:
            return
        names = SchedulerNames(schedulers, lambda addresses: registration.update(addresses))
        registration = self._registration = Registration(
            worker_id=self._args.worker_id,
            address_towards=lambda scheduler: self._args.advertise or reachable_address(address, towards=scheduler),
            worker_epoch=self._executor.worker_epoch,
            lifecycle=self._lifecycle,
            work=self._executor,
            open_channel=self._trust.channels_to("scheduler"),
            on_unavailable=names.hurry,
            replaces_revision=self._args.replace_revision,
        )
        names.start()
        looking_up = asyncio.ensure_future(names.run())
        try:
            await registration.run()
        finally:
            await cancel(looking_up)

    def _cancel_if_failed(self, registering: asyncio.Future[None], serving: asyncio.Future[None]) -> None:
        if registering.cancelled() or (error := registering.exception()) is None:
            return
        log.error("the registration failed, which is a bug; this worker exits", exc_info=error)
        self._exit_code = EXIT_FAILED
        serving.cancel()

    async def _load_or_cancel(self, serving: asyncio.Future[None]) -> None:
        try:
            await self._load()
        except ValueError as error:  # with CheckpointError: a bad folder or setting, logged in one line
            log.error("cannot serve %s: %s", self._settings.model_dir, error)
            log.debug("traceback of the failure", exc_info=True)
            self._exit_code = EXIT_BAD_SETTING
        except Exception:
            log.exception("loading %s failed", self._settings.model_dir)
            self._exit_code = EXIT_FAILED
        if self._exit_code:
            serving.cancel()

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()

        def set_progress(fraction: float) -> None:
            loop.call_soon_threadsafe(self._lifecycle.set_progress, fraction)

        announce = _every(PROGRESS_STEP, set_progress)
        write_log = _every(PROGRESS_LOG_STEP, lambda fraction: log.info("loading weights: %d %%", 100 * fraction))

        def progress(fraction: float) -> None:
            announce(fraction)
            write_log(fraction)

        started_at = loop.time()
        info = await self._executor.load(lambda: make_runner(self._args, self._settings, progress, self._nodes))
        settle_gc()
        trim()
        self._adapters.announce()
        await self._announce(info)
        if not self._lifecycle.is_draining:
            self._server.set_serving(True)
        log.info("ready after %.1f s: %s", loop.time() - started_at, describe(info))

    async def _announce(self, info: EngineInfo) -> types_pb2.ModelInfo:
        """The model is loaded, or its weights have changed: open its tier, and register it. Returns it as a message."""
        self._info = info
        depth = self._args.pipeline_depth
        moves = await self._blocks.start(info)
        capacity = capacity_to_proto(info, bundle_digest=self._bundle.digest, pipeline_depth=depth, blocks=moves)
        self._lifecycle.set_ready(capacity)
        return capacity.info

    # -- shutdown --------------------------------------------------------------------------------------------------

    async def _drain_for(self, timeout_s: float) -> int:
        """The Drain RPC: like SIGTERM, with its own time limit. Returns the rows that were still open."""
        if timeout_s:
            self._drain_timeout_s = timeout_s
        self._server.stopping.set()
        await self._drained.wait()
        return self._executor.rows_used

    def _stop_soon(self) -> None:
        """Like SIGTERM; any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._server.stopping.set)

    async def _drain(self) -> None:
        self._lifecycle.set_draining()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                await self._wait_until_unused()
        if self._executor.rows_used:
            log.warning("exiting with %d open rows", self._executor.rows_used)
        self._servicer.end_streams(UnavailableError("the worker has drained and is shutting down"))
        self._drained.set()

    @property
    def _settled_s(self) -> float:
        return ABANDONED_S if self._executor.rows_used else SETTLED_S

    async def _wait_until_unused(self) -> None:
        if self._registration is not None:
            await self._registration.acknowledged(DRAINING, DRAIN_ACK_TIMEOUT_S)
        # No event reports how long the executor has been idle.
        while self._blocks.num_reads or self._executor.idle_s < self._settled_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)


def _make_nodes(args: argparse.Namespace, trust: Trust, drain: Callable[[], None]) -> NodeServer:
    return NodeServer(args.node_listen, trust, args.nnodes, args.node_timeout_s, drain)


def _every(step: float, report: Callable[[float], None]) -> Callable[[float], None]:
    """Calls `report` only when the fraction has grown by `step` since the last call, or is 1."""
    reported = 0.0

    def progress(fraction: float) -> None:
        nonlocal reported
        if fraction - reported >= step or fraction >= 1.0:
            reported = fraction
            report(fraction)

    return progress


def describe(info: EngineInfo) -> str:
    """One line about a loaded model."""
    numbers = f"{info.dtype}, weights {info.quantize}" if info.quantize else info.dtype
    numbers += "" if info.kv_cache_dtype == "auto" else f", KV {info.kv_cache_dtype}"
    return (
        f"{info.model} ({numbers}, {info.determinism}), max_model_len {info.max_model_len}, "
        f"{info.num_blocks} blocks of {info.block_size} tokens, {info.max_num_seqs} rows, backend {info.numerics}"
    )


def set_thread_environment(threads: int | None) -> None:
    """Set variables that OpenMP reads once, when torch is imported. Variables that the user has set are kept."""
    # Threads that spin at barriers would take the cores of the gateway and the scheduler on the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _exit_now() -> NoReturn:
    logging.shutdown()
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one worker; the `quire-worker` command. Exits with 2 and one line for a bad setting or model folder."""
    parser = make_parser()
    args = config.parse(parser, argv)
    args.worker_id = args.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    setup_logging("worker", args.log_format, args.log_level, instance=args.worker_id)
    set_thread_environment(args.threads)
    try:
        trust = make_trust(args, "worker")
        check_reach(args, trust, *(address for address in (args.listen, args.node_listen) if address))
        settings, bundle = check_settings(args)
        if not bundle.has_tokenizer:
            log.warning("%s has no tokenizer.json: requests must use token ids, text is not served", args.model)
        if args.node_rank:
            sys.exit(run_node(args, settings, trust))
        sys.exit(run_service(_run(args, settings, bundle, trust)))
    except (*SETTING_ERRORS, BindError) as error:
        log.error("%s", error)
        sys.exit(EXIT_BAD_SETTING)


async def _run(args: argparse.Namespace, settings: EngineConfig, bundle: Bundle, trust: Trust) -> int:
    return await WorkerProcess(args, settings, bundle, trust).run()


if __name__ == "__main__":
    main()
