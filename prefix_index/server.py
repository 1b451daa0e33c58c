"""Shared by both clients of the prefix index: the connection to Redis, and whether it answers."""

from __future__ import annotations

import logging

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

log = logging.getLogger(__name__)


def connect(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """A client that never retries by itself. Raises ValueError for a malformed URL."""
    return redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


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
