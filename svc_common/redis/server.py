"""The connection to Redis of a service: its flags, TLS, password, and whether it answers.

    add_flags(parser, "what the service stores there")
    server = redis_server(args)                  # None without --redis; raises RedisSettingsError
    client = redis_connect.connect(server, timeout_s=0.25)  # every client of Redis is made there

Certificates and the password are read again at each new connection, so a renewal needs no restart.
"""

from __future__ import annotations

import argparse
import logging
import re
import ssl
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from svc_common.config import Flag, FlagGroup, SettingError, path, text, without_password

SCHEMES = {"redis+sentinel": False, "rediss+sentinel": True}
FORM = "redis+sentinel://[[user]:password@]host:port,host:port/MASTER/DB (rediss+sentinel:// for TLS)"
DEFAULT_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of `redis+sentinel://host:26379,host:26379/MASTER/DB`. User and password are for Redis, not for the
    Sentinels. The client asks them for the master whenever it opens a connection, so a failover needs no restart.
    """

    hosts: tuple[tuple[str, int], ...]
    master: str
    db: int = 0
    username: str | None = None
    password: str | None = None
    uses_tls: bool = False


def is_sentinel_url(url: str) -> bool:
    """Whether Sentinels know the address of this Redis."""
    return url.partition("://")[0] in SCHEMES


def parse_sentinel_url(url: str) -> SentinelUrl:
    """The parts of the URL. Raises ValueError."""
    parts = urllib.parse.urlsplit(url)
    credentials, _, places = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    master, _, db = parts.path.strip("/").partition("/")
    hosts = tuple(_host_and_port(place) for place in places.split(","))
    if not master or parts.query or parts.fragment:
        raise ValueError(f"write {FORM}")
    return SentinelUrl(
        hosts,
        urllib.parse.unquote(master),
        int(db or 0),
        urllib.parse.unquote(username) or None,
        urllib.parse.unquote(password) or None,
        SCHEMES[parts.scheme],
    )


def _host_and_port(place: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(f"//{place}")
    if not parts.hostname:
        raise ValueError(f"write {FORM}")
    return parts.hostname, parts.port or DEFAULT_PORT


log = logging.getLogger(__name__)

CA, CERT, KEY = "--redis-tls-ca-file", "--redis-tls-cert-file", "--redis-tls-key-file"
PASSWORD, SENTINEL_PASSWORD = "--redis-password-file", "--redis-sentinel-password-file"


class RedisSettingsError(SettingError):
    """--redis or one of its files cannot be used; the message names the flag and says what to do."""


class RedisFileError(OSError):
    """A file of the Redis settings cannot be used now; the message names the flag."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """Address and credentials of Redis."""

    url: str
    ca: Path | None = None  # None: the CAs of this machine
    cert: Path | None = None
    key: Path | None = None
    password: Path | None = None
    sentinel_password: Path | None = None

    @property
    def uses_tls(self) -> bool:
        return self.url.startswith("rediss")


def redis_flags(purpose: str) -> FlagGroup:
    """The flags of Redis. `purpose` says in a help text what the service does with it."""
    return FlagGroup(
        "Redis (docs/trust.md); files are read again at each new connection", (
        Flag("--redis", text,
            "redis://[:password@]host:port/db, rediss:// for TLS, unix:///path, or with Sentinels "
            "redis+sentinel://host:port,host:port/MASTER/db, the same for gateways and "
            f"schedulers: {purpose}", metavar="URL",
        ),
        Flag("--redis-namespace", text, "prefix of all Redis keys; use one per deployment", default="quire"),
        Flag(CA, path, "CA certificates (PEM) of Redis, for rediss://. Unset: the system's"),
        Flag(CERT, path, "client certificate for Redis (PEM)"),
        Flag(KEY, path, "its private key (PEM, without a password)"),
        Flag(PASSWORD, path,
            "file with the password of Redis; a password in the URL of a flag is visible in the process list",
        ),
        Flag(SENTINEL_PASSWORD, path, "file with the password of the Sentinels. Unset: none"),
    ),
    )  # fmt: skip


def redis_server(args: argparse.Namespace) -> RedisServer | None:
    """The server of the flags; None without --redis. Raises RedisSettingsError."""
    server = RedisServer(
        args.redis or "", args.redis_tls_ca_file, args.redis_tls_cert_file, args.redis_tls_key_file,
        args.redis_password_file, args.redis_sentinel_password_file,
    )  # fmt: skip
    given = {
        CA: server.ca, CERT: server.cert, KEY: server.key, PASSWORD: server.password,
        SENTINEL_PASSWORD: server.sentinel_password,
    }  # fmt: skip
    if not server.url:
        for flag in (flag for flag, path in given.items() if path):
            raise RedisSettingsError(f"{flag} needs --redis URL")
        return None
    _check(server)
    return server


def _check(server: RedisServer) -> None:
    """Raise RedisSettingsError if the settings do not fit together or a file cannot be read."""
    try:
        has_password = _has_password(server.url)
        query = urllib.parse.urlsplit(server.url).query
    except ValueError:
        raise RedisSettingsError(bad_url(server.url)) from None
    shown = without_password(server.url)
    for flag, file in ((CA, server.ca), (CERT, server.cert), (KEY, server.key)):
        if file and not server.uses_tls:
            raise RedisSettingsError(f"{flag} is set, but --redis {shown} is not TLS; write rediss://host:port/db")
        if file and "ssl_" in query:
            raise RedisSettingsError(f"{flag} is set, and --redis {shown} has ssl_ parameters too; remove them")
    if bool(server.cert) != bool(server.key):
        raise RedisSettingsError(f"{CERT} and {KEY} must be set together")
    if server.sentinel_password and not is_sentinel_url(server.url):
        raise RedisSettingsError(f"{SENTINEL_PASSWORD} is set, but --redis {shown} names no Sentinels; write {FORM}")
    if server.password and has_password:
        raise RedisSettingsError(f"{PASSWORD} is set, and --redis {shown} has a password too; remove one of them")
    try:
        tls_context(server)
        for flag, path in ((PASSWORD, server.password), (SENTINEL_PASSWORD, server.sentinel_password)):
            read_password(path, flag) if path else None
    except RedisFileError as error:
        raise RedisSettingsError(str(error)) from None


def _has_password(url: str) -> bool:
    """Raises ValueError for a malformed URL."""
    if is_sentinel_url(url):
        return parse_sentinel_url(url).password is not None
    from redis.asyncio.connection import parse_url

    return "password" in parse_url(url)


def bad_url(url: str) -> str:
    """The error for a malformed --redis. The URL parser's own message may quote part of the password."""
    return (
        f"--redis {without_password(url)!r} is not the URL of a Redis server; write redis://[:password@]host:port/db, "
        f"rediss:// for TLS, unix:///path, or {FORM}; in the password write %2F for /, %3F for ?, %40 for @"
    )


def tls_context(server: RedisServer) -> ssl.SSLContext:
    """Trusts only the CAs of the file, if there is one. Raises RedisFileError."""
    try:
        context = ssl.create_default_context(cafile=server.ca)
    except OSError as error:
        raise RedisFileError(f"{CA} {server.ca}: {error.strerror or error}") from None
    if server.cert is None or server.key is None:
        return context
    try:
        context.load_cert_chain(server.cert, server.key, password=_no_password)
    except (OSError, _EncryptedKeyError) as error:
        words = getattr(error, "strerror", None) or error
        raise RedisFileError(f"{CERT} {server.cert}, {KEY} {server.key}: {words}") from None
    return context


class _EncryptedKeyError(Exception):
    """The private key is encrypted."""


def _no_password() -> str:
    raise _EncryptedKeyError("the private key is encrypted; use a key without a password")


def read_password(path: Path, flag: str) -> str:
    """The password in a file. Raises RedisFileError."""
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RedisFileError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from None
    if not password:
        raise RedisFileError(f"{flag} {path} is empty; write the password into it")
    return password


def problem_of(error: BaseException) -> tuple[str, str]:
    """The failure of a call and its cause, without the text of a refusal: it quotes the command, and so requests."""
    from redis.exceptions import ResponseError

    name = type(error).__name__
    if not isinstance(error, ResponseError):
        return "does not answer", str(error) or name
    code = re.match(r"[A-Z]{3,}\b", str(error).rpartition("caused error: ")[2])
    return "refuses a call", f"{name}, {code[0]}" if code else name


class Availability:
    """Tracks whether the server answers. Logs each change once: `effect` if it answers, `loss` if it does not."""

    def __init__(self, effect: str, loss: str = "serving continues without it") -> None:
        self.is_up = False
        self.num_errors = 0  # calls that the server did not answer
        self._effect = effect
        self._loss = loss
        self._has_warned = False

    def went_down(self, error: BaseException) -> None:
        """Record a failed call."""
        self.num_errors += 1
        if self.is_up or not self._has_warned:
            log.warning("redis %s (%s); %s", *problem_of(error), self._loss)
        self.is_up, self._has_warned = False, True

    def came_up(self) -> None:
        """Record a successful call."""
        if not self.is_up:
            log.info("redis answers; %s", self._effect)
        self.is_up = True
