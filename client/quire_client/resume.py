"""Decides whether a broken stream is resumed, and after which delay. No I/O; time and randomness are arguments.

docs/resume-protocol.md has the rules for clients in other languages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from quire_client.errors import (
    AlreadyExists,
    ConnectionFailed,
    ModelNotFound,
    Overloaded,
    QuireError,
    RequestNotFound,
    StreamEndedEarly,
    invalid,
)

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 1.0
# ALREADY_EXISTS: the gateway has not detected yet that the old stream is broken. NOT_FOUND: the gateway has just
# started and has no model yet; the model exists, because the request was accepted before.
RESUMABLE = (ConnectionFailed, StreamEndedEarly, Overloaded, AlreadyExists, ModelNotFound)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Settings for resuming one stream.

    `timeout_s` limits the attempts after a break. After `stall_timeout_s` without an event, the client sends a health
    check to the gateway; None disables the check.
    """

    is_on: bool = True
    timeout_s: float = 60.0
    stall_timeout_s: float | None = 3.0


class Resumption:
    """Delays of one stream, and the time spent on resuming it."""

    def __init__(self, policy: ResumePolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._num_failures = 0
        self._spent_s = 0.0
        self._broke_at: float | None = None

    def broke(self, now: float, *, made_progress: bool) -> None:
        """The stream broke. Without progress since the last break, backoff and time spent keep growing."""
        if made_progress:
            self._num_failures = 0
            self._spent_s = 0.0
        self._broke_at = now

    def accepted(self, now: float) -> None:
        """A gateway accepted the continuation."""
        if self._broke_at is not None:
            self._spent_s += now - self._broke_at
            self._broke_at = None

    def delay_s(self, error: QuireError, now: float, remaining_s: float | None, *, has_working: bool) -> float | None:
        """Seconds until the next attempt; None: give up. `has_working`: some gateway has not failed recently."""
        if not self._policy.is_on or not isinstance(error, RESUMABLE) or isinstance(error, RequestNotFound):
            return None
        delay_s = self._backoff_s(has_working) + (error.retry_after_s or 0.0 if isinstance(error, Overloaded) else 0.0)
        spent_s = self._spent_s + (now - self._broke_at if self._broke_at is not None else 0.0)
        if spent_s + delay_s >= self._policy.timeout_s or (remaining_s is not None and delay_s >= remaining_s):
            return None
        return delay_s

    def _backoff_s(self, has_working: bool) -> float:
        self._num_failures += 1
        ceiling_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._num_failures - 1, 16))
        if self._num_failures == 1 and has_working:
            return self._rng.uniform(0.0, FIRST_DELAY_S)
        return self._rng.uniform(ceiling_s / 2, ceiling_s)


def gave_up(error: QuireError, policy: ResumePolicy) -> QuireError:
    """The error that ends a stream. The message says that the client tried to resume."""
    if policy.is_on and isinstance(error, RESUMABLE):
        error.message = (
            f"{error.message}; the stream could not be resumed within {policy.timeout_s:g} s or its deadline"
        )
        error.args = (error.message,)
    return error


def policy_of_call(default: ResumePolicy, options: dict[str, Any]) -> ResumePolicy:
    """The client's policy, changed by the three resume options of one call. Removes them from `options`."""
    policy = ResumePolicy(
        options.pop("resume", default.is_on),
        options.pop("resume_timeout_s", default.timeout_s),
        options.pop("stall_timeout_s", default.stall_timeout_s),
    )
    if policy.stall_timeout_s is not None and policy.stall_timeout_s <= 0:
        raise invalid(
            "stall_timeout_s",
            f"stall_timeout_s is {policy.stall_timeout_s}; must be above 0; None disables the health check",
        )
    if policy.timeout_s < 0:
        raise invalid(
            "resume_timeout_s",
            f"resume_timeout_s is {policy.timeout_s}; must be at least 0; resume=False disables resuming",
        )
    return policy
