"""Whether peers will accept the certificate of this service, found by a handshake with itself.

A server that refuses a client's certificate closes the connection without a reason, so the client checks its own.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import re
import ssl
from pathlib import Path

from svc_common.security.tls import TlsError, TlsFiles, ssl_settings

log = logging.getLogger(__name__)

UTC_TIME = b"\x17\x0d"
# SEQUENCE of two times, each with a year of two digits (tag 0x17) or four (0x18). ssl does not return the times of a
# certificate that it did not validate.
VALIDITY = re.compile(rb"\x30.(\x17\x0d|\x18\x0f)(\d{12,14}Z)(\x17\x0d|\x18\x0f)(\d{12,14}Z)", re.DOTALL)


class OwnCertificate:
    """Logs each problem of the certificate in the files once."""

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
