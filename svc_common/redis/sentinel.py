"""A Redis whose address Sentinels know: `redis+sentinel://host:26379,host:26379/MASTER/DB`.

The client asks the Sentinels for the master whenever it opens a connection, so a failover needs no restart.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass

SCHEMES = {"redis+sentinel": False, "rediss+sentinel": True}
FORM = "redis+sentinel://[[user]:password@]host:port,host:port/MASTER/DB (rediss+sentinel:// for TLS)"
DEFAULT_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of such a URL. User and password are for Redis, not for the Sentinels."""

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
