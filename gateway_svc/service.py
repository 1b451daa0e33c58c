"""The gateway process: wiring, health, drain."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from quire.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

from gateway_svc.answer.open_streams import OpenStreams
from gateway_svc.answer.request_traces import RequestTraces
from gateway_svc.callers.authenticator import CallerInterceptor
from gateway_svc.callers.caller import CallersError
from gateway_svc.callers.flags import identifies_callers, isolates_tenants, make_authenticator, min_priority
from gateway_svc.flags import make_parser
from gateway_svc.limits.buckets import LocalBuckets, RedisBuckets
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.limits.settings import LimitsError, LimitsFile
from gateway_svc.metrics import SPECS, GatewayReader, specs_for_picker
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.operators.audit.audit_log import AuditLog, AuditLogError
from gateway_svc.operators.console_state import ConsoleState
from gateway_svc.operators.operator_port import add_admin_service, is_public_for_operators
from gateway_svc.pipeline.admission import Admission
from gateway_svc.process.chat_flags import TemplateFileError, chat_templates, parser_names
from gateway_svc.process.http_ports import make_console, make_http, make_http_apps
from gateway_svc.process.processes import supervise
from gateway_svc.process.readiness import ReadyLink
from gateway_svc.records.cipher import RecordKeyError, make_cipher
from gateway_svc.records.recorder import Recorder
from gateway_svc.records.store import RecordStore
from gateway_svc.request.models import BundleCache
from gateway_svc.request.prompts.readers import PromptReaders
from gateway_svc.request.sandbox.grammar_checker import GrammarChecker
from gateway_svc.request.sandbox.image_preparer import ImageLimits, ImagePreparer
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads
from gateway_svc.request.validation import RequestLimits
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.dispatcher import Dispatcher
from gateway_svc.schedulers.scheduler_client import SchedulerClient, SchedulerClients
from gateway_svc.servicer import make_servicer
from gateway_svc.text.chat_format import ParserNameError
from prefix_index.reader import RedisPrefixReader
from svc_common import config
from svc_common.admin import AdminServer
from svc_common.connections import ConnectionLimits
from svc_common.inspection import Inspector
from svc_common.logs import setup_logging
from svc_common.memory import MemoryLimit
from svc_common.metrics import ServiceMetrics, make_registry
from svc_common.own_certificate import certificate_files
from svc_common.redis_server import RedisServer, RedisSettingsError, redis_server
from svc_common.scheduler_names import SchedulerNames
from svc_common.serve import BindError, GrpcServer, run_service, settle_gc
from svc_common.tasks import cancel
from svc_common.tls import TlsError, TlsFiles, server_credentials, tls_files
from svc_common.tracing import TracingError, make_tracer
from svc_common.trust import TrustError, make_trust

log = logging.getLogger(__name__)

SERVICE_NAMES = ("quire.v1.InferenceService", "quire.v1.AdminService")
# Size of the largest request that passes all checks: a continuation of 4 Mi ids (MAX_CONTINUATION_IDS), each a varint
# of 3 bytes (vocabularies below 2 Mi), and a prompt of 4 MiB. A request is decoded before its content is checked.
MAX_RECEIVE_BYTES = 16 << 20
MIN_CONNECTION_CALLS = 1024


START_ERRORS = (
    BindError,
    RedisSettingsError,
    RecordKeyError,
    TlsError,
    TrustError,
    CallersError,
    AuditLogError,
    LimitsError,
    TemplateFileError,
    ParserNameError,
    TracingError,
)


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


def run_gateway(args: argparse.Namespace, *, link: socket.socket | None = None, ready_within_s: float = 0.0) -> None:
    """Run one gateway in this process. Exits with a message if it cannot start."""
    gateway_id = f"gateway-{secrets.token_hex(4)}"
    setup_logging("gateway", args.log_format, args.log_level, instance=gateway_id)
    try:
        run_service(serve(args, gateway_id, link=link, ready_within_s=ready_within_s))
    except START_ERRORS as error:
        sys.exit(f"quire-gateway: {error}")


def make_reader(args: argparse.Namespace, redis: RedisServer | None) -> RedisPrefixReader | None:
    """The reader of the prefix index; None without Redis."""
    return None if redis is None else RedisPrefixReader(redis, namespace=args.redis_namespace)


def make_recorder(args: argparse.Namespace, redis: RedisServer | None) -> Recorder | None:
    """The records of resumable requests; None without Redis. Raises RecordKeyError."""
    cipher = make_cipher(args.record_key_file)
    if redis is None:
        return None
    return Recorder(
        RecordStore(
            redis,
            namespace=args.redis_namespace,
            ttl_s=args.record_ttl_s,
            max_bytes=args.max_record_bytes,
            cipher=cipher,
        )
    )


def make_limits(args: argparse.Namespace, redis: RedisServer | None) -> KeyLimits:
    """The limits of owners. Raises LimitsError."""
    if args.key_limits is None:
        return KeyLimits()
    if not identifies_callers(args):
        raise LimitsError("--key-limits needs --api-keys or --jwt-issuer: limits apply to owners of requests")
    file = LimitsFile(args.key_limits)
    buckets = LocalBuckets() if redis is None else RedisBuckets(redis, namespace=args.redis_namespace)
    return KeyLimits(file, buckets)


def memory_limit(args: argparse.Namespace) -> MemoryLimit:
    """The limit of --max-memory-bytes, or its default."""
    if args.max_memory_bytes is not None:
        return MemoryLimit(args.max_memory_bytes)
    return MemoryLimit.of_container(args.processes)


async def serve(
    args: argparse.Namespace, gateway_id: str, *, link: socket.socket | None = None, ready_within_s: float = 0.0
) -> None:
    """Run until SIGTERM or SIGINT. Raises START_ERRORS.

    `link`: to the parent of this gateway's processes, which listen on the same port; None: this is the only process.
    `ready_within_s`: longest wait for a model before listening.
    """
    redis = redis_server(args)
    reader, recorder, limits = make_reader(args, redis), make_recorder(args, redis), make_limits(args, redis)
    tls = tls_files(args.tls_cert_file, args.tls_key_file, args.tls_client_ca_file)
    trust = make_trust(args, "gateway")
    authenticator = make_authenticator(args)
    audit = None if args.audit_log is None else AuditLog(args.audit_log, gateway_id)
    tracer = make_tracer(args, "gateway", gateway_id)
    server = GrpcServer(
        listen=args.listen,
        service_names=SERVICE_NAMES,
        shares_port=link is not None,
        credentials=None if tls is None else server_credentials(tls),
        connections=ConnectionLimits(
            args.max_connections,
            max(
                MIN_CONNECTION_CALLS, 2 * args.max_streams
            ),  # so that --max-streams refuses calls of one client as well
            args.max_connection_age_s,
        ),
        max_receive_bytes=MAX_RECEIVE_BYTES,
        accepts_compression=True,
        interceptors=[] if authenticator is None else [CallerInterceptor(authenticator)],
        on_call=None if audit is None else audit.on_call,
    )
    changed = asyncio.Event()
    processes = ReadyLink(link, changed.set)
    bundles, parsers = BundleCache(chat_templates(args)), parser_names(args)
    chunk_interval_s = args.chunk_interval_ms / 1000
    clients = SchedulerClients(
        lambda address: SchedulerClient(
            address,
            gateway_id=gateway_id,
            bundles=bundles,
            parsers=parsers,
            deltas_interval_s=chunk_interval_s,
            open_channel=trust.channels_to("scheduler"),
            max_bundle_bytes=args.max_bundle_bytes,
            shows_address=is_public_for_operators(args),
        )
    )
    clients.events = dispatcher = Dispatcher(clients.all, patience_s=args.scheduler_patience_s, on_change=changed.set)
    names = SchedulerNames(args.scheduler, clients.update)
    templates = TemplateRenderer()
    images = ImagePreparer(ImageLimits(args.max_images, args.max_image_bytes, args.max_image_pixels))
    threads = Threads(args.max_tokenize_bytes)
    prompts = PromptReaders(threads, templates, images)
    directory = ModelDirectory(clients.all)
    grammars = GrammarChecker()
    servicer = make_servicer(
        directory,
        dispatcher,
        prompts,
        grammars,
        OpenStreams(args.max_streams, args.max_request_bytes, memory_limit(args)),
        admission=Admission(
            directory,
            requests=RequestLimits(min_priority(args), args.max_logprobs),
            keys=limits,
            isolates_tenants=isolates_tenants(args),
        ),
        reader=reader,
        chunk_interval_s=chunk_interval_s,
        recorder=recorder,
        traces=None if tracer is None else RequestTraces(tracer, args.trace_ratio),
        shows_workers=is_public_for_operators(args),
    )
    streams = servicer.generation.streams
    read = GatewayReader(streams.metrics, streams, directory, lambda: dispatcher.num_moves, reader, audit)
    admin = make_admin(args, server, read)
    make_app = make_http_apps(args, servicer, directory, threads.requests, server, audit)
    http = make_http(args, make_app, authenticator, tls, shares_port=link is not None)
    state = ConsoleState(servicer.full_status, directory)
    console = make_console(args, make_app, authenticator, state, server, tls)
    add_InferenceServiceServicer_to_server(servicer, server.grpc)
    inspector = Inspector("gateway", gateway_id, args.shown_settings, admin.metrics_text)
    operations = add_admin_service(args, AdminServicer(directory, inspector), servicer.full_status, server, tls, audit)

    async def drain() -> None:
        changed.set()  # for the other processes
        await streams.drain(args.drain_timeout_s)

    await admin.start()
    templates.start()
    if reader is not None:
        reader.start()
    if recorder is not None:
        recorder.start()
    limits.start()
    if authenticator is not None:
        await authenticator.start()
    names.start()
    tasks = [asyncio.create_task(run) for run in (clients.run(), names.run())]
    try:
        await _wait_ready(directory, changed, ready_within_s)
        await server.start()
        if operations is not None:
            log.info("AdminService at %s", await operations.start())
            operations.set_serving(True)
        if http is not None:
            log.info("HTTP API at %s", await http.start())
        if console is not None:
            log.info("console at %s/console/", await console.start())
        settle_gc()
        schedulers = ", ".join(dict.fromkeys(args.scheduler))
        log.info("%s listens on %s (%s); schedulers: %s", gateway_id, server.address, _security(tls), schedulers)
        # The state of this process counts from now on, because it accepts connections.
        for run in (_keep_health(server, directory, processes, changed), processes.run()):
            tasks.append(asyncio.create_task(run))
        await server.run_until_stopped(drain)
    finally:
        streams.end_all()  # streams are still open here only after a second signal
        for port in (http, console):
            if port is not None:
                await port.stop()
        if operations is not None:
            await operations.grpc.stop(None)
        dispatcher.close()
        await cancel(*tasks)
        if recorder is not None:
            await recorder.close()
        await limits.close()
        if authenticator is not None:
            await authenticator.close()
        if reader is not None:
            await reader.close()
        threads.close()
        await grammars.close()
        await templates.close()
        await images.close()
        await admin.close()
        if tracer is not None:
            await tracer.close()
        if audit is not None:
            await asyncio.to_thread(audit.close)


def _security(files: TlsFiles | None) -> str:
    if files is None:
        return "plaintext"
    return "TLS" if files.client_ca is None else "TLS with client certificates"


def make_admin(args: argparse.Namespace, server: GrpcServer, read: GatewayReader) -> AdminServer:
    """Metrics, liveness and readiness. Ready: at least one model can take requests, in every process."""
    has_vllm = args.metrics_compat != "none"
    specs = specs_for_picker() if args.metrics_compat == "inference-pool" else SPECS
    metrics = ServiceMetrics("gateway", specs, read, server.rpc, has_vllm, certificate_files(args))
    return AdminServer(
        metrics_listen=args.metrics_listen,
        health_listen=args.health_listen,
        registry=make_registry(metrics),
        is_alive=lambda: True,
        is_ready=lambda: server.is_serving,
    )


async def _wait_ready(directory: ModelDirectory, changed: asyncio.Event, timeout_s: float) -> None:
    """Wait until at least one model can take requests, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not directory.is_ready:
                changed.clear()
                await changed.wait()
    changed.set()


async def _keep_health(
    server: GrpcServer, directory: ModelDirectory, processes: ReadyLink, changed: asyncio.Event
) -> None:
    """Report SERVING while at least one model can take requests, in this process and in the others."""
    while True:
        await changed.wait()
        changed.clear()
        can_serve = directory.is_ready and not server.stopping.is_set()
        processes.report(is_ready=can_serve)
        is_ready = can_serve and processes.all_ready
        if is_ready != server.is_serving:
            reason = "another process of this gateway is not ready" if can_serve else "no model is ready"
            log.info("serving" if is_ready else f"not serving: {reason}")
            server.set_serving(is_ready)


if __name__ == "__main__":
    main()
