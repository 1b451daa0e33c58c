"""The HTTP ports of a gateway: the API and the console. Their packages are imported only if a port is on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway_svc.callers.authenticator import Authenticator
from gateway_svc.operators.audit.audit_log import AuditLog
from gateway_svc.operators.console_state import ConsoleState
from gateway_svc.operators.operator_port import operators_of
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.servicer import InferenceServicer
from svc_common import config
from svc_common.serve import GrpcServer
from svc_common.tls import TlsFiles, ssl_context

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway_svc.http.server import HttpServer

    MakeApp = Callable[[Authenticator | None], ASGIApp]

MAX_OPERATORS = 256  # connections to the console


def make_http_apps(
    args: argparse.Namespace,
    servicer: InferenceServicer,
    directory: ModelDirectory,
    lane: Lane,
    server: GrpcServer,
    audit: AuditLog | None,
) -> MakeApp | None:
    """Makes the HTTP API for the callers of an authenticator; None if no port serves it. Its packages are imported
    only if one does.
    """
    if args.http_listen == args.console_listen == config.OFF:
        return None
    from gateway_svc.http.app import HttpApp, with_cors
    from gateway_svc.http.handlers import Handlers

    routes = Handlers(servicer, directory, lane, lambda: server.is_serving).routes()
    is_traced = args.trace_endpoint is not None

    def make_app(authenticator: Authenticator | None) -> ASGIApp:
        app = HttpApp(routes, authenticator=authenticator, stats=server.rpc, audit=audit, is_traced=is_traced)
        return with_cors(app, args.http_allow_origin)

    return make_app


def make_http(
    args: argparse.Namespace,
    make_app: MakeApp | None,
    authenticator: Authenticator | None,
    tls: TlsFiles | None,
    *,
    shares_port: bool,
) -> HttpServer | None:
    """The port of the HTTP API, if it is on. Raises TlsError."""
    if make_app is None or args.http_listen == config.OFF:
        return None
    from gateway_svc.http.server import HttpServer

    context = None if tls is None else ssl_context(tls)
    return HttpServer(
        make_app(authenticator),
        args.http_listen,
        max_connections=args.http_max_connections,
        shares_port=shares_port,
        tls=context,
    )


def make_console(
    args: argparse.Namespace,
    make_app: MakeApp | None,
    authenticator: Authenticator | None,
    state: ConsoleState,
    server: GrpcServer,
    tls: TlsFiles | None,
) -> HttpServer | None:
    """The port of the console, if it is on. Raises CallersError, TlsError or TrustError."""
    if make_app is None or args.console_listen == config.OFF:
        return None
    from gateway_svc.http.console.app import console_app
    from gateway_svc.http.server import HttpServer

    operators = operators_of(args, "--console-listen", args.console_listen)
    context = None if tls is None else ssl_context(tls)
    # Where clients need no keys, the playground needs one of operators: the port must not serve strangers.
    app = console_app(make_app(authenticator or operators), state, operators, server.rpc)
    return HttpServer(app, args.console_listen, max_connections=MAX_OPERATORS, tls=context)
