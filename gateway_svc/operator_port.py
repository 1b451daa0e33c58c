"""The port for operators: AdminService, separate from inference, with its own keys.

--admin-listen set       AdminService is served there; on --listen it refuses every call
unset, with --api-keys   it refuses every call: a key for inference does not permit operations
unset, without keys      it is served on --listen, for trusted networks
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

import grpc
from quire.v1.inference_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server

from gateway_svc.admin import AdminServicer
from gateway_svc.callers.api_keys import ApiKeys
from gateway_svc.callers.authenticator import Authenticator, CallerInterceptor
from svc_common import config
from svc_common.errors import PermissionDeniedError
from svc_common.serve import GrpcServer
from svc_common.trust import TrustError, is_loopback

SERVICE_NAME = "quire.v1.AdminService"


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the port."""
    group = parser.add_argument_group("operations (draining workers), apart from inference")
    group.add_argument(
        "--admin-listen",
        type=config.address_or_off,
        default=config.OFF,
        metavar="HOST:PORT",
        help="address of AdminService, with the TLS files of --listen. off: it is served at --listen without "
        "--api-keys; with --api-keys it is not served",
    )
    group.add_argument(
        "--admin-keys",
        type=Path,
        metavar="DIR",
        help="folder of the keys for --admin-listen, like that of --api-keys; required if other machines can connect",
    )


def add_admin_service(
    args: argparse.Namespace, servicer: AdminServicer, public: GrpcServer, credentials: grpc.ServerCredentials | None
) -> GrpcServer | None:
    """Add AdminService to `public`, or to a new server if --admin-listen is set. Returns the new server, not started.

    Raises ApiKeysError or TrustError.
    """
    if args.admin_listen == config.OFF:
        is_open = args.api_keys is None
        add_AdminServiceServicer_to_server(servicer if is_open else Elsewhere(), public.grpc)
        return None
    keys = None if args.admin_keys is None else ApiKeys(args.admin_keys, flag="--admin-keys")
    if keys is None and not is_loopback(args.admin_listen) and not args.insecure:
        raise TrustError(
            f"other machines can connect to --admin-listen {args.admin_listen}: set --admin-keys, listen on 127.0.0.1, "
            "or set --insecure if the network is trusted"
        )
    server = GrpcServer(
        listen=args.admin_listen,
        service_names=[SERVICE_NAME],
        credentials=credentials,
        interceptors=[] if keys is None else [CallerInterceptor(Authenticator(keys))],
    )
    add_AdminServiceServicer_to_server(servicer, server.grpc)
    add_AdminServiceServicer_to_server(Elsewhere(), public.grpc)
    return server


class Elsewhere(AdminServiceServicer):
    """Refuses the calls of AdminService on the port for inference."""

    async def DrainWorker(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        raise PermissionDeniedError(
            "AdminService is not served on the port for inference; use the address of the gateway's --admin-listen"
        )
