"""The connection to Redis of a service: its flags, TLS, password, and whether it answers.

    add_flags(parser, "what the service stores there")
    server = redis_server(args)                  # None without --redis; raises RedisSettingsError
    client = connect(server, timeout_s=0.25)     # every client of Redis is made here

Certificates and the password are read again at each new connection, so a renewal needs no restart.
"""

from __future__ import annotations

import argparse
import logging
import ssl
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

from svc_common.config import without_password
from svc_common.redis_sentinel import FORM, SentinelUrl, is_sentinel_url, parse_sentinel_url, sentinel_client

log = logging.getLogger(__name__)

CA, CERT, KEY = "--redis-tls-ca-file", "--redis-tls-cert-file", "--redis-tls-key-file"
PASSWORD, SENTINEL_PASSWORD = "--redis-password-file", "--redis-sentinel-password-file"


class RedisSettingsError(ValueError):
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


def add_flags(parser: argparse.ArgumentParser, purpose: str) -> None:
    """The flags of Redis. `purpose` says in a help text what the service does with it."""
    group = parser.add_argument_group("Redis (docs/trust.md); files are read again at each new connection")
    group.add_argument(
        "--redis",
        metavar="URL",
        help="redis://[:password@]host:port/db, rediss:// for TLS, unix:///path, or with Sentinels "
        "redis+sentinel://host:port,host:port/MASTER/db, the same for gateways and "
        f"schedulers: {purpose}",
    )
    group.add_argument("--redis-namespace", default="quire", help="prefix of all Redis keys; use one per deployment")
    group.add_argument(
        CA, type=Path, metavar="FILE", help="CA certificates (PEM) of Redis, for rediss://. Unset: those of the system"
    )
    group.add_argument(CERT, type=Path, metavar="FILE", help="client certificate for Redis (PEM)")
    group.add_argument(KEY, type=Path, metavar="FILE", help="its private key (PEM, without a password)")
    group.add_argument(
        PASSWORD,
        type=Path,
        metavar="FILE",
        help="file with the password of Redis; a password in the URL of a flag is visible in the process list",
    )
    group.add_argument(
        SENTINEL_PASSWORD, type=Path, metavar="FILE", help="file with the password of the Sentinels. Unset: none"
    )


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
    for flag, path in ((CA, server.ca), (CERT, server.cert), (KEY, server.key)):
        if path and not server.uses_tls:
            raise RedisSettingsError(f"{flag} is set, but --redis {shown} is not TLS; write rediss://host:port/db")
        if path and "ssl_" in query:
            raise RedisSettingsError(f"{flag} is set, and --redis {shown} has ssl_ parameters too; remove them")
    if bool(server.cert) != bool(server.key):
        raise RedisSettingsError(f"{CERT} and {KEY} must be set together")
    if server.sentinel_password and not is_sentinel_url(server.url):
        raise RedisSettingsError(f"{SENTINEL_PASSWORD} is set, but --redis {shown} names no Sentinels; write {FORM}")
    if server.password and has_password:
        raise RedisSettingsError(f"{PASSWORD} is set, and --redis {shown} has a password too; remove one of them")
    try:
        _tls_context(server)
        for flag, path in ((PASSWORD, server.password), (SENTINEL_PASSWORD, server.sentinel_password)):
            _PasswordFile(path, None, flag).get_credentials() if path else None
    except RedisFileError as error:
        raise RedisSettingsError(str(error)) from None


def _has_password(url: str) -> bool:
    """Raises ValueError for a malformed URL."""
    if is_sentinel_url(url):
        return parse_sentinel_url(url).password is not None
    return "password" in redis.asyncio.connection.parse_url(url)


def bad_url(url: str) -> str:
    """The error for a malformed --redis. The URL parser's own message may quote part of the password."""
    return (
        f"--redis {without_password(url)!r} is not the URL of a Redis server; write redis://[:password@]host:port/db, "
        f"rediss:// for TLS, unix:///path, or {FORM}; in the password write %2F for /, %3F for ?, %40 for @"
    )


def connect(server: RedisServer | str, timeout_s: float) -> redis.asyncio.Redis:
    """A client that never retries by itself. A URL is a server without files. Raises ValueError for a malformed URL."""
    server = RedisServer(server) if isinstance(server, str) else server
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }
    if is_sentinel_url(server.url):
        return _connect_by_sentinels(server, parse_sentinel_url(server.url), options)
    client = redis.asyncio.Redis.from_url(server.url, **options)
    if server.uses_tls:
        client.connection_pool.connection_class = _TlsConnection
        client.connection_pool.connection_kwargs["files"] = _TlsFiles(server)
    if server.password is not None:
        settings = client.connection_pool.connection_kwargs
        settings["credential_provider"] = _PasswordFile(server.password, settings.pop("username", None))
    return client


def _connect_by_sentinels(server: RedisServer, url: SentinelUrl, options: dict[str, Any]) -> redis.asyncio.Redis:
    """Sentinels and Redis have the same CA and client certificate."""
    credentials: dict[str, Any] = {"username": url.username, "password": url.password}
    if server.password is not None:
        credentials = {"credential_provider": _PasswordFile(server.password, url.username)}
    sentinel_credentials = {}
    if server.sentinel_password is not None:
        provider = _PasswordFile(server.sentinel_password, None, SENTINEL_PASSWORD)
        sentinel_credentials = {"credential_provider": provider}
    return sentinel_client(
        url,
        of_sentinels=_TlsConnection if url.uses_tls else Connection,
        of_redis=_TlsConnectionToMaster if url.uses_tls else SentinelManagedConnection,
        options=options | ({"files": _TlsFiles(server)} if url.uses_tls else {}),
        credentials_of_sentinels=sentinel_credentials,
        credentials_of_redis=credentials,
    )


class _TlsConnection(SSLConnection):
    """A connection with the certificates that the files have when it is opened; redis-py reads them only once."""

    def __init__(self, *, files: _TlsFiles, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._files = files
        self._has_shaken_hands = False

    async def connect(self) -> None:
        """Adds the likely cause to the error of a server that ends the connection after the handshake."""
        self._has_shaken_hands = False
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except RedisConnectionError as error:
            if not self._has_shaken_hands or type(error) is not RedisConnectionError:
                raise
            raise RedisConnectionError(f"{error} {self._files.hint}") from None

    async def _connect(self) -> None:
        self.ssl_context.context = self._files.context()
        await super()._connect()  # type: ignore[no-untyped-call]
        self._has_shaken_hands = True


class _TlsConnectionToMaster(SentinelManagedConnection, _TlsConnection):
    """A TLS connection whose address comes from a Sentinel."""


class _TlsFiles:
    """TLS settings from the files of one client. While new files are invalid, the previous settings stay in use."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._last: ssl.SSLContext | None = None
        self._last_error = ""

    @property
    def hint(self) -> str:
        """The likely cause if the server ends the connection right after the handshake."""
        if self._server.cert is None:
            return f"Redis may require a client certificate: set {CERT} and {KEY}"
        return f"Redis may not accept the certificate of {CERT} {self._server.cert}: check its expiry date and its CA"

    def context(self) -> ssl.SSLContext | None:
        """None: redis-py applies the ssl_ parameters of the URL. Raises RedisFileError if no files were ever valid."""
        if "ssl_" in urllib.parse.urlsplit(self._server.url).query:
            return None
        try:
            self._last, self._last_error = _tls_context(self._server), ""
        except RedisFileError as error:
            if self._last is None:
                raise
            if str(error) != self._last_error:
                log.error("keeping the previous certificates for Redis: %s", error)
            self._last_error = str(error)
        return self._last


def _tls_context(server: RedisServer) -> ssl.SSLContext:
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


class _PasswordFile(CredentialProvider):
    """Reads the password whenever redis-py opens a connection."""

    def __init__(self, path: Path, username: str | None, flag: str = PASSWORD) -> None:
        self._path = path
        self._username = username
        self._flag = flag

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RedisFileError(f"{self._flag} {self._path}: {getattr(error, 'strerror', None) or error}") from None
        if not password:
            raise RedisFileError(f"{self._flag} {self._path} is empty; write the password into it")
        return (password,) if self._username is None else (self._username, password)


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
            log.warning("redis does not answer (%s); %s", str(error) or type(error).__name__, self._loss)
        self.is_up, self._has_warned = False, True

    def came_up(self) -> None:
        """Record a successful call."""
        if not self.is_up:
            log.info("redis answers; %s", self._effect)
        self.is_up = True
