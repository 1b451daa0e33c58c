"""JSON web tokens (JWT) of clients: signature, issuer, audience and time are checked; claims name the owner."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.callers.caller import Caller, CallersError, owner_name
from gateway_svc.callers.jwks import Jwks, VerifyKey
from svc_common.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError

MAX_TOKEN_CHARS = 16 << 10
MAX_CACHED = 4096
MAX_SUBJECT_CHARS = 128
RETRY_S = 2.0
SUBJECT = "sub:"


class JwtError(CallersError):
    """A setting of tokens is missing or invalid."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Required claims of a token."""

    issuer: str
    audiences: Sequence[str]
    tenant_claim: str = "tenant"
    scope: str = ""  # empty: any
    leeway_s: float = 30.0


class JsonWebTokens:
    """Checks tokens. A token that was accepted is accepted by its digest until it expires or the keys change."""

    def __init__(self, expected: Expected, jwks: Jwks, clock: Callable[[], float] = time.time) -> None:
        self._expected = expected
        self._jwks = jwks
        self._clock = clock
        self._accepted: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        self._version = jwks.version

    async def start(self) -> None:
        await self._jwks.start()

    async def close(self) -> None:
        await self._jwks.close()

    async def check(self, token: str) -> Caller:
        """The caller with this token. Errors never contain a part of the token.

        Raises UnauthenticatedError, PermissionDeniedError or UnavailableError.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        if (caller := self._known(digest)) is not None:
            return caller
        claims = self._verified(token, await self._key_of(token))
        self._check_scope(claims)
        caller = self._caller_of(claims)
        self._accepted[digest] = caller, float(claims["exp"]) + self._expected.leeway_s
        if len(self._accepted) > MAX_CACHED:
            self._accepted.popitem(last=False)
        return caller

    def _known(self, digest: bytes) -> Caller | None:
        if self._version != self._jwks.version:
            self._version = self._jwks.version
            self._accepted.clear()
        caller, until = self._accepted.get(digest, (None, 0.0))
        return caller if self._clock() < until else None

    async def _key_of(self, token: str) -> VerifyKey:
        import jwt

        if len(token) > MAX_TOKEN_CHARS:
            raise UnauthenticatedError(f"the token has {len(token)} characters; at most {MAX_TOKEN_CHARS} are accepted")
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
        except (jwt.InvalidTokenError, RecursionError):  # JSON may be nested deeply
            raise UnauthenticatedError("the token is not a JSON web token") from None
        key = await self._jwks.key_of(key_id)
        if key is None and not self._jwks.is_loaded:
            raise UnavailableError(
                "this gateway has not loaded the keys of the token's issuer yet; retry later", retry_after_s=RETRY_S
            )
        if key is None:
            raise UnauthenticatedError("the token was signed with an unknown key: its key id (kid) is not in the JWKS")
        return key

    def _verified(self, token: str, key: VerifyKey) -> Mapping[str, Any]:
        import jwt

        expected = self._expected
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                issuer=expected.issuer,
                audience=list(expected.audiences),
                leeway=expected.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
            float(claims["exp"])
            f"{claims.get('sub')}{claims.get(expected.tenant_claim)}".encode()  # may be half of a surrogate pair
        except (jwt.PyJWTError, OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise UnauthenticatedError(self._words_of(error, key)) from None
        return claims

    def _words_of(self, error: Exception, key: VerifyKey) -> str:
        import jwt

        if isinstance(error, jwt.MissingRequiredClaimError):
            return f"the token has no claim {error.claim}"
        audiences, algorithms = " or ".join(self._expected.audiences), ", ".join(key.algorithms)
        words: dict[type[Exception], str] = {
            jwt.ExpiredSignatureError: "the token has expired; get a new one",
            jwt.ImmatureSignatureError: "the token is not valid yet (nbf or iat); check the clocks",
            jwt.InvalidIssuerError: f"the token has another issuer (iss) than {self._expected.issuer}",
            jwt.InvalidAudienceError: f"the token has another audience (aud) than {audiences}",
            jwt.InvalidSignatureError: "the token's signature is wrong",
            jwt.InvalidAlgorithmError: f"the token's algorithm (alg) does not fit its key: {algorithms}",
        }
        return words.get(type(error), "the token or one of its claims is malformed")

    def _check_scope(self, claims: Mapping[str, Any]) -> None:
        needed = self._expected.scope
        if needed and needed not in _scopes_of(claims):
            raise PermissionDeniedError(f"the token has no scope {needed}")

    def _caller_of(self, claims: Mapping[str, Any]) -> Caller:
        """The tenant claim names the owner; without it, the subject does, in names that no tenant has."""
        name = self._expected.tenant_claim
        tenant, subject = claims.get(name), claims.get("sub")
        if tenant is None and not subject:
            raise UnauthenticatedError(f"the token has neither a claim {name} nor a claim sub")
        if tenant is not None and (not isinstance(tenant, str) or not tenant or tenant.startswith(SUBJECT)):
            raise UnauthenticatedError(f"the token's claim {name} is not the name of a tenant")
        owner = f"{SUBJECT}{subject}" if tenant is None else tenant
        return Caller(owner_name(owner), f"jwt:{subject or ''}"[:MAX_SUBJECT_CHARS])


def _scopes_of(claims: Mapping[str, Any]) -> Sequence[str]:
    """OAuth: `scope` is a text with spaces. Some issuers have a list, or name it `scp`."""
    scopes = claims.get("scope", claims.get("scp", ""))
    if isinstance(scopes, str):
        return scopes.split()
    return scopes if isinstance(scopes, list) else ()


def check_installed() -> None:
    """Raise JwtError if the packages are missing."""
    try:
        import cryptography  # noqa: F401
        import jwt  # noqa: F401
    except ImportError:
        raise JwtError(
            "--jwt-issuer needs the package pyjwt[crypto]; install it with `pip install 'quire-server[jwt]'`"
        ) from None
