"""API keys: clients authenticate with a bearer token. Accepted keys are the files of a folder, one key per file.

    chart (gateway.apiKeys)   a Secret mounted as the folder; each entry is a key
    by hand                   printf %s "$KEY" > keys/team-a

The file's name is the key's owner. Files may be added, changed and removed while the gateway runs.
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
# Health probes and generic tools need no key; everything else does.
OPEN_TO_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")


class ApiKeysError(ValueError):
    """The folder cannot be read or holds no key at start."""


class ApiKeys:
    """The accepted keys, as digests. Read again at most every `REREAD_S`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._read_at = clock()
        try:
            self._owners = _read(folder)
        except OSError as error:
            raise ApiKeysError(f"--api-keys {folder}: {error.strerror or error}") from None
        if not self._owners:
            raise ApiKeysError(f"--api-keys {folder}: the folder holds no key; add one file per key")
        log.info("%d API keys", len(self._owners))

    def owner_of(self, key: str) -> str | None:
        """The owner of a key; None if the key is not accepted."""
        if self._clock() - self._read_at >= REREAD_S:
            self._read_again()
        return self._owners.get(_digest(key.encode()))

    def problem_of(self, authorization: object) -> str:
        """Why this Authorization header does not let a client in; empty if it does."""
        if not isinstance(authorization, str) or authorization[: len(SCHEME)].lower() != SCHEME:
            return "an API key is required; set QUIRE_API_KEY, or api_key=... of the client"
        if self.owner_of(authorization[len(SCHEME) :].strip()) is None:
            return "the API key is not accepted by this gateway"
        return ""

    def _read_again(self) -> None:
        self._read_at = self._clock()
        try:
            owners = _read(self._folder)
        except OSError as error:
            log.error("cannot read API keys, keeping the previous ones: %s: %s", self._folder, error.strerror or error)
            return
        if owners != self._owners:
            log.info("API keys changed: %d keys", len(owners))
        self._owners = owners


def _read(folder: Path) -> dict[bytes, str]:
    """Owners by key digest. Hidden files are skipped: a kubelet creates them beside mounted Secrets."""
    files = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
    keys = {path.name: path.read_bytes().strip() for path in files}
    return {_digest(key): name for name, key in keys.items() if key}


def _digest(key: bytes) -> bytes:
    """Keys are compared by digest, so that the time of a look-up reveals nothing about a key."""
    return hashlib.sha256(key).digest()


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without an accepted key with UNAUTHENTICATED. Runs inside ErrorInterceptor, which counts the error."""

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
        problem = self._keys.problem_of(dict(handler_call_details.invocation_metadata or ()).get("authorization"))
        return _refusing(handler, problem) if problem else handler


def _refusing(handler: Handler, words: str) -> Handler:
    """A handler of the same kind that refuses the call. No RPC that needs a key has a stream of requests.

    It has no deserializer: parsing a large body for a client without a key would block all streams of this process.
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
