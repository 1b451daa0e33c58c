"""When collected bytes leave a process: one rule for every hop (docs/adr/0014-when-bytes-leave-a-process.md).

    Bytes leave at once on an idle system. They wait while their receiver could not use them earlier: for the end of an
    interval since the last message, or for the next message, at most a given time. A first token, an end, an error or a
    refusal never waits, and takes along what does.

A message costs each process 25 to 50 us, however few bytes it has. So what waits for the same flush is one message.

    timer = FlushTimer(self._send_all, interval_s=0.02)
    self._waiting.append(item)      # the hop keeps what waits, and bounds its size
    timer.soon()
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

EARLY_S = 0.001  # uvloop runs a timer up to half a millisecond early


class FlushTimer:
    """Decides when one hop calls `flush`, which sends all that waits.

    `interval_s`: least time from a flush of `soon`, or from `begin`, to the next flush of `soon`.
    `holds`: a flush lasts until `free`, and the next one waits for it.
    `joins_turn`: a flush that could begin now waits for the end of this turn of the event loop.
    """

    def __init__(
        self, flush: Callable[[], None], interval_s: float = 0.0, *, holds: bool = False, joins_turn: bool = False
    ) -> None:
        self._flush = flush
        self._interval_s = interval_s
        self._holds = holds
        self._joins_turn = joins_turn
        self._free_at = 0.0  # end of the interval, in loop time; inf while a flush lasts
        self._is_due = False  # something waits for the end of the interval
        self._timer: asyncio.Handle | None = None  # for `_timer_at`; uvloop's handles may have no time
        self._timer_at = 0.0

    def now(self) -> None:
        """Flush at once. No interval begins, so one that runs stays aligned with that of the receiver."""
        self.stop()
        self._flush()

    def soon(self) -> None:
        """Flush now or, if an interval runs, at its end."""
        if not self._is_due:
            self._is_due = True
            if self._free_at != math.inf:
                self.by(self._free_at)

    def by(self, at: float) -> None:
        """Flush at this time, in loop time, unless an earlier flush takes along what waits."""
        if at == math.inf or (self._timer is not None and at >= self._timer_at):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        if at <= loop.time() and not self._joins_turn:
            self._on_time()
        else:
            self._timer, self._timer_at = loop.call_at(at, self._on_time), at

    def begin(self) -> None:
        """Begin an interval if none runs, because bytes left outside of the flushes."""
        if self._interval_s:
            now = asyncio.get_running_loop().time()
            if now > self._free_at - EARLY_S:
                self._free_at = now + self._interval_s

    def free(self, at: float) -> None:
        """The flush has ended. The next one may begin at this time."""
        self._free_at = at
        if self._is_due:
            self.by(at)

    def stop(self) -> None:
        """Nothing waits any more."""
        self._is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        if self._is_due:
            self._is_due = False
            if self._interval_s:
                self.begin()
        if self._holds:
            self._free_at = math.inf
        self._flush()
