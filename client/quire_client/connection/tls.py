"""TLS settings of both clients.

Client.connect("llm.example.com:443", tls=True)
Client.connect("10.0.0.7:50051", tls=Tls(ca_file="ca.crt", server_name="llm.example.com"))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from quire_client.errors import invalid

TLS_ENV = "QUIRE_TLS"
FIELD_ENV = {
    "ca_file": "QUIRE_TLS_CA",
    "cert_file": "QUIRE_TLS_CERT",
    "key_file": "QUIRE_TLS_KEY",
    "server_name": "QUIRE_TLS_SERVER_NAME",
}
OFF_WORDS = ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings: how the client verifies a gateway and authenticates itself. Files are PEM.

    Defaults: the CAs bundled with gRPC ($GRPC_DEFAULT_SSL_ROOTS_FILE_PATH replaces them), no client certificate, and
    the target's host as the expected name in the gateway's certificate.
    """

    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for `grpc.secure_channel`. Raises InvalidRequest for an unreadable file."""
        if (self.cert_file is None) != (self.key_file is None):
            raise invalid("tls", "tls.cert_file and tls.key_file must be set together")
        ca, key, cert = (_read(name, getattr(self, name)) for name in ("ca_file", "key_file", "cert_file"))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def options(self) -> list[tuple[str, Any]]:
        """Channel options to use with the credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def resolve_tls(tls: Tls | bool | None, environment: Mapping[str, str] = os.environ) -> Tls | None:
    """`tls` if it is set, else the QUIRE_TLS* variables. None: plaintext."""
    if isinstance(tls, Tls):
        return tls
    if tls is not None:
        return _from(environment) if tls else None
    is_on = environment.get(TLS_ENV, "").lower() not in OFF_WORDS
    return _from(environment) if is_on or any(environment.get(name) for name in FIELD_ENV.values()) else None


def channel_security(
    tls: Tls | bool | None, credentials: grpc.ChannelCredentials | None
) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
    """Credentials (None: plaintext) and options of channels; `credentials` takes precedence over `tls`."""
    if credentials is not None:
        return credentials, []
    resolved = resolve_tls(tls)
    return (None, []) if resolved is None else (resolved.credentials(), resolved.options())


def _from(environment: Mapping[str, str]) -> Tls:
    return Tls(**{field: environment.get(name) or None for field, name in FIELD_ENV.items()})


def _read(name: str, path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid("tls", f"tls.{name}={os.fspath(path)!r}: {error.strerror or error}") from None
