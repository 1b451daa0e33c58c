"""JSON web tokens (JWT) of clients: signature, issuer, audience and time are checked; claims name the owner."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import urllib.parse
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gateway_svc.callers.caller import Caller, CallersError, owner_name
from svc_common.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from svc_common.security.trust import is_loopback
from svc_common.tasks import cancel

log = logging.getLogger(__name__)

FILE_REFRESH_S = 5.0
URL_REFRESH_S = 300.0
MIN_INTERVAL_S = 10.0
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 1 << 20
MIN_RSA_BITS = 2048
RSA_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
EC_ALGORITHMS = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",)}
ED_ALGORITHMS = ("EdDSA",)


class JwksError(CallersError):
    """The source cannot be read, or has no usable key."""


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A public key, and the algorithms that may be used with it. Its type decides them, never the token."""

    key: Any
    algorithms: tuple[str, ...]


Keys = Mapping[str, VerifyKey]


def read_keys(data: bytes, where: str) -> Keys:
    """Keys by their id (`kid`; empty if a key has none). Secret keys and keys for encryption are skipped.

    Raises JwksError.
    """
    try:
        listed = json.loads(data)["keys"]
        found = {str(jwk.get("kid", "")): key for jwk in listed if (key := _verify_key(jwk)) is not None}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JwksError(f"{where}: not a JWKS, which is JSON with a list `keys` ({type(error).__name__})") from None
    if not found:
        raise JwksError(f"{where}: no RSA, EC (P-256, P-384, P-521) or Ed25519 key for signatures")
    return found


def _verify_key(jwk: Mapping[str, Any]) -> VerifyKey | None:
    """None if signatures cannot be checked with this key."""
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    algorithms = _algorithms_of(jwk)
    if not algorithms or jwk.get("use", "sig") != "sig" or "d" in jwk:
        return None
    try:
        key = PyJWK(dict(jwk), algorithms[0]).key
    except PyJWTError:
        return None
    is_short = algorithms[0] in RSA_ALGORITHMS and key.key_size < MIN_RSA_BITS
    return None if is_short else VerifyKey(key, algorithms)


def _algorithms_of(jwk: Mapping[str, Any]) -> tuple[str, ...]:
    """The algorithms of the key's type; only the key's own, if it names one."""
    kind, curve, own = jwk.get("kty"), jwk.get("crv"), jwk.get("alg")
    fitting: tuple[str, ...] = ()
    if kind == "RSA":
        fitting = RSA_ALGORITHMS
    elif kind == "EC":
        fitting = EC_ALGORITHMS.get(str(curve), ())
    elif kind == "OKP" and curve == "Ed25519":
        fitting = ED_ALGORITHMS
    return fitting if own is None else tuple(name for name in fitting if name == own)


class Jwks:
    """The public keys of one issuer. `start` before use; then `key_of` finds keys.

        file   read again every 5 s
        URL    fetched at start, every 5 minutes, and when a token names an unknown key, at most every 10 s

    A read that fails is logged, and the previous keys stay in force.
    """

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = f"--jwt-jwks {source}"
        self._is_url = _is_url(source)
        self._read: Callable[[], bytes] = partial(_fetch, source) if self._is_url else Path(source).read_bytes
        self._usual_s = URL_REFRESH_S if self._is_url else FILE_REFRESH_S
        self._min_interval_s = min(MIN_INTERVAL_S, self._usual_s)
        self._clock = clock
        self._tried_at = float("-inf")
        self._keys: Keys = {}
        self._data = b""
        self._last_error = ""
        self._refreshing: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.version = 0  # changes with the keys
        if not self._is_url:
            self._tried_at = clock()
            self._take(self._read_file())

    @property
    def is_loaded(self) -> bool:
        return bool(self._keys)

    async def start(self) -> None:
        """Fetch the keys, and keep them up to date until `close`. If a URL does not answer, it is tried again."""
        await self.refresh()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        await cancel(*(task for task in (self._keeper, self._refreshing) if task is not None))

    async def key_of(self, key_id: str | None) -> VerifyKey | None:
        """The key with this id; without an id, the only key. None if there is none, also after a refresh."""
        if (found := self._find(key_id)) is not None:
            return found
        await self.refresh()
        return self._find(key_id)

    async def refresh(self) -> None:
        """Read the keys again, unless that was tried a moment ago. Waits for a read in progress."""
        if self._refreshing is None and self._clock() - self._tried_at >= self._min_interval_s:
            self._tried_at = self._clock()
            self._refreshing = asyncio.create_task(self._refresh())
        if self._refreshing is not None:
            await asyncio.shield(self._refreshing)

    def _find(self, key_id: str | None) -> VerifyKey | None:
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._min_interval_s if self._last_error else self._usual_s)
            await self.refresh()

    async def _refresh(self) -> None:
        try:
            self._take(await asyncio.to_thread(self._read))
            self._last_error = ""
        except (OSError, HTTPException, ValueError) as error:
            self._complain(error)
        finally:
            self._refreshing = None

    def _complain(self, error: Exception) -> None:
        words = str(error) if isinstance(error, JwksError) else f"{self._where}: {getattr(error, 'reason', error)}"
        if words != self._last_error:
            log.error("%s keys of tokens: %s", "keeping the previous" if self._keys else "no", words)
        self._last_error = words

    def _take(self, data: bytes) -> None:
        if data == self._data:
            return
        self._keys = read_keys(data, self._where)
        self._data = data
        self.version += 1
        log.info("%s: %d keys of tokens", self._where, len(self._keys))

    def _read_file(self) -> bytes:
        try:
            return self._read()
        except OSError as error:
            raise JwksError(f"{self._where}: {error.strerror or error}") from None


def _is_url(source: str) -> bool:
    """Whether the source is a URL, else a file. Raises JwksError for a URL that others can read or change."""
    if "://" not in source:
        return False
    url = urllib.parse.urlsplit(source)
    if url.username is not None:
        raise JwksError("--jwt-jwks: the URL has a user name; give a URL without credentials")
    if not url.hostname or (url.scheme != "https" and not (url.scheme == "http" and is_loopback(f"{url.hostname}:0"))):
        raise JwksError(f"--jwt-jwks {source}: must be an https:// URL (http:// for this machine only) or a file")
    return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None  # the answer is then an HTTPError


def _fetch(url: str) -> bytes:
    opener = urllib.request.build_opener(_NoRedirects)
    with opener.open(url, timeout=FETCH_TIMEOUT_S) as reply:
        data: bytes = reply.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise JwksError(f"--jwt-jwks {url}: more than {MAX_BYTES} bytes")
    return data


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
