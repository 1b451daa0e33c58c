"""Who may ask: clients whose bearer token is one of the keys in a folder, one file for each.

    gateway.apiKeys of the chart   a Secret mounted as the folder: its entries are the keys
    by hand                        printf %s "$KEY" > keys/team-a

A file's name says whose key it is. Files may come and go while the gateway runs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from svc_common.errors import Handler, UnauthenticatedError

log = logging.getLogger(__name__)

REREAD_S = 5.0
SCHEME = "bearer "
# Probes and generic tools may look whether a gateway is there; what it serves needs a key.
OPEN_TO_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")


class ApiKeysError(ValueError):
    """There is no key to begin with."""


class ApiKeys:
    """The keys in force, as digests; read again at most every `REREAD_S`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._read_at = clock()
        try:
            self._owners = _read(folder)
        except OSError as error:
            raise ApiKeysError(f"--api-keys {folder}: {error.strerror or error}") from None
        if not self._owners:
            raise ApiKeysError(f"--api-keys {folder}: there is no key; put each into a file of its own")
        log.info("%d API keys", len(self._owners))

    def owner_of(self, key: str) -> str | None:
        """Whose key it is, None: nobody's."""
        if self._clock() - self._read_at >= REREAD_S:
            self._read_again()
        return self._owners.get(_digest(key.encode()))

    def _read_again(self) -> None:
        self._read_at = self._clock()
        try:
            owners = _read(self._folder)
        except OSError as error:
            log.error("the former API keys stay in force: %s: %s", self._folder, error.strerror or error)
            return
        if owners != self._owners:
            log.info("%d API keys, after a change", len(owners))
        self._owners = owners


def _read(folder: Path) -> dict[bytes, str]:
    """Names by digest. Hidden names are a kubelet's own."""
    files = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
    keys = {path.name: path.read_bytes().strip() for path in files}
    return {_digest(key): name for name, key in keys.items() if key}


def _digest(key: bytes) -> bytes:
    """So that a look-up takes as long for a key that is nearly right as for any other."""
    return hashlib.sha256(key).digest()


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a known key with UNAUTHENTICATED. Inside of ErrorInterceptor, which tells and counts it."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_TO_ALL):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        if not isinstance(given, str) or given[: len(SCHEME)].lower() != SCHEME:
            return _refusing(handler, "this gateway wants an API key; set QUIRE_API_KEY, or api_key=... of the client")
        if self._keys.owner_of(given[len(SCHEME) :].strip()) is None:
            return _refusing(handler, "this gateway does not know the API key that was sent")
        return handler


def _refusing(handler: Handler, words: str) -> Handler:
    """A handler of the same kind that refuses. No service of ours that needs a key takes a stream of requests.

    It has no deserializer: who has no key makes this process read no body, which would stop every stream meanwhile.
    """

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        raise UnauthenticatedError(words)

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        raise UnauthenticatedError(words)
        yield

    serializer = handler.response_serializer
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream, response_serializer=serializer)
    return grpc.unary_unary_rpc_method_handler(refuse, response_serializer=serializer)
