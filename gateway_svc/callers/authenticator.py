"""Finds the caller of each call from its Authorization header, over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from gateway_svc.callers.api_keys import ApiKeys
from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.callers.tokens import JsonWebTokens
from svc_common.errors import Handler, QuireError, UnauthenticatedError

SCHEME = "bearer "
DOTS_OF_TOKEN = 2  # header.claims.signature
# Health probes and generic tools need no key; everything else does.
OPEN_TO_ALL = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)


class Authenticator:
    """Accepts API keys, JSON web tokens, or both."""

    def __init__(self, keys: ApiKeys | None, tokens: JsonWebTokens | None = None) -> None:
        self._keys = keys
        self._tokens = tokens
        kinds = ["an API key"] * (keys is not None) + ["a token (JWT)"] * (tokens is not None)
        self._needed = f"{' or '.join(kinds)} is required; set QUIRE_API_KEY, or api_key=... in the client"

    async def start(self) -> None:
        if self._tokens is not None:
            await self._tokens.start()

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    async def authenticate(self, authorization: object) -> None:
        """Set `current_caller` from an Authorization header. Raises QuireError."""
        if not isinstance(authorization, str) or authorization[: len(SCHEME)].lower() != SCHEME:
            raise UnauthenticatedError(self._needed)
        current_caller.set(await self._caller_of(authorization[len(SCHEME) :].strip()))

    async def _caller_of(self, credential: str) -> Caller:
        caller = None if self._keys is None else self._keys.find(credential)
        if caller is not None:
            return caller
        if self._tokens is not None and (self._keys is None or credential.count(".") == DOTS_OF_TOKEN):
            return await self._tokens.check(credential)
        raise UnauthenticatedError("the API key is not accepted by this gateway")


class CallerInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without accepted credentials: UNAUTHENTICATED. ErrorInterceptor, outside of it, counts them."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_TO_ALL):
            return handler
        header = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        try:  # sets current_caller for the handler, which runs in the same task
            await self._authenticator.authenticate(header)
        except QuireError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Handler, error: QuireError) -> Handler:
    """A handler of the same kind that refuses the call. No RPC that needs credentials streams requests.

    It has no deserializer: parsing a large body from a client without a key would block all streams of this process.
    """

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        raise error

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        raise error
        yield

    serializer = handler.response_serializer
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream, response_serializer=serializer)
    return grpc.unary_unary_rpc_method_handler(refuse, response_serializer=serializer)
