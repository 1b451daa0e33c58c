"""Connects to Redis. redis-py is loaded for the first client, so processes without --redis start without it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from svc_common.redis.server import Availability, RedisServer, problem_of

if TYPE_CHECKING:
    import redis.asyncio


log = logging.getLogger(__name__)


def connect(server: RedisServer | str, timeout_s: float) -> redis.asyncio.Redis:
    """A client that never retries by itself. A URL is a server without files. Raises ValueError for a malformed URL."""
    from svc_common.redis.client import make_client

    return make_client(RedisServer(server) if isinstance(server, str) else server, timeout_s)


T = TypeVar("T")


def call_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors of a call that Redis has not answered, and `more`: `except call_errors():`."""
    from redis.exceptions import RedisError

    return RedisError, OSError, TimeoutError, *more


async def answer_of(
    call: Awaitable[T],
    server: Availability,
    what: str,
    error_type: Callable[..., Exception],
    *,
    timeout_s: float,
    retry_after_s: float,
) -> T:
    """The answer to a call. Raises `error_type` if there is none; `what`: the things that Redis keeps."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await call
    except call_errors() as error:
        server.went_down(error)
        words = f"Redis, which keeps {what}, {problem_of(error)[0]}; retry later"
        raise error_type(words, retry_after_s=retry_after_s) from None
    server.came_up()
    return answer


async def warn_of_eviction(client: redis.asyncio.Redis) -> None:
    """Log a warning if the server may evict keys without a time to live: pins, epochs, versions of weights."""
    from redis.exceptions import ResponseError

    try:
        memory = await client.info("memory")
    except ResponseError:  # INFO is not allowed
        return
    policy = memory.get("maxmemory_policy", "")
    if memory.get("maxmemory") and policy.startswith("allkeys"):
        log.warning(
            "redis evicts any key when its memory is full (maxmemory-policy %s): pinned sessions, epochs and versions "
            "of weights can be lost; set maxmemory-policy volatile-lru",
            policy,
        )
