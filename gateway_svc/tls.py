"""TLS for the public ports. The files are read again whenever a client connects, so renewals need no restart.

    credentials = server_credentials(TlsFiles(cert, key, client_ca))      # raises TlsError

Only ports for clients use TLS (docs/adr/0016-tls-at-the-gateway.md).
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
    """The TLS files cannot be used; the message names the setting and the cause."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the certificate chain, its key and, for mutual TLS, the CA of clients. All PEM."""

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
    """The files of the --tls-* flags; None for a plaintext port. Raises TlsError."""
    cert, key, client_ca = args.tls_cert_file, args.tls_key_file, args.tls_client_ca_file
    if cert and key:
        return TlsFiles(cert, key, client_ca)
    if cert or key:
        raise TlsError("--tls-cert-file and --tls-key-file must be set together")
    if client_ca:
        raise TlsError("--tls-client-ca-file needs TLS: set --tls-cert-file and --tls-key-file too")
    return None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that are updated when the files change. With a client CA, clients must present a certificate."""
    reader = _Reader(files)
    return grpc.dynamic_ssl_server_credentials(
        reader.served.to_grpc(),
        reader.fetch,  # type: ignore[arg-type]  # grpc documents None as a result but does not declare it
        require_client_authentication=files.client_ca is not None,
    )


def ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """A TLS context for the HTTP port, also updated when the files change. Raises TlsError."""
    reader = _Reader(files)
    newest = _check(files)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at each handshake."""
        nonlocal newest
        if reader.fetch() is not None:
            newest = _check(files)
        connection.context = newest

    newest.sni_callback = renew
    return newest


class _Reader:
    """The certificate in use. If changed files are invalid, logs an error and keeps the previous certificate."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._last_error = ""
        self.served = _read(files)
        _check(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on its own thread before each handshake. None: no change."""
        try:
            contents = _read(self._files)
            if contents == self.served:
                return None
            _check(self._files)
        except TlsError as error:
            self._log_once(str(error))
            return None
        self.served = contents
        log.info("loaded a new certificate from %s", self._files.cert)
        return contents.to_grpc()

    def _log_once(self, words: str) -> None:
        """Log an error once, not for every connection."""
        if words != self._last_error:
            log.error("cannot load the certificate, keeping the previous one: %s", words)
        self._last_error = words


def _read(files: TlsFiles) -> _Contents:
    cert, key = _bytes_of("--tls-cert-file", files.cert), _bytes_of("--tls-key-file", files.key)
    client_ca = None if files.client_ca is None else _bytes_of("--tls-client-ca-file", files.client_ca)
    return _Contents(cert, key, client_ca)


def _bytes_of(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{setting} {path}: {error.strerror or error}") from None


def _check(files: TlsFiles) -> ssl.SSLContext:
    """A TLS context from the files. Raises TlsError with the cause, also for gRPC, which would not report the cause."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, _PasswordError) as error:
        raise TlsError(f"--tls-cert-file {files.cert}, --tls-key-file {files.key}: {error}") from None
    if files.client_ca is None:
        return context
    try:
        context.load_verify_locations(files.client_ca)
    except OSError as error:
        raise TlsError(f"--tls-client-ca-file {files.client_ca}: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _PasswordError(Exception):
    """The private key is encrypted."""


def _no_password() -> str:
    raise _PasswordError("the private key is encrypted; use a key without a password")
