"""Targets, channels, metadata and health messages of both clients, the choice of a gateway for the next attempt, and
why none answers at an address: gRPC's own message often does not name the cause.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from quire_client.errors import ConnectionFailed, QuireError, invalid

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


AVOID_S = 1.0  # how long a gateway is avoided after a refusal or a break
AVOID_FROZEN_S = 30.0  # longer, because each call to a hanging gateway costs a stall timeout; a probe can end it


@dataclass(slots=True)
class _Target:
    avoid_until: float = 0.0
    is_frozen: bool = False
    alive_at: float = -1e9


class TargetRing:
    """Round robin over gateways; gateways that failed recently are chosen last. Threads may share it without a lock: a
    lost update only costs one attempt.
    """

    def __init__(self, num_targets: int) -> None:
        self._targets = [_Target() for _ in range(num_targets)]
        self._last = num_targets - 1

    def __len__(self) -> int:
        return len(self._targets)

    def next(self, now: float) -> int:
        """The next working gateway; if there is none, the gateway whose avoid time ends first."""
        order = [(self._last + 1 + i) % len(self._targets) for i in range(len(self._targets))]
        best = min(order, key=lambda index: max(0.0, self._targets[index].avoid_until - now))
        self._last = best
        return best

    def has_working(self, now: float) -> bool:
        """Whether at least one gateway has not failed recently."""
        return any(target.avoid_until <= now for target in self._targets)

    def failed(self, index: int, now: float, *, is_frozen: bool = False) -> None:
        """Avoid a gateway: AVOID_S after a refusal or a break; a frozen gateway AVOID_FROZEN_S or until it answers."""
        target = self._targets[index]
        target.is_frozen = target.is_frozen or is_frozen
        target.avoid_until = now + (AVOID_FROZEN_S if target.is_frozen else AVOID_S)

    def works(self, index: int, now: float) -> None:
        """The gateway answered."""
        target = self._targets[index]
        target.alive_at = now
        target.avoid_until = 0.0
        target.is_frozen = False

    def alive_at(self, index: int) -> float:
        """The time of the gateway's last answer."""
        return self._targets[index].alive_at

    def frozen(self) -> list[int]:
        """The gateways that hang. The caller probes them."""
        return [index for index, target in enumerate(self._targets) if target.is_frozen]


T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]

DEFAULT_TARGET = "localhost:50051"
TARGET_ENV = "QUIRE_TARGET"
API_KEY_ENV = "QUIRE_API_KEY"
MAX_MESSAGE_BYTES = 64 << 20
METADATA_NAME = re.compile(r"(?!grpc-)[a-z0-9_.-]+(?<!-bin)")  # names of text values

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # During a long prefill the server sends nothing: pings distinguish a slow server from a dead host. Servers close
    # the connection with GOAWAY if pings are less than 10 s apart.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # gRPC's core waits this long for the answer; the default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_STATES = {0: "unknown", 1: "serving", 2: "not_serving", 3: "service_unknown"}


def resolve_targets(target: str | Sequence[str] | None) -> tuple[str, ...]:
    """The gateways in `target`, else the gateways in QUIRE_TARGET, else localhost:50051.

    Several gateways: a list or a comma-separated string. Raises InvalidRequest if `target` names no gateway.
    """
    given = target if target is not None else os.environ.get(TARGET_ENV) or DEFAULT_TARGET
    listed = [given or DEFAULT_TARGET] if isinstance(given, str) else list(given)
    found = tuple(dict.fromkeys(part for entry in listed for part in _split(entry)))
    if not found:
        raise invalid("target", f"target={given!r} names no gateway; use host:port, or host:port,host:port for several")
    for address in found:
        check_address(address)
    return found


def _split(entry: str) -> list[str]:
    """The targets in one string; a gRPC address list (ipv4:a,b) is one target."""
    if entry.startswith(("ipv4:", "ipv6:")):
        return [entry]
    return [part.strip() for part in entry.split(",") if part.strip()]


def api_key_of(api_key: str | None) -> str:
    """`api_key`, else QUIRE_API_KEY; empty if neither is set. Raises InvalidRequest."""
    key = (api_key if api_key is not None else os.environ.get(API_KEY_ENV, "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise invalid(
            "api_key", "api_key contains a character that is not allowed in a header; use printable ASCII only"
        )
    return key


def call_metadata(api_key: str | None) -> Metadata:
    """Metadata of every call: the API key, if set, as a bearer token. Raises InvalidRequest."""
    key = api_key_of(api_key)
    return (("authorization", f"Bearer {key}"),) if key else ()


def extra_metadata(given: Mapping[str, str] | None) -> Metadata:
    """The caller's metadata after a check. Raises InvalidRequest."""
    for name, value in (given or {}).items():
        if not METADATA_NAME.fullmatch(name.lower()):
            raise invalid("metadata", f"metadata name {name!r} is not valid; use letters, digits, '-', '_' and '.'")
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise invalid("metadata", f"metadata {name!r} must be a string of printable ASCII; got {value!r}")
    return tuple((name.lower(), value) for name, value in (given or {}).items())


def joined(metadata: Metadata, extra: Metadata) -> Metadata:
    """The union of both. `extra` overrides `metadata`."""
    return tuple({**dict(metadata), **dict(extra)}.items()) if extra else metadata


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Options of a channel to `target`. Connections to this machine never use a proxy from the environment."""
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    is_local = target.startswith("unix:") or host == "localhost" or host.startswith("127.") or host == "::1"
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_local else CHANNEL_OPTIONS


def open_channel(
    library: Any,
    target: str,
    credentials: grpc.ChannelCredentials | None,
    security_options: Sequence[tuple[str, Any]] = (),
) -> Any:
    """A channel of `library`, which is grpc or grpc.aio. No credentials: plaintext."""
    options = [*channel_options(target), *security_options]
    if credentials is None:
        return library.insecure_channel(target, options=options)
    return library.secure_channel(target, credentials, options=options)


def channel_openers(
    library: Any,
    target: str | Any | Sequence[str] | Sequence[Any] | None,
    tls: Tls | bool | None,
    credentials: grpc.ChannelCredentials | None,
) -> tuple[list[Callable[[], Any]], Callable[[QuireError], QuireError]]:
    """Functions that open the channels, and one that explains why no gateway was reached. `target` may have channels
    that the caller has opened. Raises InvalidRequest.
    """
    given: list[Any] = list(target) if isinstance(target, Sequence) and not isinstance(target, str) else [target]
    opened = [one for one in given if one is not None and not isinstance(one, str)]
    if opened:
        return [partial(_itself, channel) for channel in opened], _itself
    targets = resolve_targets(target)
    credentials, options = channel_security(tls, credentials)
    openers = [partial(open_channel, library, address, credentials, options) for address in targets]
    return list(openers), partial(cannot_connect, targets, is_tls=credentials is not None)


def _itself(value: T) -> T:
    return value


def health_request(service: str) -> bytes:
    """grpc.health.v1.HealthCheckRequest {1: service}; names must be shorter than 128 bytes."""
    name = service.encode()
    return bytes((0x0A, len(name))) + name if name else b""


def health_state(response: bytes) -> str:
    """The state in grpc.health.v1.HealthCheckResponse {1: status}."""
    value = response[1] if len(response) == 2 and response[0] == 0x08 else 0
    return HEALTH_STATES.get(value, "unknown")
