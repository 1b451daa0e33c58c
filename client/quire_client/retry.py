"""Decides whether a failed call is retried or a broken stream is resumed, and after which delay.

docs/resume-protocol.md has the rules for clients in other languages.

`StallWatch` detects gateways that hang: they send no event for the stall timeout and answer no health check. A frozen
process, or a host without network, does not break its connections. The watch examines streams that wait for an event.
It costs nothing per event; while no event arrives, it costs one health check per gateway and stall timeout. A client
that was frozen itself loses no stream: the gateway answers the health check.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from quire_client.connection.channel import TargetRing
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

log = logging.getLogger("quire")
log.addHandler(logging.NullHandler())


PROBE_TIMEOUT_S = 2.0
REDIAL_S = 60.0
ABORT_TIMEOUT_S = 5.0
RETRY_TAKEN_S = 0.05  # time for a gateway to detect that this client's earlier attempt has ended
RESUME_FIRST_DELAY_S = 0.05
RESUME_MAX_DELAY_S = 1.0
# ALREADY_EXISTS: the gateway has not detected yet that the old stream is broken. NOT_FOUND: the gateway has just
# started and has no model yet; the model exists, because the request was accepted before.
RESUMABLE = (ConnectionFailed, StreamEndedEarly, Overloaded, AlreadyExists, ModelNotFound)


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
        ceiling_s = min(RESUME_MAX_DELAY_S, RESUME_FIRST_DELAY_S * 2.0 ** min(self._num_failures - 1, 16))
        if self._num_failures == 1 and has_working:
            return self._rng.uniform(0.0, RESUME_FIRST_DELAY_S)
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


MAX_TICK_S = 0.5
LINGER_S = 5.0


class Watched(Protocol):
    """A watched stream. `waiting_since` is None while it does not wait for an event."""

    waiting_since: float | None
    target: int
    stall_timeout_s: float | None

    def lose(self) -> None:
        """End the wait because the gateway hangs."""


def suspects(streams: Iterable[Watched], ring: TargetRing, now: float) -> set[int]:
    """Gateways that have sent no event and answered no probe for longer than a stream's stall timeout."""
    found = set()
    for stream in streams:
        since, limit_s = stream.waiting_since, stream.stall_timeout_s
        if since is not None and limit_s is not None and now - max(since, ring.alive_at(stream.target)) > limit_s:
            found.add(stream.target)
    return found


def record_probes(
    streams: Collection[Watched], ring: TargetRing, probed: Iterable[int], alive: Collection[int], probed_at: float
) -> None:
    """Record which of the probed gateways are alive."""
    for target in probed:
        _record_probe(streams, ring, target, probed_at=probed_at, now=time.monotonic(), is_alive=target in alive)


def _record_probe(
    streams: Iterable[Watched], ring: TargetRing, target: int, *, probed_at: float, now: float, is_alive: bool
) -> None:
    """Record the result of a probe. If the gateway is dead, streams that waited for it during the probe are lost.

    Without another working gateway they keep waiting: a new call to the same gateway would only add load, and keepalive
    detects a dead connection.
    """
    if is_alive:
        ring.works(target, now)
        return
    ring.failed(target, now, is_frozen=True)
    if not ring.has_working(now):
        return
    for stream in streams:
        since = stream.waiting_since
        if stream.target == target and since is not None and since <= probed_at and stream.stall_timeout_s is not None:
            stream.lose()


def tick_s(streams: Collection[Watched]) -> float:
    """Time between two checks."""
    limits = [stream.stall_timeout_s for stream in streams if stream.stall_timeout_s is not None]
    return min([MAX_TICK_S, *(limit / 4 for limit in limits)])


class StallWatch:
    """The watch of a synchronous client: a thread that runs while there are streams.

    `probe` checks the health of several gateways at once and returns the gateways that answered.
    """

    def __init__(self, ring: TargetRing, probe: Callable[[Collection[int]], set[int]]) -> None:
        self._ring = ring
        self._probe = probe
        self._streams: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._is_running = False
        self._is_closed = False

    def add(self, stream: Watched) -> None:
        if stream.stall_timeout_s is None:
            return
        with self._changed:
            self._streams.add(stream)
            self._changed.notify()
            if not self._is_running and not self._is_closed:
                self._is_running = True
                threading.Thread(target=self._run, name="quire-stall-watch", daemon=True).start()

    def discard(self, stream: Watched) -> None:
        with self._changed:
            self._streams.discard(stream)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while self._wait_for_streams():
            streams = self._snapshot()
            probed_at = time.monotonic()
            suspected = suspects(streams, self._ring, probed_at) | set(self._ring.frozen())
            if suspected:
                record_probes(streams, self._ring, suspected, self._probe(suspected), probed_at)

    def _wait_for_streams(self) -> bool:
        """Sleep for a tick, or without streams until one is added. False ends the thread."""
        with self._changed:
            if self._streams:
                self._changed.wait_for(lambda: self._is_closed, tick_s(list(self._streams)))
            else:
                self._changed.wait_for(lambda: self._is_closed or len(self._streams) > 0, LINGER_S)
            self._is_running = len(self._streams) > 0 and not self._is_closed
            return self._is_running

    def _snapshot(self) -> list[Watched]:
        with self._changed:
            return list(self._streams)


class AsyncStallWatch:
    """The watch of an asyncio client: a task that runs while there are streams."""

    def __init__(self, ring: TargetRing, probe: Callable[[Collection[int]], Awaitable[set[int]]]) -> None:
        self._ring = ring
        self._probe = probe
        self._streams: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: Watched) -> None:
        if stream.stall_timeout_s is None:
            return
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def discard(self, stream: Watched) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._streams:
            await asyncio.sleep(tick_s(list(self._streams)))
            streams = list(self._streams)
            probed_at = time.monotonic()
            suspected = suspects(streams, self._ring, probed_at) | set(self._ring.frozen())
            if suspected:
                record_probes(streams, self._ring, suspected, await self._probe(suspected), probed_at)
