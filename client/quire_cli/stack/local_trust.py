"""How the services of one `quire up` authenticate each other, by tokens or certificates, and clients, by --api-key."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire_client.connection.channel import Tls

from quire_cli.installation import SERVICES
from quire_cli.stack.supervisor import ServiceSpec

TOKEN_FILE = "tokens"
TLS_FOLDER = "tls"
KEYS_FOLDER = "api-keys"
OWNER = "local"  # owner of the keys of --api-key
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
ALL_ADDRESSES = ("0.0.0.0", "::")
CERTIFICATE_DAYS = 365.0  # longer than a trial runs


@dataclass(frozen=True, slots=True)
class LocalTrust:
    """Flags of the services by role, and the files that `delete` removes after the services have ended."""

    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    health: Mapping[str, Tls] = field(default_factory=dict)  # how `quire up` connects to each role
    ca: Path | None = None  # for clients
    secrets: tuple[Path, ...] = ()

    def added_to(self, spec: ServiceSpec) -> ServiceSpec:
        """The service with its flags."""
        role = next(role for role, package in SERVICES.items() if spec.module.startswith(f"{package}."))
        return replace(spec, arguments=(*spec.arguments, *self.flags.get(role, ())), tls=self.health.get(role))

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key of --api-key."""
        return "--api-keys" in self.flags.get("gateway", ())

    def delete(self) -> None:
        for path in self.secrets:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def make_trust(folder: Path, host: str, api_keys: Sequence[str] = (), *, has_tls: bool) -> LocalTrust:
    """Write the credentials of one run: tokens or certificates, and the digests of the clients' keys."""
    trust = _certificates(folder / TLS_FOLDER, host) if has_tls else _tokens(folder)
    return _with_keys(trust, folder / KEYS_FOLDER, api_keys) if api_keys else trust


def _with_keys(trust: LocalTrust, folder: Path, api_keys: Sequence[str]) -> LocalTrust:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / OWNER).write_text("".join(f"{digest_line(key)}\n" for key in api_keys))
    flags = {**trust.flags, "gateway": (*trust.flags.get("gateway", ()), "--api-keys", str(folder))}
    return replace(trust, flags=flags, secrets=(*trust.secrets, folder))


def digest_line(key: str) -> str:
    """The line of a key in the folder of --api-keys. A digest without salt is enough, because keys are random."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _tokens(folder: Path) -> LocalTrust:
    """A token for each role. None if the environment has other credentials."""
    if os.environ.get("QUIRE_TOKEN_FILE") or os.environ.get("QUIRE_INTERNAL_TLS_CERT_FILE"):
        return LocalTrust()
    path = folder / TOKEN_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.writelines(f"{role} {secrets.token_urlsafe(24)}\n" for role in SERVICES)
    # A worker started by hand can use the same file.
    return LocalTrust(dict.fromkeys(SERVICES, ("--token-file", str(path))), secrets=(path,))


def _certificates(folder: Path, host: str) -> LocalTrust:
    """Certificates of a CA whose key is not stored."""
    from quire_cli.certificate_authority import Authority, issue_all  # needs a package that the SDK does not need

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    authority, ca = Authority.create(), folder / "ca.crt"
    ca.write_bytes(authority.pair.cert)
    hosts = dict.fromkeys((*LOCAL_NAMES, socket.gethostname(), *({host} - {*ALL_ADDRESSES})))
    issue_all(authority, folder, hosts=list(hosts), days=CERTIFICATE_DAYS)
    flags = {role: _flags("internal-tls", folder / role, ca) for role in SERVICES}
    flags["gateway"] += _flags("tls", folder / "server", None)
    caller = (folder / "gateway.crt", folder / "gateway.key")
    health = {role: Tls(ca, *caller, f"quire-{role}") for role in SERVICES} | {"gateway": Tls(ca)}
    return LocalTrust(flags, health, ca, (folder,))


def _flags(prefix: str, path: Path, ca: Path | None) -> tuple[str, ...]:
    cert = (f"--{prefix}-cert-file", f"{path}.crt", f"--{prefix}-key-file", f"{path}.key")
    return cert if ca is None else (*cert, f"--{prefix}-ca-file", str(ca))
