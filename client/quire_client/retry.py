"""Decides whether a failed call is retried, and after which delay."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from quire_client.errors import AlreadyExists, ConnectionFailed, Overloaded, QuireError

PROBE_TIMEOUT_S = 2.0
REDIAL_S = 60.0
ABORT_TIMEOUT_S = 5.0
RETRY_TAKEN_S = 0.05  # time for a gateway to detect that this client's earlier attempt has ended


class Deadline:
    """The deadline of one call, for all attempts together. `timeout_s` None: no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def probe_timeout_s(deadline: Deadline) -> float:
    """Timeout of one round of health checks: a gateway that hangs must not delay the next round."""
    remaining_s = deadline.remaining_s()
    return PROBE_TIMEOUT_S if remaining_s is None else min(PROBE_TIMEOUT_S, remaining_s)


def abort_timeout_s(timeout_s: float | None) -> float:
    """Timeout of Abort on one of several gateways."""
    return ABORT_TIMEOUT_S if timeout_s is None else min(ABORT_TIMEOUT_S, timeout_s)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    A call is retried only before its first result: on UNAVAILABLE, and on RESOURCE_EXHAUSTED if the server sent a retry
    delay. `max_attempts` includes the first attempt; 1 disables retries. One attempt tries every gateway that has not
    failed recently. This policy does not apply to a stream that breaks after its first event.
    """

    max_attempts: int = 10  # takes five or six seconds, enough for a scheduler failover
    initial_s: float = 0.1
    max_s: float = 2.0
    multiplier: float = 2.0

    def delay_s(self, error: QuireError, attempt: int, remaining_s: float | None, rng: random.Random) -> float | None:
        """Seconds to wait before attempt `attempt + 1`; None: give up.

        `attempt` is the number of the failed attempt, from 1; `remaining_s` is the time left until the deadline.
        """
        if attempt >= self.max_attempts or not _is_retryable(error):
            return None
        ceiling_s = min(self.max_s, self.initial_s * self.multiplier ** (attempt - 1))
        delay_s = (error.retry_after_s or 0.0) + rng.uniform(0.0, ceiling_s)
        if remaining_s is not None and delay_s >= remaining_s:
            return None
        return delay_s


def _is_retryable(error: QuireError) -> bool:
    if isinstance(error, Overloaded | AlreadyExists):
        return error.retry_after_s is not None
    return isinstance(error, ConnectionFailed)


# The gateway may still be starting: retry until connect_timeout_s has passed.
CONNECT_RETRY = RetryPolicy(max_attempts=1_000_000, max_s=0.5)
