"""Limits on the connections of a gRPC port, so that no client uses up its files, memory or CPU time; and pings, which
find broken connections.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 20.0  # for TLS and the first frames of HTTP/2
IDLE_TIMEOUT_S = 600.0  # without a call; gRPC clients connect again by themselves
WINDOW_BYTES = 64 << 10
MAX_METADATA_BYTES = 16 << 10  # headers of a call, such as an API key or a JWT


@dataclass(frozen=True, slots=True)
class Pings:
    """A ping after `after_s` without data; without an answer within `answer_s`, the connection is closed.

    The core of gRPC answers in a thread of its own, without the event loop and without Python's lock. So a busy process
    answers. A stopped process, or one whose host is gone, does not, and its streams end.
    """

    after_s: float
    answer_s: float

    def options(self) -> dict[str, Any]:
        """Options of a server or channel."""
        answer_ms = int(1000 * self.answer_s)
        return {
            "grpc.keepalive_time_ms": int(1000 * self.after_s),
            "grpc.keepalive_timeout_ms": answer_ms,  # also the limit for TCP, if the peer's host acknowledges nothing
            "grpc.http2.ping_timeout_ms": answer_ms,
            "grpc.http2.max_pings_without_data": 0,
            "grpc.keepalive_permit_without_calls": 1,
        }


PUBLIC_PINGS = Pings(30.0, 10.0)
SCHEDULER_PINGS = Pings(1.0, 2.0)  # between a scheduler and its gateways: requests can move at little cost
WORKER_PINGS = Pings(2.0, 8.0)  # pings of a scheduler to its workers: their sequences are computed again


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one port (docs/adr/0030-hostile-input.md).

    `max_streams`: calls on one connection at the same time; a client delays further calls. Without it, gRPC creates a
    call for each HEADERS frame, also if RST_STREAM follows at once ("rapid reset"). gRPC refuses some calls of a client
    that keeps to the limit, because it counts a call that it has answered for a moment longer than the client
    (UNAVAILABLE, REFUSED_STREAM): choose more than clients need. The default is enough for services: each has one
    stream to a peer, and a few calls beside it.
    `max_age_s`: clients must reconnect after about this time (10 % jitter); 0: never.
    """

    max_connections: int = 4096
    max_streams: int = 32
    max_age_s: float = 0.0

    def options(self) -> dict[str, Any]:
        """Options of a grpc.aio server."""
        options: dict[str, Any] = {
            "grpc.max_allowed_incoming_connections": _within_file_limit(self.max_connections),
            "grpc.max_concurrent_streams": self.max_streams,
            "grpc.server_handshake_timeout_ms": int(HANDSHAKE_TIMEOUT_S * 1000),
            "grpc.max_connection_idle_ms": int(IDLE_TIMEOUT_S * 1000),
            # A call that is not read holds one window. Without these, gRPC lets windows grow to 64 MiB on fast links.
            "grpc.http2.bdp_probe": 0,
            "grpc.http2.lookahead_bytes": WINDOW_BYTES,
            "grpc.max_metadata_size": MAX_METADATA_BYTES,
            "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        }
        if self.max_age_s:
            # GOAWAY: open calls may finish on the connection, new calls use another one.
            options["grpc.max_connection_age_ms"] = int(self.max_age_s * 1000)
        return options


def _within_file_limit(max_connections: int) -> int:
    """The number of connections that leaves a quarter of the files that this process may open for other uses."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    possible = max_connections if hard == resource.RLIM_INFINITY else max(1, hard * 3 // 4)
    if possible < max_connections:
        log.warning(
            "at most %d of %d connections are accepted, because this process may open %d files; raise its hard limit "
            "(ulimit -Hn, LimitNOFILE)",
            possible,
            max_connections,
            hard,
        )
    return min(possible, max_connections)


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit: the soft limit is often 1024, and a connection needs a file."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
