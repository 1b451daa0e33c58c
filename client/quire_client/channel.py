"""Targets, channel options, metadata and health bytes, the same for both clients."""

from __future__ import annotations

import os
from typing import Any

from quire_client import protobuf_wire

DEFAULT_TARGET = "localhost:50051"
TARGET_ENV = "QUIRE_TARGET"
API_KEY_ENV = "QUIRE_API_KEY"
MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # A long prefill is silent: pings tell a slow server from a dead one.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_STATES = {0: "unknown", 1: "serving", 2: "not_serving", 3: "service_unknown"}


def resolve_target(target: str | None) -> str:
    """The target that was given, else QUIRE_TARGET, else localhost:50051."""
    return target or os.environ.get(TARGET_ENV) or DEFAULT_TARGET


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call: the API key as a bearer token, when there is one."""
    key = api_key if api_key is not None else os.environ.get(API_KEY_ENV)
    return (("authorization", f"Bearer {key}"),) if key else ()


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Options of a channel to `target`. A proxy from the environment is never asked for this machine's own services."""
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    is_local = target.startswith("unix:") or host == "localhost" or host.startswith("127.") or host == "::1"
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_local else CHANNEL_OPTIONS


def health_request(service: str) -> bytes:
    """grpc.health.v1.HealthCheckRequest {1: service}; names are shorter than 128 bytes."""
    name = service.encode()
    return bytes((0x0A, len(name))) + name if name else b""


def health_state(response: bytes) -> str:
    """The state in grpc.health.v1.HealthCheckResponse {1: status}."""
    value = dict(protobuf_wire.fields(response)).get(1, 0)
    return HEALTH_STATES.get(value, "unknown") if isinstance(value, int) else "unknown"
