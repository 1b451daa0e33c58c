"""Connects to Redis. redis-py is loaded for the first client, so processes without --redis start without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from svc_common.redis.server import RedisServer

if TYPE_CHECKING:
    import redis.asyncio


def connect(server: RedisServer | str, timeout_s: float) -> redis.asyncio.Redis:
    """A client that never retries by itself. A URL is a server without files. Raises ValueError for a malformed URL."""
    from svc_common.redis.client import make_client

    return make_client(RedisServer(server) if isinstance(server, str) else server, timeout_s)


def call_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors of a call that Redis has not answered, and `more`: `except call_errors():`."""
    from redis.exceptions import RedisError

    return RedisError, OSError, TimeoutError, *more
