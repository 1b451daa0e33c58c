"""Clients of Redis. `redis_connect.connect` makes them."""

from __future__ import annotations

import logging
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError

from svc_common.redis.server import (
    CERT,
    KEY,
    PASSWORD,
    SENTINEL_PASSWORD,
    RedisFileError,
    RedisServer,
    SentinelUrl,
    is_sentinel_url,
    parse_sentinel_url,
    read_password,
    tls_context,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64  # of one client; each has one call in flight


def make_client(server: RedisServer, timeout_s: float) -> Redis:
    """A client that never retries by itself. Raises ValueError for a malformed URL."""
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }
    if is_sentinel_url(server.url):
        return _connect_by_sentinels(server, parse_sentinel_url(server.url), options)
    client = Redis.from_pool(BlockingConnectionPool.from_url(server.url, **_limits(timeout_s), **options))
    if server.uses_tls:
        client.connection_pool.connection_class = _TlsConnection
        client.connection_pool.connection_kwargs["files"] = _TlsFiles(server)
    if server.password is not None:
        settings = client.connection_pool.connection_kwargs
        settings["credential_provider"] = _PasswordFile(server.password, settings.pop("username", None))
    return client


def _connect_by_sentinels(server: RedisServer, url: SentinelUrl, options: dict[str, Any]) -> Redis:
    """Sentinels and Redis have the same CA and client certificate."""
    credentials: dict[str, Any] = {"username": url.username, "password": url.password}
    if server.password is not None:
        credentials = {"credential_provider": _PasswordFile(server.password, url.username)}
    sentinel_credentials = {}
    if server.sentinel_password is not None:
        provider = _PasswordFile(server.sentinel_password, None, SENTINEL_PASSWORD)
        sentinel_credentials = {"credential_provider": provider}
    return _sentinel_client(
        url,
        of_sentinels=_TlsConnection if url.uses_tls else Connection,
        of_redis=_TlsConnectionToMaster if url.uses_tls else SentinelManagedConnection,
        options=options | ({"files": _TlsFiles(server)} if url.uses_tls else {}),
        credentials_of_sentinels=sentinel_credentials,
        credentials_of_redis=credentials,
    )


def _sentinel_client(
    url: SentinelUrl,
    *,
    of_sentinels: type[Connection],
    of_redis: type[Connection],
    options: dict[str, Any],
    credentials_of_sentinels: dict[str, Any],
    credentials_of_redis: dict[str, Any],
) -> Redis:
    """A client of the present master. `of_sentinels` and `of_redis` are the classes of connections."""
    manager = Sentinel([])  # type: ignore[no-untyped-call]
    manager.sentinels = [
        Redis.from_pool(
            ConnectionPool(connection_class=of_sentinels, host=host, port=port, **options, **credentials_of_sentinels)
        )
        for host, port in url.hosts
    ]
    pool = _Pool(  # type: ignore[no-untyped-call]
        url.master,
        manager,
        connection_class=of_redis,
        db=url.db,
        **_limits(options["socket_timeout"]),
        **options,
        **credentials_of_redis,
    )
    return Redis.from_pool(pool)


def _limits(timeout_s: float) -> dict[str, float]:
    """Options of a pool whose calls wait for a connection; redis-py's default refuses those beyond its limit."""
    return {"max_connections": MAX_CONNECTIONS, "timeout": timeout_s}


class _Pool(SentinelConnectionPool, BlockingConnectionPool):
    """Closes the connections to the Sentinels with its own."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """redis-py calls this with `inuse_connections=False` at a failover, and with True when the client is closed."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


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
            self._last, self._last_error = tls_context(self._server), ""
        except RedisFileError as error:
            if self._last is None:
                raise
            if str(error) != self._last_error:
                log.error("keeping the previous certificates for Redis: %s", error)
            self._last_error = str(error)
        return self._last


class _PasswordFile(CredentialProvider):
    """Reads the password whenever redis-py opens a connection."""

    def __init__(self, path: Path, username: str | None, flag: str = PASSWORD) -> None:
        self._path = path
        self._username = username
        self._flag = flag

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = read_password(self._path, self._flag)
        return (password,) if self._username is None else (self._username, password)
