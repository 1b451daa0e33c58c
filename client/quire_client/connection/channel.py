"""Targets, channels, metadata and health messages of both clients."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from quire_client.connection.diagnosis import cannot_connect, check_address
from quire_client.connection.tls import Tls, channel_security
from quire_client.errors import QuireError, invalid

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
