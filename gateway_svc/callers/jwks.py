"""The public keys of the issuer of JSON web tokens (JWKS), from a file or a URL.

    file   read again every 5 s
    URL    fetched at start, every 5 minutes, and when a token names an unknown key, at most every 10 s

A read that fails is logged, and the previous keys stay in force.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gateway_svc.callers.caller import CallersError
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
    """The keys of one source. `start` before use; then `key_of` finds keys."""

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
