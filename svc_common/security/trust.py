"""Trust between the services: the role of a peer, and the calls that each role may make.

    trust = make_trust(args, "scheduler")                        # raises TrustError or TlsError
    GrpcServer(credentials=trust.server_credentials(), admit=trust.admit(CALLERS), ...)
    channel = trust.open_channel(address, role="worker")

A peer proves its role (gateway, scheduler or worker) by a certificate, by a token, or by both if both are set:

    certificate   signed by the CA of --internal-tls-ca-file; its name gives the role (--internal-tls-name)
    token         a line of --token-file; safe only where other hosts cannot read the traffic

Files are read again when they change: certificates at each new connection, tokens every 5 s,
also for channels that are open.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from svc_common.calls import PROBES, Admit, Context
from svc_common.channels import BULK_OPTIONS, SCHEDULER_PINGS, WORKER_PINGS, OpenChannel, ServiceChannel
from svc_common.config import Flag, FlagGroup, SettingError, path, switch, text
from svc_common.errors import PermissionDeniedError, UnauthenticatedError
from svc_common.security.tls import OwnCertificate, Reread, TlsFiles, TlsFlags, TlsReader, server_credentials, tls_files
from svc_common.serve import CHANNEL_OPTIONS

SCHEME = "Bearer "
DIGEST = "sha256:"
ROLES = ("gateway", "scheduler", "worker")
SERVERS = ("scheduler", "worker")  # roles that other services call
WORKER_NAME = "--internal-tls-worker-name"
INTERNAL = TlsFlags("--internal-tls-cert-file", "--internal-tls-key-file", "--internal-tls-ca-file")

# Roles that may call a method, by package.Service/Method. Probes need none; reflection is off where roles are checked.
Callers = Mapping[str, Collection[str]]

TRUST_FLAGS = FlagGroup("trust between the services (docs/trust.md); files are read again on changes", (
    Flag(INTERNAL.cert, path, "certificate of this service for the other services (PEM)"),
    Flag(INTERNAL.key, path, "its private key (PEM, without a password)"),
    Flag(INTERNAL.client_ca, path, "CA certificates (PEM) that sign all services' certificates"),
    Flag("--internal-tls-name", text,
        "DNS name or URI in the certificate of a service; {role} stands for gateway, scheduler or worker",
        default="quire-{role}", metavar="TEMPLATE",
    ),
    Flag("--token-file", path,
        "one `ROLE TOKEN` per line. This service sends the first token of its own role and accepts all tokens. "
        "A token that is accepted but never sent may be given as sha256:HEX",
    ),
    Flag("--insecure", switch,
        "listen beyond this machine without certificates and tokens: a process that can connect has every role",
    ),
))  # fmt: skip


class TrustError(SettingError):
    """The settings of the peer checks are invalid; the message names the setting and says what to do."""


def make_trust(args: argparse.Namespace, role: str, worker_name: str | None = None) -> Trust:
    """The trust of a service with this role. Raises TrustError or TlsError.

    `worker_name`: the name with the id of a worker in its certificate; None if certificates do not name ids.
    """
    files = tls_files(args.internal_tls_cert_file, args.internal_tls_key_file, args.internal_tls_ca_file, INTERNAL)
    if files is not None and files.client_ca is None:
        raise TrustError(f"{INTERNAL.cert} needs {INTERNAL.client_ca}: services check each other's certificates")
    if "{role}" not in args.internal_tls_name:
        raise TrustError(f"--internal-tls-name {args.internal_tls_name}: it must contain {{role}}")
    _check_worker_name(worker_name, files)
    tokens = None if args.token_file is None else Tokens(args.token_file)
    if tokens is not None:
        tokens.check_has(role)
    trust = Trust(role, files, args.internal_tls_name, tokens, worker_name)
    trust.check_own_certificate()
    return trust


def _check_worker_name(name: str | None, files: TlsFiles | None) -> None:
    if name is None:
        return
    if files is None:
        raise TrustError(f"{WORKER_NAME} needs {INTERNAL.cert}: the name is in the certificates of workers")
    if "{id}" not in name or name == "{id}" or "://" in name:
        # An id alone could be the name of a role. gRPC compares only DNS names with the certificate of a server.
        raise TrustError(f"{WORKER_NAME} {name}: it must be a DNS name with {{id}}, such as {{id}}.quire-worker")


def check_reach(args: argparse.Namespace, trust: Trust, *listens: str) -> None:
    """Raise TrustError if other machines can reach one of these addresses without a certificate or token."""
    exposed = [listen for listen in listens if not is_loopback(listen)]
    if exposed and not trust.is_on and not args.insecure:
        raise TrustError(
            f"other machines can connect to {exposed[0]}, and this service does not check its peers: set "
            f"--token-file or {INTERNAL.cert}, listen on 127.0.0.1, or set --insecure if the network is trusted"
        )


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can connect to host:port."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")


class Tokens:
    """The tokens of a file, by role. If the file becomes invalid, the previous tokens stay."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._file = Reread(lambda: _read_tokens(path), "tokens", clock)

    def check_has(self, role: str) -> None:
        """Raise TrustError if there is no token to send."""
        if not self.own(role):
            raise TrustError(f"--token-file {self._path}: no line `{role} TOKEN`; this service must send one")

    def own(self, role: str) -> str:
        """The token that a service of this role sends; empty if there is none."""
        _, own = self._file()
        return own.get(role, "")

    def role_of(self, token: str) -> str | None:
        """The role of a token; None if it is not accepted. Tokens are compared by digest."""
        roles, _ = self._file()
        return roles.get(_digest(token))


def _read_tokens(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Roles by digest of their tokens, and the first token of each role. Raises TrustError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrustError(f"--token-file {path}: {getattr(error, 'strerror', None) or error}") from None
    roles: dict[str, str] = {}
    own: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        role, _, token = line.strip().partition(" ")
        token = token.strip()
        if not role or role.startswith("#"):
            continue
        if role not in ROLES or not re.fullmatch(r"[\x21-\x7e]{16,512}", token):
            raise TrustError(
                f"--token-file {path}, line {number}: not `ROLE TOKEN`; a token has at least 16 characters"
            )
        if token.startswith(DIGEST):
            roles[token.removeprefix(DIGEST).lower()] = role
        else:
            roles[_digest(token)] = role
            own.setdefault(role, token)
    return roles, own


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Trust:
    """The credentials that this service sends to its peers, and those that it requires from them."""

    role: str
    files: TlsFiles | None = None
    name: str = "quire-{role}"
    tokens: Tokens | None = None
    worker_name: str | None = None
    own: OwnCertificate | None = field(init=False, default=None)
    reader: TlsReader | None = field(init=False, default=None)  # reader for channels; each port has its own

    def __post_init__(self) -> None:
        """Raises TlsError."""
        if self.files is None:
            return
        served_as = "" if self.role not in SERVERS or "://" in self.name else self.name.format(role=self.role)
        object.__setattr__(self, "own", OwnCertificate(self.files, served_as))
        object.__setattr__(self, "reader", TlsReader(self.files))

    @property
    def is_on(self) -> bool:
        return self.files is not None or self.tokens is not None

    def __str__(self) -> str:
        parts = ["mutual TLS"] * (self.files is not None) + ["tokens"] * (self.tokens is not None)
        return " and ".join(parts) or "no check of peers"

    def channels_to(self, role: str) -> OpenChannel:
        """Opens channels to services of this role."""
        return lambda target: self.open_channel(target, role)

    def check_own_certificate(self) -> None:
        """Log an error if peers will refuse the certificate of this service."""
        if self.own is not None:
            self.own.check()

    # -- as a client --------------------------------------------------------------------------------------------------

    def open_channel(self, target: str, role: str) -> grpc.aio.Channel:
        """A channel to a service of this role. With certificates, a server of another role fails the handshake."""
        pings = WORKER_PINGS if role == "worker" else SCHEDULER_PINGS
        return self._open(target, self.name.format(role=role), pings.options())

    def open_worker(self, target: str, worker_id: str) -> grpc.aio.Channel:
        """A channel to a worker. If certificates name ids, a server with another id fails the handshake."""
        name = self.name.format(role="worker") if self.worker_name is None else self.worker_name.format(id=worker_id)
        return self._open(target, name, WORKER_PINGS.options() | BULK_OPTIONS)

    def _open(self, target: str, name: str, own: dict[str, Any]) -> grpc.aio.Channel:
        tokens, options = self.tokens, list((dict(CHANNEL_OPTIONS) | own).items())
        authorization = None if tokens is None else lambda: f"{SCHEME}{tokens.own(self.role)}"
        if self.reader is None:
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            channel = self._secure_channel(target, self.reader, name, options)
        return ServiceChannel(channel, authorization)

    def _secure_channel(
        self, target: str, reader: TlsReader, name: str, options: list[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        self.check_own_certificate()
        served = reader.newest()
        credentials = grpc.ssl_channel_credentials(served.client_ca, served.key, served.cert)
        # Check the role in the certificate, not the address: a worker's address changes with its pod.
        override = [] if "://" in name else [("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(target, credentials, options=[*options, *override])

    # -- as a server --------------------------------------------------------------------------------------------------

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext. Raises TlsError."""
        return None if self.files is None else server_credentials(self.files)

    def admit(self, callers: Callers) -> Admit | None:
        """The check of the role of each caller; None if this service does not check peers. A method without an entry
        admits no caller.
        """

        async def check(method: str, context: Context) -> str:
            if method.startswith(PROBES):
                return ""
            metadata = dict(context.invocation_metadata() or ())
            self.check(context, str(metadata.get("authorization", "")), callers.get(method, ()))
            return "a service"

        return check if self.is_on else None

    def check(self, context: Context, authorization: str, callers: Collection[str]) -> None:
        """Raise UnauthenticatedError or PermissionDeniedError unless the caller has one of these roles."""
        if self.files is not None:
            self._check_certificate(context, callers)
        if self.tokens is not None:
            self._check_token(self.tokens, authorization, callers)

    def _check_certificate(self, context: Context, callers: Collection[str]) -> None:
        names = _names(context)
        if not {self.name.format(role=role) for role in callers} & set(names):
            found = ", ".join(names) or "no role"
            raise PermissionDeniedError(f"this call is for {_either(callers)}; the caller's certificate names {found}")

    def check_worker_id(self, context: Context, worker_id: str) -> None:
        """Raise PermissionDeniedError if certificates name ids and the caller's does not name this one."""
        if self.worker_name is None:
            return
        required, names = self.worker_name.format(id=worker_id), _names(context)
        if required not in names:
            raise PermissionDeniedError(
                f"worker_id {worker_id!r} needs a certificate with the name {required} ({WORKER_NAME}); the caller's "
                f"certificate names {', '.join(names)}"
            )

    @staticmethod
    def _check_token(tokens: Tokens, authorization: str, callers: Collection[str]) -> None:
        if not authorization.startswith(SCHEME):
            raise UnauthenticatedError(f"this call is for {_either(callers)} and needs its token (--token-file)")
        role = tokens.role_of(authorization.removeprefix(SCHEME))
        if role is None:
            raise UnauthenticatedError("the token of the caller is not in this service's --token-file")
        if role not in callers:
            raise PermissionDeniedError(f"this call is for {_either(callers)}; the caller's token has role {role}")


def _names(context: Context) -> list[str]:
    """The DNS names and URIs in the certificate of the caller."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode("utf-8", "replace") for name in names]


def certificate_problem(details: str) -> str:
    """The reason in gRPC's details of a call that failed because of the server's certificate; else empty."""
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)", details):
        return f"its certificate is refused: {found[1]}"
    return "its certificate is for another role or id" if "Hostname Verification Check failed" in details else ""


def _either(roles: Collection[str]) -> str:
    return " or ".join(f"a {role}" for role in sorted(roles)) or "no role"
