"""The port for operators: AdminService and the whole GetStatus, separate from inference, with its own keys.

--admin-listen set                they are served there; on --listen AdminService refuses calls, GetStatus is a summary
unset, clients need credentials   the same on --listen: a key for inference does not permit operations
unset, clients need none          they are served on --listen, if only this machine can connect, or with
                                  --keyless-operators
Over HTTP they need a key of --admin-keys, or --keyless-operators: web pages can send requests to this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from quire.v1.rollouts_pb2_grpc import RolloutServiceServicer, add_RolloutServiceServicer_to_server

from gateway_svc.callers.authenticator import ApiKeys, Authenticator, identifies_callers
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.operators.audit import AuditLog
from gateway_svc.operators.rollouts import RolloutServicer
from svc_common import config
from svc_common.config import OFF, Flag, FlagGroup, address_or_off, path, switch
from svc_common.errors import PermissionDeniedError
from svc_common.security.tls import TlsFiles, server_credentials
from svc_common.security.trust import TrustError, is_loopback
from svc_common.serve import GrpcServer

SERVICE_NAMES = ("quire.v1.AdminService", "quire.v1.RolloutService")
MAX_RECEIVE_BYTES = 1 << 20

ADMIN_FLAGS = FlagGroup("operations (draining workers), apart from inference", (
    Flag("--admin-listen", address_or_off,
        "address of AdminService and of the whole GetStatus, with the TLS files of --listen. off: they are "
        "served at --listen, but not if clients need credentials", default=OFF,
    ),
    Flag("--admin-keys", path,
        "folder of the keys for --admin-listen and --console-listen, like that of --api-keys; required if other "
        "machines can connect", metavar="DIR",
    ),
    Flag("--keyless-operators", switch,
        "serve operators at --listen and --http-listen without keys, where clients need none: every process that can "
        "connect may drain workers, pause, and replace weights"
    ),
    Flag("--console-listen", address_or_off,
        "address of the console, a page for browsers (docs/console.md), with the TLS files of --listen. Its "
        "state needs a key of --admin-keys, its playground a key for inference", default=OFF,
    ),
))  # fmt: skip


def is_public_for_operators(args: argparse.Namespace) -> bool:
    """Whether the port for inference also serves operators, without keys."""
    return _has_no_keys(args) and (args.keyless_operators or is_loopback(args.listen))


def _has_no_keys(args: argparse.Namespace) -> bool:
    return args.admin_listen == config.OFF and not identifies_callers(args)


def operators_of(args: argparse.Namespace, flag: str, listen: str) -> Authenticator | None:
    """Accepts the keys of operators at this address; None if it needs none. Raises CallersError or TrustError."""
    keys = None if args.admin_keys is None else ApiKeys(args.admin_keys, flag="--admin-keys")
    if keys is None and not is_loopback(listen) and not args.insecure:
        raise TrustError(
            f"other machines can connect to {flag} {listen}: set --admin-keys, listen on 127.0.0.1, or set --insecure "
            "if the network is trusted"
        )
    return None if keys is None else Authenticator(keys)


class NoOperators:
    """Refuses the calls of operators over HTTP."""

    async def authenticate(self, authorization: object) -> NoReturn:
        raise PermissionDeniedError(
            "this call needs the key of an operator, and this gateway has none; start it with --admin-keys, or with "
            "--keyless-operators if it trusts all callers"
        )


def operators_over_http(args: argparse.Namespace) -> Authenticator | NoOperators | None:
    """Checks the operators that call the HTTP API; None if they need no key. Raises CallersError."""
    if args.admin_keys is not None:
        return Authenticator(ApiKeys(args.admin_keys, flag="--admin-keys"))
    return None if args.keyless_operators and _has_no_keys(args) else NoOperators()


def add_admin_service(
    args: argparse.Namespace,
    servicer: AdminServicer,
    rollouts: RolloutServicer,
    status: Callable[[], Awaitable[pb.GetStatusResponse]],
    public: GrpcServer,
    tls: TlsFiles | None,
    audit: AuditLog | None,
) -> GrpcServer | None:
    """Add AdminService and RolloutService to `public`, or to a new server if --admin-listen is set. Returns the new
    server, not started.

    The new server also serves GetStatus, with the result of `status`.

    Raises CallersError, TlsError or TrustError.
    """
    is_public = is_public_for_operators(args)
    add_AdminServiceServicer_to_server(servicer if is_public else Elsewhere(), public.grpc)
    add_RolloutServiceServicer_to_server(rollouts if is_public else RolloutsElsewhere(), public.grpc)
    if args.admin_listen == config.OFF:
        return None
    operators = operators_of(args, "--admin-listen", args.admin_listen)
    server = GrpcServer(
        listen=args.admin_listen,
        service_names=SERVICE_NAMES,
        credentials=None if tls is None else server_credentials(tls),
        max_receive_bytes=MAX_RECEIVE_BYTES,
        admit=None if operators is None else operators.admit,
        on_call=None if audit is None else audit.on_call,
    )
    add_AdminServiceServicer_to_server(servicer, server.grpc)
    add_RolloutServiceServicer_to_server(rollouts, server.grpc)
    server.grpc.add_generic_rpc_handlers((_status_only(status),))
    return server


def _status_only(status: Callable[[], Awaitable[pb.GetStatusResponse]]) -> grpc.GenericRpcHandler:
    """GetStatus, without the other methods of its service."""

    async def get_status(request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return await status()

    handler = grpc.unary_unary_rpc_method_handler(
        get_status,
        request_deserializer=pb.GetStatusRequest.FromString,
        response_serializer=pb.GetStatusResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("quire.v1.InferenceService", {"GetStatus": handler})


def _refusal(service: str) -> Any:
    async def refuse(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        raise PermissionDeniedError(
            f"{service} is not served on the port for inference; use the address of the gateway's --admin-listen, or "
            "start the gateway with --keyless-operators if it trusts all callers"
        )

    return refuse


class Elsewhere(AdminServiceServicer):
    """Refuses the calls of AdminService on the port for inference."""

    Inspect = LoadAdapter = UnloadAdapter = ListAdapters = DrainWorker = _refusal("AdminService")
    SetRoute = ListRoutes = Inspect


class RolloutsElsewhere(RolloutServiceServicer):
    """Refuses the calls of RolloutService on the port for inference."""

    Pause = Unpause = Sleep = Wake = ResetPrefixCache = _refusal("RolloutService")
    BeginUpdate = PutTensors = CommitUpdate = AbortUpdate = GetWeights = Pause
