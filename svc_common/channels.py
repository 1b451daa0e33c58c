"""Connections: limits of a port, so that no client uses up its files, memory or CPU time; pings, which find broken
ones; and channels between Quire's services, whose calls check answers before they decode them and carry a token.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from svc_common.calls import decoder
from svc_common.errors import InvalidRequestError


def bind_tcp(listen: str) -> socket.socket:
    """A TCP socket bound to host:port, not yet listening. No other socket may use the port. Raises OSError."""
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((bare, int(port)))
    except OSError:
        bound.close()
        raise
    return bound


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


DEFAULT_MAX_BUNDLE = "128M"  # default of --max-bundle-bytes; tokenizers have up to 40 MB
MAX_BUNDLE_BYTES = 128 << 20
MAX_MESSAGE_BYTES = 64 << 20  # between services: a step that opens 128 rows of 128 K tokens, 4 bytes each

# Options of channels that carry large messages: frames of 16 MiB instead of 16 KiB, and several ahead of the reader.
BULK_OPTIONS: dict[str, Any] = {
    "grpc.http2.max_frame_size": (1 << 24) - 1,
    "grpc.http2.lookahead_bytes": MAX_MESSAGE_BYTES,
}

OpenChannel = Callable[[str], grpc.aio.Channel]


def reachable_address(listen: str, *, towards: str) -> str:
    """`listen` with a host that `towards` can dial: if it listens on all interfaces, the local address of the route."""
    host, _, port = listen.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::"):
        return listen
    peer_host, _, peer_port = towards.rpartition(":")
    try:
        family, kind, proto, _, peer = socket.getaddrinfo(
            peer_host.strip("[]"), int(peer_port), type=socket.SOCK_DGRAM, family=socket.AF_UNSPEC
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(peer)  # a datagram socket: finds the route, sends nothing
            local = str(probe.getsockname()[0])
    except OSError:
        local = socket.gethostname()
    return f"[{local}]:{port}" if ":" in local else f"{local}:{port}"


class ServiceChannel(grpc.aio.Channel):
    """A channel to another service. `authorization` gives the newest token for each call; None: calls carry none.

    A message of the server that cannot be decoded, or has too many fields, becomes None, as in grpc.aio; the reason is
    logged. (Interceptors would cost time for every message of a stream.)
    """

    def __init__(self, channel: grpc.aio.Channel, authorization: Callable[[], str] | None = None) -> None:
        self._channel = channel
        self._authorization = authorization

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._channel.unary_unary, method, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._channel.unary_stream, method, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._channel.stream_unary, method, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._channel.stream_stream, method, args, kwargs)

    def _call(self, make: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (deserialize := kwargs.get("response_deserializer")) is not None:
            kwargs["response_deserializer"] = _or_none(decoder(deserialize, method.lstrip("/"), is_streamed=True))
        begin, authorization = make(method, *args, **kwargs), self._authorization
        if authorization is None:
            return begin

        def call(*args: Any, **kwargs: Any) -> Any:
            # A channel may live for weeks. Its next call carries the token that replaced the one of its first call.
            return begin(*args, metadata=(("authorization", authorization()),), **kwargs)

        return call

    async def __aenter__(self) -> ServiceChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()


def _or_none(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def convert(data: bytes) -> Any:
        try:
            return decode(data)
        except InvalidRequestError as error:
            log.warning("%s", error.message)
            return None

    return convert


class ReceiveError(Exception):
    """A bundle is too large, or cannot be decoded."""


async def read_bundle(call: grpc.aio.UnaryStreamCall[Any, Any], max_bytes: int) -> bytes:
    """The data of all pieces of a bundle. Raises ReceiveError as soon as there are more than `max_bytes`."""
    data = bytearray()
    try:
        async for piece in call:
            if piece is None or not piece.data:  # empty pieces could go on forever
                raise ReceiveError("a piece of the bundle is empty or cannot be decoded")
            data += piece.data
            if len(data) > max_bytes:
                raise ReceiveError(f"the bundle has more than {max_bytes} bytes, the limit of --max-bundle-bytes")
    finally:
        call.cancel()
    return bytes(data)
