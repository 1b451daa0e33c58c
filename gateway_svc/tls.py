"""TLS of the public port. Files are read again whenever a client connects: a renewed certificate needs no restart.

    credentials = server_credentials(TlsFiles(cert, key, client_ca))      # raises TlsError

Only the port for clients speaks it (docs/adr/0016-tls-at-the-gateway.md).
"""

from __future__ import annotations

import argparse
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

log = logging.getLogger(__name__)


class TlsError(ValueError):
    """The files cannot be served with; says which setting and why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificate chain, key and, for mutual TLS, the clients' authority are, as PEM."""

    cert: Path
    key: Path
    client_ca: Path | None


@dataclass(frozen=True, slots=True)
class _Contents:
    cert: bytes
    key: bytes
    client_ca: bytes | None

    def to_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


def tls_files(args: argparse.Namespace) -> TlsFiles | None:
    """The files of --tls-cert-file and its companions; None where the port is to be plaintext. Raises TlsError."""
    cert, key, client_ca = args.tls_cert_file, args.tls_key_file, args.tls_client_ca_file
    if cert and key:
        return TlsFiles(cert, key, client_ca)
    if cert or key:
        raise TlsError("--tls-cert-file and --tls-key-file belong together: set both, or none")
    if client_ca:
        raise TlsError("--tls-client-ca-file is for TLS: set --tls-cert-file and --tls-key-file too")
    return None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files. With an authority of clients, only those with a certificate of it get in."""
    reader = _Reader(files)
    return grpc.dynamic_ssl_server_credentials(
        reader.served.to_grpc(),
        reader.fetch,  # type: ignore[arg-type]  # that None is an answer is documented, not typed
        require_client_authentication=files.client_ca is not None,
    )


class _Reader:
    """What is served now. A change that cannot be served with is logged, and the former files stay in force."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._complaint = ""
        self.served = _read(files)
        _check(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks on a thread of its own, before each handshake; None: as before."""
        try:
            contents = _read(self._files)
            if contents == self.served:
                return None
            _check(self._files)
        except TlsError as error:
            self._complain(str(error))
            return None
        self.served = contents
        log.info("serving with a new certificate from %s", self._files.cert)
        return contents.to_grpc()

    def _complain(self, words: str) -> None:
        """Once, not for every client."""
        if words != self._complaint:
            log.error("the former certificate stays in force: %s", words)
        self._complaint = words


def _read(files: TlsFiles) -> _Contents:
    cert, key = _bytes_of("--tls-cert-file", files.cert), _bytes_of("--tls-key-file", files.key)
    client_ca = None if files.client_ca is None else _bytes_of("--tls-client-ca-file", files.client_ca)
    return _Contents(cert, key, client_ca)


def _bytes_of(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{setting} {path}: {error.strerror or error}") from None


def _check(files: TlsFiles) -> None:
    """gRPC itself only says that it cannot listen. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, _PasswordError) as error:
        raise TlsError(f"--tls-cert-file {files.cert}, --tls-key-file {files.key}: {error}") from None
    if files.client_ca is None:
        return
    try:
        context.load_verify_locations(files.client_ca)
    except OSError as error:
        raise TlsError(f"--tls-client-ca-file {files.client_ca}: {error}") from None


class _PasswordError(Exception):
    """A key that asks for a password."""


def _no_password() -> str:
    raise _PasswordError("the key is encrypted; give one without a password")
