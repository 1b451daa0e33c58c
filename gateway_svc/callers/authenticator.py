"""Finds the caller of each call from its Authorization header, over gRPC and HTTP; and the flags about callers."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway_svc.callers.caller import Caller, CallersError, current_caller, owner_name
from gateway_svc.callers.tokens import Expected, JsonWebTokens, Jwks, check_installed
from svc_common.calls import PROBES, Context
from svc_common.config import Flag, FlagGroup, in_range, one_of, path, text
from svc_common.errors import UnauthenticatedError
from svc_common.security.tls import Reread

log = logging.getLogger(__name__)


PREFIX = b"sha256:"
HASHED = re.compile(rb"sha256:[0-9a-fA-F]{64}")
INDEX_BYTES = 8
KEY_ID_CHARS = 12  # length of the digest's beginning in the audit log


class ApiKeysError(CallersError):
    """The folder cannot be read, a line is invalid, or there is no key at start."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Owners by digest, under the first bytes of the digest. The other bytes are compared in constant time."""

    owners: Mapping[bytes, tuple[bytes, str]]
    num_plaintext: int

    def owner_of(self, digest: bytes) -> str | None:
        stored, owner = self.owners.get(digest[:INDEX_BYTES], (b"", ""))
        return owner if hmac.compare_digest(stored, digest) else None


class ApiKeys:
    """The accepted keys, as digests. Each file of a folder is an owner, each of its lines a key, as `sha256:HEX` or in
    plaintext.

        chart (gateway.apiKeys)   a Secret mounted as the folder; each entry is an owner
        by hand                   quire key new team-a --dir keys

    Files may be added, changed and removed while the gateway runs, and are read again at most every 5 s. To replace a
    key, add a line first, and later remove the old one.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, flag: str = "--api-keys") -> None:
        self._keys = Reread(lambda: _read(folder, flag), "API keys", clock)
        keys = self._keys()
        if not keys.owners:
            raise ApiKeysError(f"{flag} {folder}: the folder holds no key; `quire key new OWNER --dir DIR` adds one")
        log.info("%s: %d API keys", flag, len(keys.owners))
        if keys.num_plaintext:
            words = "%s: %d of %d keys are stored in plaintext; `quire key hash` prints the line to store instead"
            log.warning(words, flag, keys.num_plaintext, len(keys.owners))

    def find(self, key: str) -> Caller | None:
        """The caller with this key; None if the key is not accepted. The time reveals nothing about a key."""
        digest = _digest(key.encode("utf-8", "surrogateescape"))
        owner = self._keys().owner_of(digest)
        return None if owner is None else Caller(owner, f"key:{digest.hex()[:KEY_ID_CHARS]}")


def _read(folder: Path, flag: str) -> _Keys:
    """The keys of a folder. Hidden files are skipped: a kubelet creates them beside mounted Secrets.

    Raises ApiKeysError, which never contains a key.
    """
    owners: dict[bytes, tuple[bytes, str]] = {}
    num_plaintext = 0
    try:
        files = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
        lines = [(path, number, line) for path in files for number, line in _lines_of(path)]
    except OSError as error:
        raise ApiKeysError(f"{flag} {folder}: {error.strerror or error}") from None
    for file, number, line in lines:
        is_hashed = line.startswith(PREFIX)
        if is_hashed and not HASHED.fullmatch(line):
            raise ApiKeysError(f"{flag} {file}, line {number}: not {PREFIX.decode()} and 64 hexadecimal digits")
        digest = bytes.fromhex(line.removeprefix(PREFIX).decode()) if is_hashed else _digest(line)
        owners[digest[:INDEX_BYTES]] = digest, owner_name(file.name)
        num_plaintext += not is_hashed
    return _Keys(owners, num_plaintext)


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and text of the lines that are not empty."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            yield number, line.strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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


MIN_PRIORITY = -1000  # lower limit of the request field
ISOLATIONS = ("none", "tenant")

CALLER_FLAGS = FlagGroup("identity of clients (docs/keys.md)", (
    Flag("--api-keys", path,
        "folder of accepted API keys: a file per owner, a key per line as sha256:HEX or in plaintext, read "
        "again when a file changes. Health checks need no key. The owner is the tenant of its requests, "
        "and only its keys abort or resume them. Unset, without --jwt-issuer: no key is needed, and any client "
        "that knows the id of a request can end it", metavar="DIR",
    ),
    Flag("--jwt-issuer", text,
        "accept JSON web tokens of this issuer (claim iss), beside API keys; needs --jwt-audience and "
        "--jwt-jwks", metavar="ISSUER",
    ),
    Flag("--jwt-audience", text,
        "a token needs this audience (claim aud); repeat the flag to accept several (in the environment "
        "variable, separate them by commas)", metavar="NAME", is_list=True,
    ),
    Flag("--jwt-jwks", text,
        "public keys of the issuer (JWKS): a file, read again when it changes, or an https:// URL, fetched "
        "every 5 minutes and when a token has an unknown key", metavar="FILE|URL",
    ),
    Flag("--jwt-tenant-claim", text,
        "claim with the owner of the requests; a token without it belongs to the owner sub:SUBJECT",
        default="tenant", metavar="CLAIM",
    ),
    Flag("--jwt-scope", text, "a token needs this scope. Unset: none", default="", metavar="SCOPE"),
    Flag("--jwt-leeway-s", in_range(float, 0.0, 600.0),
        "tolerated difference of clocks when the times of a token are checked", default=30.0,
    ),
    Flag("--isolation", one_of(*ISOLATIONS),
        "tenant: requests of different tenants share no cached prefixes, so that no tenant can detect the "
        "prompts of another; all gateways of a model need the same value. none: they share. Unset: tenant with "
        "--api-keys or --jwt-issuer, else none",
    ),
    Flag("--key-limits", path,
        "TOML file with limits per owner (docs/limits.md): rates of requests and tokens, open streams, models, "
        "priorities; read again when it changes. With --redis they apply to all gateways together, else to each "
        "gateway process",
    ),
    Flag("--min-priority", in_range(int, MIN_PRIORITY, -MIN_PRIORITY),
        "lowest priority that a request may have; a lower number runs first. Unset: 0 with --api-keys or "
        "--jwt-issuer, else -1000",
    ),
))  # fmt: skip


def identifies_callers(args: argparse.Namespace) -> bool:
    """Whether requests have owners."""
    return args.api_keys is not None or args.jwt_issuer is not None


def make_authenticator(args: argparse.Namespace, begin: Begin | None = None) -> Authenticator | None:
    """The check of credentials; None: all clients are served. Raises CallersError."""
    keys = None if args.api_keys is None else ApiKeys(args.api_keys)
    tokens = _make_tokens(args)
    return Authenticator(keys, tokens, begin) if identifies_callers(args) else None


def _make_tokens(args: argparse.Namespace) -> JsonWebTokens | None:
    given = {"--jwt-issuer": args.jwt_issuer, "--jwt-audience": args.jwt_audience, "--jwt-jwks": args.jwt_jwks}
    missing = [flag for flag, value in given.items() if not value]
    if len(missing) == len(given):
        return None
    if missing:
        raise CallersError(f"tokens of clients need {', '.join(given)}; set {' and '.join(missing)} too")
    check_installed()
    expected = Expected(args.jwt_issuer, args.jwt_audience, args.jwt_tenant_claim, args.jwt_scope, args.jwt_leeway_s)
    return JsonWebTokens(expected, Jwks(args.jwt_jwks))


def isolates_tenants(args: argparse.Namespace) -> bool:
    """Whether tenants share no cached prefixes. By default they share none, because clients do not trust each other.

    Raises CallersError.
    """
    if args.isolation == "tenant" and not identifies_callers(args):
        raise CallersError(
            "--isolation tenant needs --api-keys or --jwt-issuer: without them, clients choose their tenant themselves"
        )
    return identifies_callers(args) if args.isolation is None else bool(args.isolation == "tenant")


def min_priority(args: argparse.Namespace) -> int:
    """The lowest priority of a request. By default 0 if requests have owners, because these do not trust each other."""
    if args.min_priority is not None:
        return int(args.min_priority)
    return 0 if identifies_callers(args) else MIN_PRIORITY
