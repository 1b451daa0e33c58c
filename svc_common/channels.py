"""Channels between Quire's services: their calls check answers before they decode them, and carry a token."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import grpc

from svc_common.calls import decoder
from svc_common.errors import InvalidRequestError

log = logging.getLogger(__name__)

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
