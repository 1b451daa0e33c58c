"""When handlers hear of new tokens: at once while the gateway keeps up, in larger pieces when it does not.

Each chunk costs the same, however many tokens it carries. So all streams with news are woken together, and not again
before the loop has worked that off and had a quarter of that time for everything else: reading what comes from
schedulers, taking new requests. Meanwhile tokens gather in the journals and leave as larger chunks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

DRAIN_TURNS = 3  # of the loop: handlers run and write, writes complete, handlers sleep again
REST_PART = 0.25  # of the time that waking took
MAX_REST_S = 0.05  # this process may have been stopped meanwhile


class Sleeper(Protocol):
    """Whoever may have news."""

    def wake(self) -> None:
        """Look at the news now."""


class WakePacer:
    """Wakes sleepers; one that is woken several times meanwhile is woken once. `interval_s`: rounds begin at least so
    far apart, also when there is time for more.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_s = interval_s
        self._waiting: dict[Sleeper, None] = {}
        self._is_busy = False  # a round is planned, or being worked off

    def wake(self, sleeper: Sleeper) -> None:
        """Wake it with the next round."""
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
        loop.call_later(max(min(REST_PART * took_s, MAX_REST_S), self._interval_s - took_s), self._rest_over)

    def _rest_over(self) -> None:
        self._is_busy = False
        if self._waiting:
            self._is_busy = True
            self._run_round()
