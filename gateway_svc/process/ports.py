"""The ports of a gateway: inference, the HTTP API, the console, operations, metrics and probes.

The packages of the HTTP ports are imported only if one is on.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from quire.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from quire.v1.session_pb2_grpc import add_SessionServiceServicer_to_server

from gateway_svc.batches.batches import Batches
from gateway_svc.batches.runner import BatchRunner
from gateway_svc.callers.authenticator import Authenticator, make_authenticator
from gateway_svc.foreign.services import add_services, names_of
from gateway_svc.limits.key_limits import KeyLimits
from gateway_svc.metrics import SPECS, GatewayReader, specs_for_picker
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.operators.audit import AuditLog
from gateway_svc.operators.operator_port import (
    add_admin_service,
    is_public_for_operators,
    operators_of,
    operators_over_http,
)
from gateway_svc.operators.rollouts import RolloutServicer
from gateway_svc.process.schedulers import Schedulers
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.servicer import InferenceServicer, SessionServicer
from prefix_index.reader import RedisPrefixReader
from svc_common import config
from svc_common.channels import ConnectionLimits
from svc_common.memory import Intake, MemoryLimit
from svc_common.observe.admin import AdminServer
from svc_common.observe.inspection import Inspector
from svc_common.observe.metrics import ServiceMetrics, make_registry
from svc_common.security.tls import certificate_files, server_credentials, ssl_context, tls_files
from svc_common.serve import GrpcServer

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway_svc.http.server import HttpServer

    MakeApp = Callable[[Authenticator | None], ASGIApp]

log = logging.getLogger(__name__)

SERVICE_NAMES = tuple(
    f"quire.v1.{name}" for name in ("InferenceService", "SessionService", "AdminService", "RolloutService")
)
# Size of the largest request that passes all checks, which has images. A request is decoded before it is checked.
MAX_RECEIVE_BYTES = 16 << 20
MIN_CONNECTION_CALLS = 1024
MAX_OPERATORS = 256  # connections to the console


class Ports:
    """Owns the ports, the check of credentials and the audit log. Raises SettingError.

    `serve` adds the handlers, once; then `start_admin` opens metrics and probes, and `start` the other ports.
    """

    def __init__(self, args: argparse.Namespace, gateway_id: str, limits: KeyLimits) -> None:
        self._args = args
        self._gateway_id = gateway_id
        self._tls = tls_files(args.tls_cert_file, args.tls_key_file, args.tls_client_ca_file)
        self._authenticator = make_authenticator(args, limits.begin)
        self._audit = None if args.audit_log is None else AuditLog(args.audit_log, gateway_id)
        self._intake = Intake(MemoryLimit.of_flag(args.max_memory_bytes))
        self._http: HttpServer | None = None
        self._console: HttpServer | None = None
        self._runner: BatchRunner | None = None
        # Calls of one client are bounded here so high that --max-streams refuses them before HTTP/2 does.
        num_calls = max(MIN_CONNECTION_CALLS, 2 * args.max_streams)
        self.server = GrpcServer(
            listen=args.listen,
            service_names=(*SERVICE_NAMES, *names_of(args.grpc_compat)),
            credentials=None if self._tls is None else server_credentials(self._tls),
            connections=ConnectionLimits(args.max_connections, num_calls, args.max_connection_age_s),
            max_receive_bytes=MAX_RECEIVE_BYTES,
            accepts_compression=True,
            admit=None if self._authenticator is None else self._authenticator.admit,
            intake=self._intake,
            on_call=None if self._audit is None else self._audit.on_call,
        )

    def __str__(self) -> str:
        """The address for inference and its security, for the log."""
        if self._tls is None:
            return f"{self.server.address} (plaintext)"
        return f"{self.server.address} ({'TLS' if self._tls.client_ca is None else 'TLS with client certificates'})"

    def serve(
        self,
        servicer: InferenceServicer,
        schedulers: Schedulers,
        lane: Lane,
        reader: RedisPrefixReader | None,
        batches: Batches,
    ) -> None:
        """Add the handlers to all ports."""
        args, server, directory, streams = self._args, self.server, schedulers.directory, servicer.generation.streams
        read = GatewayReader(
            streams.metrics, streams, directory, lambda: schedulers.dispatcher.num_moves, reader, self._audit
        )
        self._admin = self._make_admin(read)
        inspector = Inspector("gateway", self._gateway_id, args.shown_settings, self._admin.metrics_text)
        operations = AdminServicer(directory, inspector), RolloutServicer(directory)
        make_app = self._http_apps(servicer, directory, lane, operations, batches)
        if make_app is not None:
            self._add_http(make_app, servicer, directory, batches)
        add_InferenceServiceServicer_to_server(servicer, server.grpc)
        add_SessionServiceServicer_to_server(SessionServicer(servicer.generation.sessions), server.grpc)
        is_open = is_public_for_operators(args)
        add_services(args.grpc_compat, servicer, directory, lane, server, is_open=is_open)
        self._operations = add_admin_service(args, *operations, servicer.full_status, server, self._tls, self._audit)

    async def start_admin(self, closing: AsyncExitStack) -> None:
        """Open metrics and probes, and read the credentials. Raises BindError."""
        if self._audit is not None:
            closing.push_async_callback(asyncio.to_thread, self._audit.close)
        closing.push_async_callback(self._admin.close)
        await self._admin.start()
        if self._authenticator is not None:
            closing.push_async_callback(self._authenticator.close)
            await self._authenticator.start()

    async def start(self, closing: AsyncExitStack) -> None:
        """Open all other ports; those beside inference close with `closing`. Raises BindError."""
        await self.server.start()
        if self._operations is not None:
            closing.push_async_callback(self._operations.grpc.stop, None)
            log.info("AdminService at %s", await self._operations.start())
            self._operations.set_serving(True)
        for port, where in ((self._http, "HTTP API at %s"), (self._console, "console at %s/console/")):
            if port is not None:
                closing.push_async_callback(port.stop)
                log.info(where, await port.start())
        if self._runner is not None:
            closing.push_async_callback(self.stop_batches)
            self._runner.start()

    async def stop_batches(self) -> None:
        """Give the lines of batches to other gateways."""
        if self._runner is not None:
            await self._runner.close()

    def _make_admin(self, read: GatewayReader) -> AdminServer:
        """Metrics, liveness and readiness. Ready: at least one model can take requests."""
        args, server = self._args, self.server
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

    def _http_apps(
        self,
        servicer: InferenceServicer,
        directory: ModelDirectory,
        lane: Lane,
        operations: tuple[AdminServicer, RolloutServicer],
        batches: Batches,
    ) -> MakeApp | None:
        """Makes the HTTP API for the callers of an authenticator; None if no port serves it. Its packages are imported
        only if one does.
        """
        args, server, traces = self._args, self.server, servicer.generation.traces
        if args.http_listen == args.console_listen == config.OFF:
            return None
        from gateway_svc.http.app import HttpApp, SitePolicy, with_cors
        from gateway_svc.http.handlers import Handlers, StatusHandlers

        status = StatusHandlers(lambda: server.is_serving, servicer.generation.streams, self._admin.metrics_text)
        handlers = Handlers(servicer, directory, lane, status, *operations, batches)
        routes, operators, operator_paths = handlers.routes(), operators_over_http(args), handlers.operator_paths

        def make_app(authenticator: Authenticator | None) -> ASGIApp:
            app = HttpApp(
                routes,
                authenticator=authenticator,
                stats=server.rpc,
                audit=self._audit,
                on_headers=None if traces is None else traces.receive,
                intake=self._intake,
                operators=operators,
                operator_paths=operator_paths,
                streamed_paths=handlers.streamed_paths,
                sites=SitePolicy(args.http_allow_host, args.http_allow_origin),
            )
            return with_cors(app, args.http_allow_origin)

        return make_app

    def _add_http(
        self, make_app: MakeApp, servicer: InferenceServicer, directory: ModelDirectory, batches: Batches
    ) -> None:
        """The ports of the HTTP API and of the console, and the part that answers lines of batches, as far as they are
        on. Raises CallersError, TlsError or TrustError.
        """
        from gateway_svc.http.app import SitePolicy
        from gateway_svc.http.batches import send_line
        from gateway_svc.http.console.app import ConsoleState, console_app
        from gateway_svc.http.server import HttpServer

        args = self._args
        if batches.are_kept and args.batch_concurrency:
            self._runner = BatchRunner(batches, partial(send_line, make_app(None)), args.batch_concurrency)
        if args.http_listen != config.OFF:
            app = make_app(self._authenticator)
            self._http = HttpServer(
                app, args.http_listen, max_connections=args.http_max_connections, tls=self._context()
            )
        if args.console_listen != config.OFF:
            operators = operators_of(args, "--console-listen", args.console_listen)
            # Where clients need no keys, the playground needs one of operators: the port must not serve strangers.
            playground, sites = make_app(self._authenticator or operators), SitePolicy(args.http_allow_host)
            state = ConsoleState(servicer.full_status, directory, self.server.rpc.errors)
            app = console_app(playground, state, operators, self.server.rpc, sites)
            self._console = HttpServer(app, args.console_listen, max_connections=MAX_OPERATORS, tls=self._context())

    def _context(self) -> ssl.SSLContext | None:
        """The TLS context of one server, which changes it."""
        return None if self._tls is None else ssl_context(self._tls)
