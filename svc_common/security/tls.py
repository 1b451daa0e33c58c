"""TLS of a port. The files are read again whenever a client connects, so renewals need no restart.

credentials = server_credentials(TlsFiles(cert, key, client_ca))      # raises TlsError
"""

from __future__ import annotations

import argparse
import datetime
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from svc_common.config import SettingError

log = logging.getLogger(__name__)
T = TypeVar("T")

REREAD_S = 5.0


class Reread(Generic[T]):
    """What `read` returns, read again at most every `REREAD_S`.

    The first read raises its errors. Later a ValueError is logged once, and the previous content stays in force. `noun`
    names the content in the log.
    """

    def __init__(self, read: Callable[[], T], noun: str, clock: Callable[[], float]) -> None:
        self._read = read
        self._noun = noun
        self._clock = clock
        self._read_at = clock()
        self._last_error = ""
        self._content = read()

    def __call__(self) -> T:
        if self._clock() - self._read_at >= REREAD_S:
            self._read_at = self._clock()
            self._read_again()
        return self._content

    def _read_again(self) -> None:
        try:
            self._content = self._read()
            self._last_error = ""
        except ValueError as error:
            if str(error) != self._last_error:
                log.error("keeping the previous %s: %s", self._noun, error)
            self._last_error = str(error)


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


UTC_TIME = b"\x17\x0d"
# SEQUENCE of two times, each with a year of two digits (tag 0x17) or four (0x18). ssl does not return the times of a
# certificate that it did not validate.
VALIDITY = re.compile(rb"\x30.(\x17\x0d|\x18\x0f)(\d{12,14}Z)(\x17\x0d|\x18\x0f)(\d{12,14}Z)", re.DOTALL)


class OwnCertificate:
    """Logs each problem of the certificate in the files once, found by a handshake with itself: a server that refuses a
    client's certificate closes the connection without a reason, so the client checks its own.
    """

    def __init__(self, files: TlsFiles, name: str) -> None:
        """`name`: the DNS name that peers require of this service as a server; empty if it serves no peers."""
        self._files = files
        self._name = name
        self._logged = ""

    def check(self) -> None:
        """Check the files as they are now."""
        problem = self.problem()
        if problem and problem != self._logged:
            log.error(
                "other services will refuse the certificate of %s %s: %s",
                self._files.flags.cert, self._files.cert, problem,
            )  # fmt: skip
        self._logged = problem

    def problem(self) -> str:
        """Why a peer with the same CA file would refuse the certificate; empty if it would not."""
        try:
            server, client = ssl_settings(self._files), ssl.create_default_context(cafile=self._files.client_ca)
            client.load_cert_chain(self._files.cert, self._files.key)
        except (TlsError, OSError) as error:
            return str(error)
        if not self._name:
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        try:
            _shake_hands(client, server, self._name)
        except ssl.SSLError as error:
            return getattr(error, "verify_message", "") or str(error)
        return ""


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """A mutual TLS handshake in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name or None)
    called = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (caller, called, caller, called):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def certificate_files(args: argparse.Namespace) -> dict[str, Path | None]:
    """The certificates that the flags name, by link. A service may not have all flags."""
    flags = {"public": "tls_cert_file", "internal": "internal_tls_cert_file", "redis": "redis_tls_cert_file"}
    return {link: getattr(args, flag, None) for link, flag in flags.items()}


def remaining_fraction(path: Path, now: float) -> float | None:
    """The fraction of a certificate's lifetime that is left, negative after its end; None if the file has none."""
    try:
        der = ssl.PEM_cert_to_DER_cert(_first(path.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None
    found = VALIDITY.search(der)
    if found is None:
        return None
    start, end = (_seconds(*pair) for pair in ((found[1], found[2]), (found[3], found[4])))
    return (end - now) / max(end - start, 1.0)


def _first(pem: str) -> str:
    """The certificate of the service, followed by its issuers'."""
    return pem[pem.find(ssl.PEM_HEADER) : pem.find(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]


def _seconds(tag: bytes, text: bytes) -> float:
    """A time of a certificate. Years of two digits are from 1950 to 2049 (RFC 5280)."""
    digits = text.decode()
    if tag == UTC_TIME:
        digits = ("20" if digits < "5" else "19") + digits
    return datetime.datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()
