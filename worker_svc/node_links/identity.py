"""Both ends of a connection prove that they are workers of this deployment, before either reads anything else.

    with certificates   mutual TLS; the certificate of each end must name the role `worker`
    with tokens         each end proves that it knows the token of workers; the token is not sent

    leader -> node   MAGIC, nonce L
    node -> leader   MAGIC, nonce N, HMAC(token, "node", L, N)
    leader -> node   HMAC(token, "leader", N, L)                  or the connection is closed

The lengths are fixed, so an unknown process cannot make either end take memory.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from svc_common.security.tls import TlsFiles, ssl_settings
from svc_common.security.trust import Trust
from worker_svc.node_links.frames import LinkError, read, set_deadline

MAGIC = b"quire-nodes 1\n"
NONCE_BYTES = 32
ROLE = "worker"


class Identity:
    """The proofs of this process, from its flags for trust. The files are read for each connection."""

    def __init__(self, trust: Trust) -> None:
        self._files = trust.files
        self._tokens = trust.tokens
        self._name = trust.name.format(role=ROLE)

    def accept(self, connection: socket.socket, deadline: float) -> socket.socket:
        """The leader's end. Raises OSError (LinkError, ssl.SSLError) for a process that is not a worker."""
        if self._files is not None:
            context = ssl_settings(self._files)
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with _closed_on_error(connection):
            self._check_certificate(connection, deadline)
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(MAGIC + nonce)
            answer = self._read_nonce(connection, deadline)
            if not hmac.compare_digest(read(connection, NONCE_BYTES, deadline), self._proof(b"node", nonce, answer)):
                raise LinkError("it does not have the token of workers (--token-file)")
            connection.sendall(self._proof(b"leader", answer, nonce))
        return connection

    def connect(self, connection: socket.socket, deadline: float) -> socket.socket:
        """A node's end. Raises as `accept`."""
        if self._files is not None:
            context = _client_context(self._files)
            connection = context.wrap_socket(connection, do_handshake_on_connect=False)
        with _closed_on_error(connection):
            self._check_certificate(connection, deadline)
            nonce = self._read_nonce(connection, deadline)
            answer = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(MAGIC + answer + self._proof(b"node", nonce, answer))
            try:
                proof = read(connection, NONCE_BYTES, deadline)
            except OSError as error:
                raise LinkError(f"the leader refused this node: {error}; compare the token files of both") from None
            if not hmac.compare_digest(proof, self._proof(b"leader", answer, nonce)):
                raise LinkError("the leader does not have the token of workers (--token-file)")
        return connection

    def _proof(self, side: bytes, *nonces: bytes) -> bytes:
        """Without tokens the key is empty: the proof then only shows that the other end speaks this protocol."""
        token = "" if self._tokens is None else self._tokens.own(ROLE)
        return hmac.digest(token.encode(), b"".join((side, *nonces)), hashlib.sha256)

    @staticmethod
    def _read_nonce(connection: socket.socket, deadline: float) -> bytes:
        if read(connection, len(MAGIC), deadline) != MAGIC:
            raise LinkError("it does not speak the protocol of nodes, or another version of it")
        return read(connection, NONCE_BYTES, deadline)

    def _check_certificate(self, connection: socket.socket, deadline: float) -> None:
        if not isinstance(connection, ssl.SSLSocket):
            return
        set_deadline(connection, deadline)
        connection.do_handshake()
        found = connection.getpeercert() or {}
        names = [str(entry[1]) for entry in found.get("subjectAltName", ())]
        if self._name not in names:
            raise LinkError(f"its certificate names {', '.join(names) or 'no role'}, not {self._name}")


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    """It checks the CA; the name in the certificate is a role, not an address, and is checked afterwards."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.client_ca)
    return context


@contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
