"""Which services are installed, the command that installs them, and whether the Redis of a URL answers."""

from __future__ import annotations

import importlib.util
import os
import urllib.parse

TIMEOUT_S = 2.0


class RedisUrlError(ValueError):
    """The URL is not that of a Redis server. The message has no password."""


def ping(url: str) -> tuple[str, str]:
    """The URL without credentials and the policy of eviction (empty: unknown), if the Redis or one of its Sentinels
    answers; a refused password is an answer too.

    Raises OSError with the reason, RedisUrlError, ImportError.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    parts = urllib.parse.urlsplit(url)
    name = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
    ca, cert, key = (os.environ.get(f"QUIRE_REDIS_TLS_{kind}_FILE") for kind in ("CA", "CERT", "KEY"))
    options = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
    if parts.scheme.startswith("rediss"):
        options |= {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
    problem = ""
    for server in _servers(url):
        try:
            with redis.Redis.from_url(server, **options) as client:
                client.ping()
                return name, client.info("memory").get("maxmemory_policy", "")
        except (redis.AuthenticationError, redis.ResponseError):
            return name, ""
        except (redis.RedisError, OSError) as error:
            problem = str(error)
        except ValueError:
            raise RedisUrlError(f"{name} is not a Redis URL; write redis://[:password@]host:port/db") from None
    raise OSError(f"{name} does not answer ({problem})")


def _servers(url: str) -> list[str]:
    """The URLs of one Redis, or of its Sentinels."""
    scheme, is_sentinel, rest = url.partition("+sentinel://")
    if not is_sentinel:
        return [url]
    places = rest.partition("/")[0].rpartition("@")[2].split(",")
    return [f"{scheme}://{place if ':' in place else f'{place}:26379'}" for place in places]


SERVICES = {"gateway": "gateway_svc", "scheduler": "scheduler_svc", "worker": "worker_svc"}


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def install_command(extra: str) -> str:
    """The command that installs a service with its requirements; `all`: every service."""
    return f"`pip install 'quire-server[{extra}]'`, or `pip install '.[{extra}]'` in a checkout of Quire"
