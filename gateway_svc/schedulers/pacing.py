"""Decides when handlers wake up for new tokens: at once while the gateway keeps up, in rounds when it is busy.

A chunk costs the same for any number of tokens, so all streams with new tokens are woken together in one round. The
next round starts after the loop has finished this round and then had a quarter of the round's time for other work:
reading from schedulers, accepting requests. Meanwhile tokens collect in the journals and are sent as larger chunks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

DRAIN_TURNS = 3  # loop iterations per round: handlers run and write, writes complete, handlers sleep again
REST_FRACTION = 0.25  # pause after a round, as a fraction of the round's duration
MAX_REST_S = 0.05  # if the process was frozen during a round, its duration is far too long


class Sleeper(Protocol):
    """A handler that waits for new tokens."""

    def wake(self) -> None:
        """Read the new tokens now."""


class WakePacer:
    """Wakes sleepers in rounds, each at most once per round. `interval_s`: least time between the starts of rounds."""

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

    def begin_interval(self) -> None:
        """A handler sends a first token outside of the rounds. If no round is in progress, the next one keeps the
        interval to that token.
        """
        if self._interval_s and not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_later(self._interval_s, self._rest_over)

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
