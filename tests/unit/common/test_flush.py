"""When a hop flushes: at once on an idle system, else at the end of an interval, or with something urgent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from svc_common.flush import FlushTimer
from tests.unit.gateway.test_pacing import Clock


def times_of(
    script: Callable[[FlushTimer, Clock], Awaitable[None]], interval_s: float = 0.0, *, holds: bool = False
) -> list[float]:
    """The times at which a timer flushes."""
    loop, flushed = Clock(), list[float]()

    async def run() -> None:
        await script(FlushTimer(lambda: flushed.append(loop.now), interval_s, holds=holds), loop)
        await asyncio.sleep(10.0)

    loop.run_until_complete(run())
    loop.close()
    return flushed


def test_bytes_leave_at_once_or_when_the_interval_ends() -> None:
    async def script(timer: FlushTimer, loop: Clock) -> None:
        timer.soon()
        await asyncio.sleep(1.0)
        timer.soon()
        timer.soon()

    assert times_of(script) == [0.0, 1.0, 1.0]
    assert times_of(script, interval_s=5.0) == [0.0, 5.0]


def test_urgent_bytes_take_along_what_waits_and_begin_no_interval() -> None:
    async def script(timer: FlushTimer, loop: Clock) -> None:
        timer.soon()
        await asyncio.sleep(0.5)
        timer.soon()
        await asyncio.sleep(0.25)
        timer.now()
        timer.soon()

    assert times_of(script, interval_s=1.0) == [0.0, 0.75, 1.0]


def test_bytes_with_a_limit_leave_with_an_earlier_flush() -> None:
    async def script(timer: FlushTimer, loop: Clock) -> None:
        timer.by(3.0)
        timer.by(2.0)
        timer.by(4.0)
        await asyncio.sleep(2.5)
        timer.by(3.5)
        timer.soon()

    assert times_of(script) == [2.0, 2.5]


def test_an_interval_may_begin_with_bytes_that_left_outside_of_the_flushes() -> None:
    async def script(timer: FlushTimer, loop: Clock) -> None:
        timer.begin()
        await asyncio.sleep(0.5)
        timer.begin()  # one runs already
        timer.soon()

    assert times_of(script, interval_s=1.0) == [1.0]
    assert times_of(script) == [0.5]


@pytest.mark.parametrize("waits", [True, False])
def test_a_flush_that_lasts_delays_the_next_one(*, waits: bool) -> None:
    async def script(timer: FlushTimer, loop: Clock) -> None:
        timer.soon()
        await asyncio.sleep(1.0)
        if waits:
            timer.soon()
        await asyncio.sleep(1.0)
        timer.free(loop.time() + 0.5)
        await asyncio.sleep(1.0)
        timer.soon()

    assert times_of(script, holds=True) == ([0.0, 2.5] if waits else [0.0, 3.0])
