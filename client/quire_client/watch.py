"""Notices gateways that hang: no event for a while, and no answer to a health check either.

A process that is frozen, or a host whose network is gone, breaks no connection. The watch looks at the streams that
wait; it costs nothing per event, and one health check per gateway and stall timeout while nothing comes.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol

from quire_client.targets import TargetRing

MAX_TICK_S = 0.5
LINGER_S = 5.0


class Watched(Protocol):
    """A stream, as the watch sees it. `waiting_since` is None while it waits for nothing."""

    waiting_since: float | None
    target: int
    stall_timeout_s: float | None

    def lose(self) -> None:
        """End the wait: its gateway hangs."""


def suspects(streams: Iterable[Watched], ring: TargetRing, now: float) -> set[int]:
    """Gateways that owe some stream an event for longer than it puts up with, and have not answered a probe since."""
    found = set()
    for stream in streams:
        since, limit_s = stream.waiting_since, stream.stall_timeout_s
        if since is not None and limit_s is not None and now - max(since, ring.alive_at(stream.target)) > limit_s:
            found.add(stream.target)
    return found


def judge(streams: Iterable[Watched], ring: TargetRing, target: int, asked_at: float, now: float, lives: bool) -> None:
    """Note what a probe found; streams that already waited when a dead gateway was asked are lost.

    Without another gateway to go to they wait on: asking the same one again would only add to its load, and whether
    its connection is alive the keepalive finds out.
    """
    if lives:
        ring.works(target, now)
        return
    ring.failed(target, now, is_frozen=True)
    if not ring.has_working(now):
        return
    for stream in streams:
        since = stream.waiting_since
        if stream.target == target and since is not None and since <= asked_at and stream.stall_timeout_s is not None:
            stream.lose()


def tick_s(streams: Collection[Watched]) -> float:
    """How long to look away."""
    limits = [stream.stall_timeout_s for stream in streams if stream.stall_timeout_s is not None]
    return min([MAX_TICK_S, *(limit / 4 for limit in limits)])


class StallWatch:
    """The watch of a synchronous client: a thread that lives while there are streams.

    `probe` asks several gateways at once and returns those that answered.
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
        while self._goes_on():
            streams = self._snapshot()
            asked_at = time.monotonic()
            questionable = suspects(streams, self._ring, asked_at) | set(self._ring.frozen())
            if not questionable:
                continue
            alive = self._probe(questionable)
            for target in questionable:
                judge(streams, self._ring, target, asked_at, time.monotonic(), target in alive)

    def _goes_on(self) -> bool:
        """Sleep for a tick, or until there are streams again; False ends the thread."""
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
    """The watch of an asyncio client: a task that lives while there are streams."""

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
            asked_at = time.monotonic()
            questionable = suspects(streams, self._ring, asked_at) | set(self._ring.frozen())
            if not questionable:
                continue
            alive = await self._probe(questionable)
            for target in questionable:
                judge(streams, self._ring, target, asked_at, time.monotonic(), target in alive)
