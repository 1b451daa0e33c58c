"""Finds the caller of each call from its Authorization header, over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway_svc.callers.api_keys import ApiKeys
from gateway_svc.callers.caller import Caller, current_caller
from gateway_svc.callers.tokens import JsonWebTokens
from svc_common.calls import PROBES, Context
from svc_common.errors import UnauthenticatedError

Begin = Callable[[str], Awaitable[None]]
SCHEME = "bearer "
DOTS_OF_TOKEN = 2  # header.claims.signature


class Authenticator:
    """Accepts API keys, JSON web tokens, or both."""

    def __init__(self, keys: ApiKeys | None, tokens: JsonWebTokens | None = None, begin: Begin | None = None) -> None:
        """`begin` is called with the owner of each call, before its request is received, and may raise ServiceError."""
        self._begin = begin
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

    async def admit(self, method: str, context: Context) -> str:
        """Set `current_caller` of a call over gRPC, whose handler runs in the same task. Returns its sender, or
        nothing for a probe of health, which needs no key. Raises ServiceError.
        """
        if method.startswith(PROBES):
            return ""
        await self.authenticate(dict(context.invocation_metadata() or ()).get("authorization"))
        return current_caller.get().sender

    async def authenticate(self, authorization: object) -> None:
        """Set `current_caller` from an Authorization header. Raises ServiceError."""
        if not isinstance(authorization, str) or authorization[: len(SCHEME)].lower() != SCHEME:
            raise UnauthenticatedError(self._needed)
        caller = await self._caller_of(authorization[len(SCHEME) :].strip())
        current_caller.set(caller)
        if self._begin is not None:
            await self._begin(caller.owner)

    async def _caller_of(self, credential: str) -> Caller:
        caller = None if self._keys is None else self._keys.find(credential)
        if caller is not None:
            return caller
        if self._tokens is not None and (self._keys is None or credential.count(".") == DOTS_OF_TOKEN):
            return await self._tokens.check(credential)
        raise UnauthenticatedError("the API key is not accepted by this gateway")
