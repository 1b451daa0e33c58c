"""Helpers for asyncio tasks, and for a peer that may be silent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

REPEAT_S = 5.0  # longer than tasks need to clean up
SLICE_S = 0.005  # far below the least pause of a stream that its client notices


class Slices:
    """Divides a loop over many parts: `rest` after each part lets other tasks run if the slice is over."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + SLICE_S

    async def rest(self) -> None:
        if self._loop.time() >= self._ends_at:
            await asyncio.sleep(0)
            self._ends_at = self._loop.time() + SLICE_S


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended. Their results and exceptions are ignored.

    A cancellation can be lost: if it arrives when a timeout inside the task ends, e.g. one of a Redis client, the task
    sees the timeout only. So it is repeated.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=REPEAT_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio logs that it was never read


async def one_ahead(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same items, none of them None. The next one is made while the caller uses one."""

    async def make() -> T | None:
        return await anext(items, None)

    async with aclosing(items):
        coming = asyncio.create_task(make())
        try:
            while (item := await coming) is not None:
                coming = asyncio.create_task(make())
                yield item
        finally:
            await cancel(coming)


SILENT_INTERVALS = 30
LATE_FRACTION = 0.25  # fraction of the timeout; a shorter delay of a timer is caused by load, not by a stop


class SilenceWatch:
    """Decides when a silent peer counts as lost. Reads no clock: the caller passes `now`, in seconds.

    A stopped process, or one whose host is gone, is found by pings (channels.py): its streams end. A peer that answers
    pings and sends no heartbeats hangs or is busy, for example with a large request. It counts as lost only after
    SILENT_INTERVALS heartbeats, because the loss of a peer makes others compute again what it had.

    Silence counts only while this process runs: after a SIGSTOP, a suspended machine or a long pause, the peer's
    messages may have arrived but not been read. A timer that fires late shows such a gap, and silence then counts from
    that time.

    while not watch.is_silent(loop.time()):
        await asyncio.sleep(watch.pause_s(loop.time()))
        watch.on_wake(loop.time())
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = timeout_s
        self._last_message_at = now
        self._wakes_at = now

    @classmethod
    def of_heartbeats(cls, interval_s: float, now: float) -> SilenceWatch:
        """For a peer that sends a heartbeat every `interval_s`."""
        return cls(SILENT_INTERVALS * interval_s, now)

    @property
    def deadline(self) -> float:
        """The time at which the peer counts as lost if it sends nothing."""
        return self._last_message_at + self.timeout_s

    def on_message(self, now: float) -> None:
        """Record that the peer has sent something."""
        self._last_message_at = now

    def is_silent(self, now: float) -> bool:
        """Whether the peer has been silent for `timeout_s`."""
        return now >= self.deadline

    def pause_s(self, now: float, at_most_s: float = math.inf) -> float:
        """Seconds to sleep before the next check: until the deadline, but at most `at_most_s`."""
        pause_s = min(at_most_s, max(0.0, self.deadline - now))
        self._wakes_at = now + pause_s
        return pause_s

    def on_wake(self, now: float) -> bool:
        """Call it after each such sleep. True if this process was stopped during the sleep: silence then counts from
        `now`.
        """
        was_stopped = now - self._wakes_at > LATE_FRACTION * self.timeout_s
        if was_stopped:
            self._last_message_at = now
        return was_stopped


async def wait_for_peer(*futures: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether one of `futures` is done within `timeout_s`. Time in which this process was stopped does not count."""
    loop = asyncio.get_running_loop()
    watch = SilenceWatch(timeout_s, loop.time())
    while not watch.is_silent(loop.time()):
        pause_s = watch.pause_s(loop.time())
        if (await asyncio.wait(futures, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            return True
        watch.on_wake(loop.time())
    return False
