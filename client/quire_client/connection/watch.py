"""Detects gateways that hang: they send no event for the stall timeout and answer no health check.

A frozen process, or a host without network, does not break its connections. The watch examines streams that wait for an
event. It costs nothing per event; while no event arrives, it costs one health check per gateway and stall timeout. A
client that was frozen itself loses no stream: the gateway answers the health check.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol

from quire_client.connection.channel import TargetRing

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
