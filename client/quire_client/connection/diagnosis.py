"""Finds out why no gateway answers at an address: gRPC's own message often does not name the cause."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import Sequence

from quire_client.errors import ConnectionFailed, QuireError, invalid

TIMEOUT_S = 1.0
MAX_PORT = 65_535
ADDRESS = re.compile(r"(?:(?:dns:(?:///)?)?)(?P<host>\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):(?P<port>[^:/]+)")
OTHER_SCHEMES = ("unix:", "unix-abstract:", "ipv4:", "ipv6:", "xds:", "vsock:", "dns:")  # names that gRPC resolves
# An HTTP/2 client starts with this preface and a SETTINGS frame; a server answers with its own SETTINGS frame.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
HTTP_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SETTINGS = b"\x04"
TLS_ALERT = b"\x15\x03"

# Messages of failed TLS connections, and the remedy.
TLS_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": "the CA of the server's certificate is unknown; set --tls-ca, QUIRE_TLS_CA or "
    "Tls(ca_file=...)",
    "Hostname Verification Check failed": "the server's certificate has another name; set --tls-server-name, "
    "QUIRE_TLS_SERVER_NAME or Tls(server_name=...)",
}
NO_TLS = "the server does not use TLS; remove --tls, tls= and the QUIRE_TLS* variables"
NEEDS_TLS = "the server requires TLS; set --tls, QUIRE_TLS=1 or tls=True"
CLOSED = (
    "the server closed the connection; it may require a client certificate (--tls-cert and --tls-key, or "
    "Tls(cert_file=..., key_file=...))"
)
IS_HTTP = "an HTTP server listens there; use the gateway's gRPC port (`quire up`: 50051), not its HTTP port"
REFUSED = "connection refused: nothing listens there; start a gateway with `quire up`, or set QUIRE_TARGET=host:port"


def check_address(target: str) -> None:
    """Raises InvalidRequest if `target` is a URL, has no port or has an invalid port."""
    if target.startswith(OTHER_SCHEMES):
        return
    scheme, has_scheme, rest = target.partition("://")
    if has_scheme or "/" in target:
        tls = " with --tls (tls=True)" if scheme == "https" else ""
        address = (rest if has_scheme else target).partition("/")[0]
        shown = address if ":" in address else f"{address or 'host'}:50051"
        raise invalid("target", f"target {target!r} is a URL; write {shown}{tls}")
    match = ADDRESS.fullmatch(target)
    if match is None:
        example = f"[{target}]:50051" if target.count(":") > 1 else f"{target.strip(':/') or 'host'}:50051"
        raise invalid("target", f"target {target!r} has no port; write host:port, e.g. {example}")
    if not match["port"].isdigit() or not 0 < int(match["port"]) <= MAX_PORT:
        raise invalid("target", f"target {target!r}: the port must be a number from 1 to {MAX_PORT}")


def cannot_connect(targets: Sequence[str], error: QuireError, *, is_tls: bool) -> ConnectionFailed:
    """The error of a `connect` without an answer. Blocks for a few seconds: it opens a connection to find the cause."""
    cause = next((advice for words, advice in TLS_ADVICE.items() if words in error.message), None)
    cause = cause or diagnose(targets[0], is_tls=is_tls) or error.message.rpartition(": ")[2].rstrip("]")
    return ConnectionFailed(f"no gateway answers at {', '.join(targets)}: {cause}")


def diagnose(target: str, *, is_tls: bool) -> str | None:
    """Why a gRPC connection to `target` fails, and the remedy. None: unknown."""
    match = ADDRESS.fullmatch(target)
    if match is None:
        return None
    address = (match["host"].strip("[]"), int(match["port"]))
    try:
        answer = _answer(address, PREFACE)
    except socket.gaierror:
        return f"the host name {address[0]!r} is unknown"
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return "the host does not answer; check the address, the network and firewalls"
    except OSError as error:
        return f"{error.strerror or error}"
    if answer[3:4] == SETTINGS:
        return NO_TLS if is_tls else "the server accepts connections, but does not answer calls; see the gateway's log"
    if _answer(address, HTTP_REQUEST).startswith(b"HTTP/1"):
        return IS_HTTP
    if not is_tls and (answer.startswith(TLS_ALERT) or _speaks_tls(address)):
        return NEEDS_TLS
    return CLOSED


def _answer(address: tuple[str, int], request: bytes) -> bytes:
    """The first bytes that the server sends after a plaintext request; empty if it sends none."""
    with socket.create_connection(address, TIMEOUT_S) as connection:
        with contextlib.suppress(OSError):  # includes TimeoutError: the server sends nothing
            connection.sendall(request)
            return connection.recv(64)
        return b""


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only the protocol matters; nothing is sent
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(address, TIMEOUT_S) as connection:
            context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        return "ALERT" in str(error)  # a TLS server that refuses this client
    except OSError:
        return False
    return True
