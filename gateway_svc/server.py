"""The gateway process: flags, wiring, health, drain."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.v1.inference_pb2_grpc import (
    add_AdminServiceServicer_to_server,
    add_InferenceServiceServicer_to_server,
)

from gateway_svc.admin import AdminServicer
from gateway_svc.api_keys import ApiKeyInterceptor, ApiKeys, ApiKeysError
from gateway_svc.directory import ModelDirectory
from gateway_svc.dispatcher import Dispatcher
from gateway_svc.metrics import SPECS, GatewayMetrics, GatewayReader
from gateway_svc.models import BundleCache
from gateway_svc.prefix_hints import PrefixHints
from gateway_svc.processes import supervise
from gateway_svc.prompts import PromptReader
from gateway_svc.scheduler_client import SchedulerClient
from gateway_svc.servicer import InferenceServicer
from gateway_svc.tls import TlsError, TlsFiles, server_credentials, tls_files
from prefix_index.reader import RedisPrefixReader
from svc_common import config
from svc_common.admin import AdminServer
from svc_common.logs import setup_logging
from svc_common.metrics import ServiceMetrics, make_registry
from svc_common.serve import BindError, GrpcServer, run_service, settle_gc
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

SERVICE_NAMES = ("quire.v1.InferenceService", "quire.v1.AdminService")

EPILOG = """example:
  quire-gateway --listen 0.0.0.0:50051 --scheduler llama-scheduler:50052 --scheduler qwen-scheduler:50052

Schedulers with one model are replicas: each request goes to one of them, and on to another when that one is lost.
The gateway needs no model files: it learns each model and its tokenizer from the model's scheduler.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `quire-gateway`."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = config.parse(make_parser(), words)
    if args.processes == 1:
        run_gateway(args)
        return
    setup_logging("gateway", args.log_format, args.log_level, instance="gateway-processes")
    try:
        sys.exit(supervise(args, words))
    except BindError as error:
        sys.exit(f"quire-gateway: {error}")


def run_gateway(args: argparse.Namespace, *, shares_port: bool = False, ready_within_s: float = 0.0) -> None:
    """One gateway, in this process. Exits with a sentence when it cannot start."""
    gateway_id = f"gateway-{secrets.token_hex(4)}"
    setup_logging("gateway", args.log_format, args.log_level, instance=gateway_id)
    try:
        run_service(serve(args, gateway_id, shares_port=shares_port, ready_within_s=ready_within_s))
    except (BindError, RedisUrlError, TlsError, ApiKeysError) as error:
        sys.exit(f"quire-gateway: {error}")


def make_parser() -> argparse.ArgumentParser:
    """The flags of the gateway."""
    parser = config.make_parser(
        "gateway", "The public gRPC API of Quire: text in, text out, any number of models.", EPILOG
    )
    parser.add_argument(
        "--listen", type=config.address, default="0.0.0.0:50051", metavar="HOST:PORT", help="where to listen"
    )
    parser.add_argument(
        "--scheduler",
        type=config.address,
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="a scheduler; repeat it for replicas and for other models (in the environment: separated by commas)",
    )
    parser.add_argument(
        "--processes",
        type=config.in_range(int, 1, 256),
        default=1,
        metavar="N",
        help="gateway processes that share the port, each with limits of its own; connections are spread over them. "
        "Operators' ports count up: the second process has --metrics-listen and --health-listen plus 1",
    )
    parser.add_argument(
        "--chunk-interval-ms",
        type=config.in_range(float, 0.0, 1000.0),
        default=0.0,
        metavar="MS",
        help="least time between chunks of a stream: tokens that come sooner leave together, which saves CPU here and "
        "at clients. 0: as they come, together only as far as this gateway does not keep up",
    )
    parser.add_argument(
        "--max-streams",
        type=config.in_range(int, 1, 1_000_000),
        default=4096,
        help="generations open at once; more are refused with RESOURCE_EXHAUSTED",
    )
    parser.add_argument(
        "--max-request-bytes",
        type=config.size_bytes,
        default="512M",
        metavar="SIZE",
        help="size of all open requests together; more are refused with RESOURCE_EXHAUSTED",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="redis://[:password@]host:port/db or unix:///path, as the schedulers': choose replicas by cached prefixes",
    )
    parser.add_argument("--redis-namespace", default="quire", help="prefix of every Redis key, as the schedulers'")
    parser.add_argument(
        "--max-connection-age-s",
        type=config.in_range(float, 0.0, 86_400.0),
        default=0.0,
        help="after this time, give or take a tenth, a client is told to connect anew, so that it finds gateways that "
        "have come since; its open streams finish on the old connection. 0: never",
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="DIR",
        help="only clients with one of these API keys get in: the folder holds a file for each, read again when they "
        "change. Health and reflection stay open. Unset: everybody",
    )
    tls = parser.add_argument_group("TLS of the port that clients use; files are read again when they change")
    tls.add_argument("--tls-cert-file", type=Path, metavar="FILE", help="certificate chain (PEM); unset: plaintext")
    tls.add_argument("--tls-key-file", type=Path, metavar="FILE", help="its key (PEM, without a password)")
    tls.add_argument(
        "--tls-client-ca-file",
        type=Path,
        metavar="FILE",
        help="authorities of clients (PEM): only clients with a certificate of one of them get in; unset: everybody",
    )
    parser.add_argument(
        "--scheduler-patience-s",
        type=config.in_range(float, 0.0, 3600.0),
        default=30.0,
        help="how long an open generation waits for a scheduler to go on at before it ends with UNAVAILABLE",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=config.in_range(float, 0.0, 3600.0),
        default=30.0,
        help="how long open generations may go on after SIGTERM; then they end with UNAVAILABLE and clients resume "
        "them at another gateway",
    )
    return parser


class RedisUrlError(ValueError):
    """--redis is no URL of a Redis server."""


def make_reader(args: argparse.Namespace) -> RedisPrefixReader | None:
    """The index to choose replicas by, if there is one. Raises RedisUrlError."""
    if not args.redis:
        return None
    try:
        return RedisPrefixReader(args.redis, namespace=args.redis_namespace)
    except ValueError:
        raise RedisUrlError(config.bad_redis_url(args.redis)) from None


async def serve(
    args: argparse.Namespace, gateway_id: str, *, shares_port: bool = False, ready_within_s: float = 0.0
) -> None:
    """Run until SIGTERM or SIGINT. Raises BindError, RedisUrlError, TlsError or ApiKeysError.

    `shares_port`: other gateways listen there too. `ready_within_s`: wait so long for a model before listening.
    """
    reader, tls = make_reader(args), tls_files(args)
    credentials = None if tls is None else server_credentials(tls)
    server = GrpcServer(
        listen=args.listen,
        service_names=SERVICE_NAMES,
        shares_port=shares_port,
        credentials=credentials,
        max_connection_age_s=args.max_connection_age_s,
        interceptors=[] if args.api_keys is None else [ApiKeyInterceptor(ApiKeys(args.api_keys))],
    )
    changed = asyncio.Event()
    bundles = BundleCache()
    chunk_interval_s = args.chunk_interval_ms / 1000
    clients = [
        SchedulerClient(address, gateway_id=gateway_id, bundles=bundles, deltas_interval_s=chunk_interval_s)
        for address in dict.fromkeys(args.scheduler)
    ]
    dispatcher = Dispatcher(clients, patience_s=args.scheduler_patience_s, on_change=changed.set)
    directory, prompts, metrics = ModelDirectory(clients), PromptReader(), GatewayMetrics()
    servicer = InferenceServicer(
        directory,
        dispatcher,
        prompts,
        PrefixHints(prompts, reader),
        max_streams=args.max_streams,
        max_request_bytes=args.max_request_bytes,
        metrics=metrics,
        chunk_interval_s=chunk_interval_s,
    )
    read = GatewayReader(metrics, servicer, directory, lambda: dispatcher.num_moves, reader)
    admin = make_admin(args, server, read)
    add_InferenceServiceServicer_to_server(servicer, server.grpc)
    add_AdminServiceServicer_to_server(AdminServicer(directory), server.grpc)
    await admin.start()
    if reader is not None:
        reader.start()
    tasks = [asyncio.create_task(client.run()) for client in clients]
    try:
        await _wait_ready(directory, changed, ready_within_s)
        await server.start()
        settle_gc()
        schedulers = ", ".join(c.address for c in clients)
        log.info("%s listens on %s (%s); schedulers: %s", gateway_id, server.address, _security(tls), schedulers)
        tasks.append(asyncio.create_task(_keep_health(server, directory, changed)))
        await server.run_until_stopped(lambda: servicer.drain(args.drain_timeout_s))
    finally:
        dispatcher.close()
        await cancel(*tasks)
        if reader is not None:
            await reader.close()
        prompts.close()
        await admin.close()


def _security(files: TlsFiles | None) -> str:
    if files is None:
        return "plaintext"
    return "TLS" if files.client_ca is None else "TLS, clients show a certificate"


def make_admin(args: argparse.Namespace, server: GrpcServer, read: GatewayReader) -> AdminServer:
    """Metrics, liveness, and readiness: a model can be asked for."""
    metrics = ServiceMetrics("gateway", SPECS, read, server.rpc, has_vllm=args.metrics_compat == "vllm")
    return AdminServer(
        metrics_listen=args.metrics_listen,
        health_listen=args.health_listen,
        registry=make_registry(metrics),
        is_alive=lambda: True,
        is_ready=lambda: server.is_serving,
    )


async def _wait_ready(directory: ModelDirectory, changed: asyncio.Event, timeout_s: float) -> None:
    """Until a model can be asked for, or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not directory.is_ready:
                changed.clear()
                await changed.wait()
    changed.set()


async def _keep_health(server: GrpcServer, directory: ModelDirectory, changed: asyncio.Event) -> None:
    """SERVING while at least one model can be asked for."""
    was_ready = False
    while True:
        await changed.wait()
        changed.clear()
        is_ready = directory.is_ready and not server.stopping.is_set()
        if is_ready != was_ready:
            log.info("serving" if is_ready else "not serving: no model is ready")
            await server.set_serving(is_ready)
        was_ready = is_ready


if __name__ == "__main__":
    main()
