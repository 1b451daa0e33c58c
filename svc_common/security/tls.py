"""TLS of a port. The files are read again whenever a client connects, so renewals need no restart.

credentials = server_credentials(TlsFiles(cert, key, client_ca))      # raises TlsError
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from svc_common.config import SettingError

log = logging.getLogger(__name__)


class TlsError(SettingError):
    """The TLS files cannot be used; the message names the setting and the cause."""


@dataclass(frozen=True, slots=True)
class TlsFlags:
    """The flags that name the files, for error messages."""

    cert: str
    key: str
    client_ca: str


PUBLIC = TlsFlags("--tls-cert-file", "--tls-key-file", "--tls-client-ca-file")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the certificate chain, its key and, for mutual TLS, the CA of clients. All PEM."""

    cert: Path
    key: Path
    client_ca: Path | None
    flags: TlsFlags = PUBLIC


@dataclass(frozen=True, slots=True)
class Contents:
    """The bytes of the files."""

    cert: bytes
    key: bytes
    client_ca: bytes | None

    def to_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


def tls_files(cert: Path | None, key: Path | None, client_ca: Path | None, flags: TlsFlags = PUBLIC) -> TlsFiles | None:
    """The files of the flags; None for a plaintext port. Raises TlsError."""
    if cert and key:
        return TlsFiles(cert, key, client_ca, flags)
    if cert or key:
        raise TlsError(f"{flags.cert} and {flags.key} must be set together")
    if client_ca:
        raise TlsError(f"{flags.client_ca} needs TLS: set {flags.cert} and {flags.key} too")
    return None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of one port, which are updated when the files change. gRPC cannot use them for a second port.

    With a client CA, clients must present a certificate.
    """
    reader = TlsReader(files)
    return grpc.dynamic_ssl_server_credentials(
        reader.served.to_grpc(),
        reader.fetch,  # type: ignore[arg-type]  # grpc documents None as a result but does not declare it
        require_client_authentication=files.client_ca is not None,
    )


def ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """A TLS context for the HTTP port, also updated when the files change. Raises TlsError."""
    reader = TlsReader(files)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at each handshake."""
        reader.newest()
        connection.context = reader.settings

    first = reader.settings
    first.sni_callback = renew
    return first


class TlsReader:
    """The certificate in use. If changed files are invalid, logs an error and keeps the previous certificate.

    Raises TlsError if the first files are invalid.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._last_error = ""
        self.served = read_files(files)
        self.settings = ssl_settings(files)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on its own thread before each handshake. None: no change."""
        before = self.served
        after = self.newest()
        return None if after is before else after.to_grpc()

    def newest(self) -> Contents:
        """The files as they are now, or as they were when they were valid last."""
        try:
            contents = read_files(self._files)
            if contents != self.served:
                self._use(contents, ssl_settings(self._files))
        except TlsError as error:
            self._log_once(str(error))
        return self.served

    def _use(self, contents: Contents, settings: ssl.SSLContext) -> None:
        if read_files(self._files) != contents:
            return  # the files are being replaced: key and certificate may not fit together; the next call reads them
        self.served, self.settings = contents, settings
        log.info("loaded a new certificate from %s", self._files.cert)

    def _log_once(self, words: str) -> None:
        """Log an error once, not for every connection."""
        if words != self._last_error:
            log.error("cannot load the certificate, keeping the previous one: %s", words)
        self._last_error = words


def read_files(files: TlsFiles) -> Contents:
    flags = files.flags
    cert, key = _bytes_of(flags.cert, files.cert), _bytes_of(flags.key, files.key)
    client_ca = None if files.client_ca is None else _bytes_of(flags.client_ca, files.client_ca)
    return Contents(cert, key, client_ca)


def _bytes_of(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{setting} {path}: {error.strerror or error}") from None


def ssl_settings(files: TlsFiles) -> ssl.SSLContext:
    """A TLS context of a server from the files. Raises TlsError with the cause, which gRPC does not report."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, _PasswordError) as error:
        raise TlsError(f"{files.flags.cert} {files.cert}, {files.flags.key} {files.key}: {error}") from None
    if files.client_ca is None:
        return context
    try:
        context.load_verify_locations(files.client_ca)
    except OSError as error:
        raise TlsError(f"{files.flags.client_ca} {files.client_ca}: {error}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class _PasswordError(Exception):
    """The private key is encrypted."""


def _no_password() -> str:
    raise _PasswordError("the private key is encrypted; use a key without a password")
