"""Whether peers will accept the certificate of this service, found by a handshake with itself.

A server that refuses a client's certificate closes the connection without a reason, so the client checks its own.
"""

from __future__ import annotations

import logging
import ssl

from svc_common.tls import TlsError, TlsFiles, ssl_settings

log = logging.getLogger(__name__)


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
