"""API keys: clients authenticate with a bearer token. Each file of a folder is an owner, each of its lines a key.

    chart (gateway.apiKeys)   a Secret mounted as the folder; each entry is an owner
    by hand                   printf %s "$KEY" > keys/team-a

Request ids belong to the owner. Files may be added, changed and removed while the gateway runs; to replace a key, add a
line first and remove the old one later.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc

from svc_common.errors import Handler, UnauthenticatedError

log = logging.getLogger(__name__)

REREAD_S = 5.0
SCHEME = "bearer "
OWNER = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Health probes and generic tools need no key; everything else does.
OPEN_TO_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")

# Owner of the current call's API key; empty without API keys.
current_caller: ContextVar[str] = ContextVar("current_caller", default="")


def scoped(request_id: str) -> str:
    """The id of a request inside the services: `OWNER/request_id`, so that no other owner can abort or resume it.

    A client's request id cannot contain `/`.
    """
    caller = current_caller.get()
    return f"{caller}/{request_id}" if caller else request_id


class ApiKeysError(ValueError):
    """The folder cannot be read or holds no key at start."""


class ApiKeys:
    """The accepted keys, as digests. Read again at most every `REREAD_S`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, flag: str = "--api-keys") -> None:
        self._folder = folder
        self._clock = clock
        self._read_at = clock()
        try:
            self._owners = _read(folder)
        except OSError as error:
            raise ApiKeysError(f"{flag} {folder}: {error.strerror or error}") from None
        if not self._owners:
            raise ApiKeysError(f"{flag} {folder}: the folder holds no key; add a file with a key")
        log.info("%d API keys", len(self._owners))

    def owner_of(self, key: str) -> str | None:
        """The owner of a key; None if the key is not accepted."""
        if self._clock() - self._read_at >= REREAD_S:
            self._read_again()
        return self._owners.get(_digest(key.encode()))

    def authenticate(self, authorization: object) -> None:
        """Set `current_caller` from an Authorization header. Raises UnauthenticatedError."""
        if not isinstance(authorization, str) or authorization[: len(SCHEME)].lower() != SCHEME:
            raise UnauthenticatedError("an API key is required; set QUIRE_API_KEY, or api_key=... in the client")
        owner = self.owner_of(authorization[len(SCHEME) :].strip())
        if owner is None:
            raise UnauthenticatedError("the API key is not accepted by this gateway")
        current_caller.set(owner)

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
    keys = [(line.strip(), path.name) for path in files for line in path.read_bytes().splitlines()]
    return {_digest(key): _owner(name) for key, name in keys if key}


def _owner(name: str) -> str:
    """The file's name, or its digest if it cannot be part of a request id."""
    return name if OWNER.fullmatch(name) else _digest(os.fsencode(name)).hex()[:32]


def _digest(key: bytes) -> bytes:
    """Keys are compared by digest, so that the time of a look-up reveals nothing about a key."""
    return hashlib.sha256(key).digest()


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without an accepted key: UNAUTHENTICATED. Runs inside ErrorInterceptor, which counts the error."""

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
        try:  # sets current_caller for the handler, which runs in the same task
            self._keys.authenticate(dict(handler_call_details.invocation_metadata or ()).get("authorization"))
        except UnauthenticatedError as error:
            return _refusing(handler, error.message)
        return handler


def _refusing(handler: Handler, words: str) -> Handler:
    """A handler of the same kind that refuses the call. No RPC that needs a key streams requests.

    It has no deserializer: parsing a large body from a client without a key would block all streams of this process.
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
