"""quire-worker: one model on one machine, served to a scheduler over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from quire.v1 import worker_pb2_grpc

from svc_common import config
from svc_common.admin import AdminServer
from svc_common.errors import UnavailableError
from svc_common.logs import setup_logging
from svc_common.metrics import ServiceMetrics, make_registry
from svc_common.serve import BindError, GrpcServer, run_service, settle_gc
from worker_svc.bundle import Bundle, ModelFolderError, read_bundle
from worker_svc.engine.config import ATTENTION, CUDA_GRAPHS, DTYPES, KV_CACHE_DTYPES, EngineConfig, EngineInfo
from worker_svc.executor import Runner, StepExecutor
from worker_svc.lifecycle import DRAINING, Lifecycle
from worker_svc.metrics import SPECS, WorkerReader
from worker_svc.registration import Registration
from worker_svc.servicer import WorkerServicer
from worker_svc.sim_executor import SimConfig, SimRunner
from worker_svc.wire import capacity_to_proto

log = logging.getLogger(__name__)

SERVICE_NAME = "quire.v1.WorkerService"
EXIT_FAILED = 1
EXIT_BAD_SETTING = 2
TOLD_TIMEOUT_S = 2.0
SETTLED_S = 0.2  # a step may be on its way when the last row has closed
ABANDONED_S = 3.0  # rows that nobody has stepped for so long belong to nobody
DRAIN_POLL_S = 0.02
PROGRESS_STEP = 0.01
PROGRESS_LOG_STEP = 0.1  # `quire up` shows these lines

EPILOG = """examples:
  quire-worker --model ./Qwen3-0.6B --scheduler 127.0.0.1:50052 --dtype bfloat16 --kv-cache-memory 2G
  quire-worker --model ./Qwen3-0.6B --scheduler sched-0:50052,sched-1:50052
  quire-worker --model ./Qwen3-0.6B --scheduler 127.0.0.1:50052 --executor sim --sim-step-ms 20
"""


def make_parser() -> argparse.ArgumentParser:
    """All flags of a worker."""
    parser = config.make_parser(
        "worker", "Loads one Hugging Face checkpoint, holds its KV blocks and runs its steps for a scheduler.", EPILOG
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="folder with config.json, *.safetensors"
    )
    model.add_argument("--model-name", metavar="NAME", help="name that clients ask for; unset: the folder's name")
    model.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and KV; auto: the model's, but CPUs serve float16 as bfloat16; float16: backend cuda only",
    )
    model.add_argument(
        "--quantize",
        choices=("int8",),
        help="int8: round weights, and what they are multiplied with, to 8 bits: faster, less exact; all workers of a "
        "model must agree; unset: not at all",
    )
    model.add_argument(
        "--determinism",
        choices=("exact", "best_effort"),
        default="exact",
        help="exact: a request's tokens never depend on what else runs",
    )
    model.add_argument(
        "--max-model-len",
        type=_at_least_1,
        metavar="N",
        help="longest prompt + output; unset: what model and pool allow",
    )
    pool = parser.add_argument_group("KV pool and batches")
    pool.add_argument(
        "--block-size", type=_at_least_1, default=16, metavar="N", help="tokens per block, a power of two"
    )
    pool.add_argument("--num-blocks", type=_at_least_1, metavar="N", help="blocks; goes before --kv-cache-memory")
    pool.add_argument(
        "--kv-cache-memory",
        type=config.size_bytes,
        metavar="SIZE",
        help="bytes for blocks (2G, 512M); unset: 1G, or half of the free memory if that is less",
    )
    pool.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="cuda: fp8 keeps keys and values in 8 bits: twice as many fit, and reading them takes half as long; "
        "all workers of a model must agree; auto: as --dtype",
    )
    pool.add_argument("--max-num-seqs", type=_at_least_1, default=64, metavar="N", help="sequences that run at once")
    pool.add_argument("--max-num-batched-tokens", type=_at_least_1, default=1024, metavar="N", help="tokens per step")
    compute = parser.add_argument_group("compute")
    compute.add_argument(
        "--backend", default="cpu", metavar="NAME", help="what computes: cpu, cuda, or reference (plain torch, slow)"
    )
    compute.add_argument(
        "--attention",
        choices=ATTENTION,
        default="auto",
        help="cuda: our kernel (triton), flash-attn (wants --block-size 256) or plain torch; auto: what suits",
    )
    compute.add_argument(
        "--gpu-memory-utilization",
        type=config.in_range(float, 0.01, 1),
        default=0.9,
        metavar="PART",
        help="cuda: part of the device's memory for weights, one step and the KV pool",
    )
    compute.add_argument(
        "--tensor-parallel-size", type=_at_least_1, default=1, metavar="N", help="cuda: devices that share one model"
    )
    compute.add_argument(
        "--cuda-graphs",
        choices=CUDA_GRAPHS,
        default="start",
        help="cuda: steps that the host launches as one, made at the start, lazily when a size first comes, or never",
    )
    compute.add_argument(
        "--cuda-graph-tokens",
        type=_tokens_or_none,
        default=4096,
        metavar="N",
        help="cuda: largest step with prompts that is a graph; larger ones hide their launches; 0: decode only",
    )
    compute.add_argument("--threads", type=_at_least_1, metavar="N", help="unset: one per core this process may use")
    sim = parser.add_argument_group(
        "simulation", "for load and failure tests: no weights are read, nothing is computed"
    )
    sim.add_argument(
        "--executor",
        choices=("model", "sim"),
        default="model",
        help="sim: tokens are a function of context and seed, checked against what the KV blocks should hold",
    )
    sim.add_argument(
        "--sim-step-ms", type=_at_least_0, default=5.0, metavar="MS", help="time of every step that computes"
    )
    sim.add_argument(
        "--sim-prefill-tokens-per-s",
        type=config.in_range(float, 1.0, 1e12),
        default=50_000.0,
        metavar="N",
        help="more time: for tokens of rows that compute more than one",
    )
    sim.add_argument(
        "--sim-token-us", type=_at_least_0, default=0.0, metavar="US", help="more time: for each row that decodes"
    )
    sim.add_argument(
        "--sim-eos-probability",
        type=config.in_range(float, 0.0, 1.0),
        default=0.0,
        metavar="P",
        help="that a token is the end of its sequence",
    )
    net = parser.add_argument_group("network")
    net.add_argument("--listen", type=config.address, default="0.0.0.0:0", metavar="HOST:PORT", help="port 0: any free")
    net.add_argument(
        "--scheduler",
        type=addresses,
        action="append",
        metavar="HOST:PORT",
        help="where to register; several (repeated, or with commas between) are replicas, one of which has this worker "
        "at a time; unset: wait to be leased by whoever knows this address",
    )
    net.add_argument(
        "--advertise",
        type=config.address,
        metavar="HOST:PORT",
        help="where the scheduler reaches this worker; unset: --listen, as seen from the scheduler",
    )
    net.add_argument("--worker-id", metavar="ID", help="name in logs and status; unset: host name and process id")
    life = parser.add_argument_group("steps and leaving")
    life.add_argument(
        "--stuck-after-s",
        type=config.in_range(float, 1.0, 86400.0),
        default=600.0,
        metavar="S",
        help="a step that runs for longer is taken for a hang: liveness fails, so that a kubelet restarts the worker",
    )
    life.add_argument(
        "--pipeline-depth",
        type=config.in_range(int, 1, 16),
        default=2,
        metavar="N",
        help="steps taken in before the first is answered",
    )
    life.add_argument(
        "--drain-timeout-s",
        type=config.in_range(float, 0.0, 86400.0),
        default=60.0,
        metavar="S",
        help="after SIGTERM: how long open rows may take to finish",
    )
    return parser


def _addresses(text: str) -> list[str]:
    return [config.address(part.strip()) for part in text.split(",")]


addresses = config.Kind(_addresses, "host:port")

_at_least_0 = config.in_range(float, 0.0, 1e9)
_at_least_1 = config.in_range(int, 1, 2**31 - 1)
_tokens_or_none = config.in_range(int, 0, 2**31 - 1)


def scheduler_addresses(args: argparse.Namespace) -> list[str]:
    """Every --scheduler."""
    return [scheduler for part in args.scheduler or () for scheduler in part]


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's part of the flags. Raises ValueError with the field's name."""
    return EngineConfig(
        model_dir=args.model,
        model_name=args.model_name or args.model.resolve().name,
        dtype=args.dtype,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_cache_memory=args.kv_cache_memory,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        determinism=args.determinism,
        threads=args.threads,
        backend=args.backend,
        attention=args.attention,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
        cuda_graphs=args.cuda_graphs,
        kv_cache_dtype=args.kv_cache_dtype,
        cuda_graph_tokens=args.cuda_graph_tokens,
        quantize=args.quantize,
    )


class Worker:
    """Everything of one worker process: server, model thread, registration."""

    def __init__(self, args: argparse.Namespace, settings: EngineConfig, bundle: Bundle) -> None:
        self._args = args
        self._settings = settings
        self._bundle = bundle
        self._lifecycle = Lifecycle()
        self._executor = StepExecutor(worker_epoch=secrets.randbits(64))
        self._servicer = WorkerServicer(
            executor=self._executor,
            lifecycle=self._lifecycle,
            bundle=bundle,
            drain=self._leave,
            pipeline_depth=args.pipeline_depth,
        )
        self._server = GrpcServer(listen=args.listen, service_names=[SERVICE_NAME])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server.grpc)
        self._admin = self._make_admin()
        self._registration: Registration | None = None
        self._info: EngineInfo | None = None
        self._drain_timeout_s: float = args.drain_timeout_s
        self._drained = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Serve until told to leave. Returns the process's exit code; raises BindError."""
        await self._admin.start()
        address = await self._server.start()
        log.info("worker %s listens on %s, loading %s", self._args.worker_id, address, self._settings.model_dir)
        registering = asyncio.ensure_future(self._register(address))
        serving = asyncio.ensure_future(self._server.run_until_stopped(self._drain))
        loading = asyncio.ensure_future(self._load_or_cancel(serving))
        registering.add_done_callback(lambda _: self._cancel_if_failed(registering, serving))
        try:
            await asyncio.wait([serving])
        finally:
            self._executor.close()
            await _cancel(registering)
            await self._admin.close()
        if self._exit_code:
            await self._server.grpc.stop(0)
            return self._exit_code
        serving.result()
        if not loading.done() or self._executor.num_in_flight:
            await _cancel(loading)
            _leave_now()  # the model thread cannot be interrupted
        return 0

    def _make_admin(self) -> AdminServer:
        """Metrics; liveness: the model thread is not stuck; readiness: the model is loaded, and a scheduler uses it."""
        read = WorkerReader(self._executor, lambda: self._lifecycle.load_progress, self._is_ready, lambda: self._info)
        metrics = ServiceMetrics("worker", SPECS, read, self._server.rpc, has_vllm=self._args.metrics_compat == "vllm")
        return AdminServer(
            metrics_listen=self._args.metrics_listen,
            health_listen=self._args.health_listen,
            registry=make_registry(metrics),
            is_alive=lambda: self._executor.meter.running_s() < self._args.stuck_after_s,
            is_ready=self._is_ready,
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
        self._registration = Registration(
            schedulers=schedulers,
            worker_id=self._args.worker_id,
            address_towards=lambda scheduler: self._args.advertise or reachable_address(address, towards=scheduler),
            worker_epoch=self._executor.worker_epoch,
            lifecycle=self._lifecycle,
            work=self._executor,
        )
        await self._registration.run()

    def _cancel_if_failed(self, registering: asyncio.Future[None], serving: asyncio.Future[None]) -> None:
        if registering.cancelled() or (error := registering.exception()) is None:
            return
        log.error("registering failed, which is a bug; this worker ends", exc_info=error)
        self._exit_code = EXIT_FAILED
        serving.cancel()

    async def _load_or_cancel(self, serving: asyncio.Future[None]) -> None:
        try:
            await self._load()
        except ValueError as error:  # CheckpointError is one: the folder's fault or a setting's, told in one line
            log.error("cannot serve %s: %s", self._settings.model_dir, error)
            log.debug("where it failed", exc_info=True)
            self._exit_code = EXIT_BAD_SETTING
        except Exception:
            log.exception("loading %s failed", self._settings.model_dir)
            self._exit_code = EXIT_FAILED
        if self._exit_code:
            serving.cancel()

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()

        def tell(part: float) -> None:
            loop.call_soon_threadsafe(self._lifecycle.set_progress, part)

        told = _every(PROGRESS_STEP, tell)
        logged = _every(PROGRESS_LOG_STEP, lambda part: log.info("loading weights: %d %%", 100 * part))

        def progress(part: float) -> None:
            told(part)
            logged(part)

        started_at = loop.time()
        info = await self._executor.load(lambda: _make_runner(self._args, self._settings, progress))
        self._info = info
        settle_gc()
        depth = self._args.pipeline_depth
        self._lifecycle.set_ready(capacity_to_proto(info, bundle_digest=self._bundle.digest, pipeline_depth=depth))
        if not self._lifecycle.is_draining:
            await self._server.set_serving(True)
        log.info("ready after %.1f s: %s", loop.time() - started_at, describe(info))

    # -- leaving ---------------------------------------------------------------------------------------------------

    async def _leave(self, timeout_s: float) -> int:
        """The Drain RPC: as SIGTERM, with its own time. Returns the rows that were still open."""
        if timeout_s:
            self._drain_timeout_s = timeout_s
        self._server.stopping.set()
        await self._drained.wait()
        return self._executor.rows_used

    async def _drain(self) -> None:
        self._lifecycle.set_draining()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                await self._wait_until_unused()
        if self._executor.rows_used:
            log.warning("leaving with %d rows open", self._executor.rows_used)
        self._servicer.end_streams(UnavailableError("the worker has drained and leaves"))
        self._drained.set()

    async def _wait_until_unused(self) -> None:
        if self._registration is not None:
            await self._registration.acknowledged(DRAINING, TOLD_TIMEOUT_S)
        # Idleness is a duration: nothing announces it.
        while self._executor.idle_s < (ABANDONED_S if self._executor.rows_used else SETTLED_S):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)


def sim_config(args: argparse.Namespace) -> SimConfig:
    """The simulation's part of the flags."""
    return SimConfig(
        step_ms=args.sim_step_ms,
        prefill_tokens_per_s=args.sim_prefill_tokens_per_s,
        token_us=args.sim_token_us,
        eos_probability=args.sim_eos_probability,
    )


def _make_runner(args: argparse.Namespace, settings: EngineConfig, progress: Callable[[float], None]) -> Runner:
    if args.executor == "sim":
        return SimRunner(settings, sim_config(args))
    # Not before the flags are checked and the port is bound: torch takes seconds.
    from worker_svc.engine.backend import BackendUnavailableError
    from worker_svc.engine.load import load_runner

    try:
        return load_runner(settings, progress)
    except BackendUnavailableError as error:
        raise ValueError(f"--backend {settings.backend}: {error}") from error


def _every(step: float, tell: Callable[[float], None]) -> Callable[[float], None]:
    """`tell`, but only when its number has grown by `step`, or is 1."""
    told = 0.0

    def progress(part: float) -> None:
        nonlocal told
        if part - told >= step or part >= 1.0:
            told = part
            tell(part)

    return progress


def describe(info: EngineInfo) -> str:
    """One line about a loaded model."""
    numbers = f"{info.dtype}, weights {info.quantize}" if info.quantize else info.dtype
    numbers += "" if info.kv_cache_dtype == "auto" else f", KV {info.kv_cache_dtype}"
    return (
        f"{info.model} ({numbers}, {info.determinism}), max_model_len {info.max_model_len}, "
        f"{info.num_blocks} blocks of {info.block_size} tokens, {info.max_num_seqs} rows, backend {info.numerics}"
    )


def reachable_address(listen: str, *, towards: str) -> str:
    """`listen` with a host that `towards` can dial: the local address of a route to it, if listening on all."""
    host, _, port = listen.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::"):
        return listen
    peer_host, _, peer_port = towards.rpartition(":")
    try:
        family, kind, proto, _, peer = socket.getaddrinfo(
            peer_host.strip("[]"), int(peer_port), type=socket.SOCK_DGRAM, family=socket.AF_UNSPEC
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(peer)  # a datagram socket: finds the route, sends nothing
            local = str(probe.getsockname()[0])
    except OSError:
        local = socket.gethostname()
    return f"[{local}]:{port}" if ":" in local else f"{local}:{port}"


def set_thread_environment(threads: int | None) -> None:
    """What OpenMP reads once, when torch is imported. What the user has set stays."""
    # Spinning at barriers takes the core that gateway and scheduler of the same machine need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


async def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)  # a failure has been logged where it happened


def _leave_now() -> NoReturn:
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
        settings, bundle = engine_config(args), read_bundle(args.model)
        if not bundle.has_tokenizer:
            log.warning("%s has no tokenizer.json: only token ids can be served, no text", args.model)
        sys.exit(run_service(_run(args, settings, bundle)))
    except (ValueError, ModelFolderError, BindError) as error:
        log.error("%s", error)
        sys.exit(EXIT_BAD_SETTING)


async def _run(args: argparse.Namespace, settings: EngineConfig, bundle: Bundle) -> int:
    return await Worker(args, settings, bundle).run()


if __name__ == "__main__":
    main()
