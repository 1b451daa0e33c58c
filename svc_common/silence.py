"""Decides when a silent peer counts as lost.

A stopped process, or one whose host is gone, is found by pings (svc_common/channels.py): its streams end. A peer
that answers pings and sends no heartbeats hangs or is busy, for example with a large request. It counts as lost only
after SILENT_INTERVALS heartbeats, because the loss of a peer makes others compute again what it had.

Silence counts only while this process runs: after a SIGSTOP, a suspended machine or a long pause, the peer's messages
may have arrived but not been read. A timer that fires late shows such a gap, and silence then counts from that time.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

SILENT_INTERVALS = 30
LATE_FRACTION = 0.25  # fraction of the timeout; a shorter delay of a timer is caused by load, not by a stop


class SilenceWatch:
    """Checks whether a peer has been silent for `timeout_s`. Reads no clock: the caller passes `now`, in seconds.

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
