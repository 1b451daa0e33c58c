"""When handlers are woken for new tokens: at once while the gateway keeps up, in rounds when it is busy.

A chunk costs the same for any number of tokens. So all streams with news are woken together in one round, and the next
round waits until the loop has finished this one and had a quarter of its time for other work: reading from schedulers,
accepting requests. Meanwhile tokens collect in the journals and are sent as larger chunks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

DRAIN_TURNS = 3  # of the loop: handlers run and write, writes complete, handlers sleep again
REST_FRACTION = 0.25  # of the time that a round took
MAX_REST_S = 0.05  # a round during which the process was frozen seems long


class Sleeper(Protocol):
    """A handler that may have news."""

    def wake(self) -> None:
        """Look at the news now."""


class WakePacer:
    """Wakes sleepers in rounds; several calls for one sleeper before a round wake it once. `interval_s`: least time
    between the starts of two rounds.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._waiting: dict[Sleeper, None] = {}
        self._is_busy = False  # a round is scheduled or in progress

    def wake(self, sleeper: Sleeper) -> None:
        """Wake the sleeper in the next round."""
        self._waiting[sleeper] = None
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._run_round)

    def _run_round(self) -> None:
        loop = asyncio.get_running_loop()
        sleepers, self._waiting = self._waiting, {}
        for sleeper in sleepers:
            sleeper.wake()
        loop.call_soon(self._drain, loop.time(), DRAIN_TURNS)

    def _drain(self, started_at: float, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._drain, started_at, turns - 1)
            return
        took_s = loop.time() - started_at
        loop.call_later(max(min(REST_FRACTION * took_s, MAX_REST_S), self._interval_s - took_s), self._rest_over)

    def _rest_over(self) -> None:
        self._is_busy = False
        if self._waiting:
            self._is_busy = True
            self._run_round()
