"""A Redis whose address Sentinels know: `redis+sentinel://host:26379,host:26379/MASTER/DB`.

The client asks the Sentinels for the master whenever it opens a connection, so a failover needs no restart.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import Connection
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

SCHEMES = {"redis+sentinel": False, "rediss+sentinel": True}
FORM = "redis+sentinel://[[user]:password@]host:port,host:port/MASTER/DB (rediss+sentinel:// for TLS)"
DEFAULT_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of such a URL. User and password are those of Redis, not of the Sentinels."""

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


def sentinel_client(
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
        url.master, manager, connection_class=of_redis, db=url.db, **options, **credentials_of_redis
    )
    return Redis.from_pool(pool)


class _Pool(SentinelConnectionPool):
    """Closes the connections to the Sentinels with its own."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """redis-py calls this with `inuse_connections=False` at a failover, and with True when the client is closed."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()
