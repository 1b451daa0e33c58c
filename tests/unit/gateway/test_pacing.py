"""Handlers are woken in rounds, and a round starts only after the previous round is finished."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from gateway_svc.schedulers.submitter import MAX_REST_S, WakePacer


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is advanced by the test, or to the next timer when nothing else is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Handler:
    """Records when it is woken, and uses `cost_s` of the loop's time."""

    def __init__(self, loop: Clock, cost_s: float = 0.0) -> None:
        self._loop = loop
        self._cost_s = cost_s
        self.woken_at: list[float] = []

    def wake(self) -> None:
        self.woken_at.append(self._loop.now)
        self._loop.call_soon(self._work)

    def _work(self) -> None:
        self._loop.now += self._cost_s


@pytest.fixture
def loop() -> Iterator[Clock]:
    loop = Clock()
    yield loop
    loop.close()


def test_an_idle_gateway_wakes_at_once(loop: Clock) -> None:
    async def run() -> None:
        pacer, handler = WakePacer(), Handler(loop)
        for _ in range(3):
            pacer.wake(handler)
            pacer.wake(handler)  # does not wake it a second time
            await asyncio.sleep(1.0)
        assert handler.woken_at == [0.0, 1.0, 2.0]

    loop.run_until_complete(run())


def test_a_busy_gateway_collects_tokens_until_the_round_and_its_rest_are_over(loop: Clock) -> None:
    async def run() -> None:
        pacer = WakePacer()
        handlers = [Handler(loop, cost_s=0.01) for _ in range(4)]
        for handler in handlers:
            pacer.wake(handler)
        await asyncio.sleep(0.001)
        assert [handler.woken_at for handler in handlers] == [[0.0]] * 4
        for handler in handlers:  # tokens of two steps, one round
            pacer.wake(handler)
            pacer.wake(handler)
        await asyncio.sleep(1.0)
        second = handlers[0].woken_at[1]
        assert second == pytest.approx(0.04 * 1.25)
        assert [len(handler.woken_at) for handler in handlers] == [2] * 4

    loop.run_until_complete(run())


@pytest.mark.parametrize(("cost_s", "interval_s"), [(0.001, 0.02), (0.004, 0.04), (0.015, 0.08)])
def test_an_interval_separates_rounds(loop: Clock, cost_s: float, interval_s: float) -> None:
    """It is longer if rounds would take more than a tenth of the time, but at most four times as long."""

    async def run() -> None:
        pacer, handler = WakePacer(interval_s=0.02), Handler(loop, cost_s=cost_s)
        for _ in range(200):  # a token every millisecond
            pacer.wake(handler)
            await asyncio.sleep(0.001)
        gaps = [later - earlier for earlier, later in itertools.pairwise(handler.woken_at)]
        assert handler.woken_at[0] == 0.0
        assert all(gap == pytest.approx(interval_s, abs=0.002) for gap in gaps)

    loop.run_until_complete(run())


def test_a_first_token_begins_an_interval(loop: Clock) -> None:
    """It is sent outside of the rounds, and the next chunk of its stream keeps the interval to it."""

    async def run() -> None:
        pacer, handler = WakePacer(interval_s=0.02), Handler(loop)
        pacer.begin_interval()
        await asyncio.sleep(0.001)
        pacer.wake(handler)
        await asyncio.sleep(0.001)
        pacer.begin_interval()  # starts another stream: the interval in progress is not extended
        await asyncio.sleep(1.0)
        assert handler.woken_at == [pytest.approx(0.02)]
        pacer.begin_interval()
        await asyncio.sleep(1.0)
        pacer.wake(handler)
        await asyncio.sleep(0.001)
        assert handler.woken_at[1:] == [pytest.approx(2.002)], "the interval has passed: at once"

    loop.run_until_complete(run())


def test_without_an_interval_tokens_follow_a_first_token_at_once(loop: Clock) -> None:
    async def run() -> None:
        pacer, handler = WakePacer(), Handler(loop)
        pacer.begin_interval()
        pacer.wake(handler)
        await asyncio.sleep(0.001)
        assert handler.woken_at == [0.0]

    loop.run_until_complete(run())


def test_a_frozen_process_does_not_rest_for_long(loop: Clock) -> None:
    async def run() -> None:
        pacer, handler = WakePacer(), Handler(loop, cost_s=60.0)
        pacer.wake(handler)
        await asyncio.sleep(0.001)
        pacer.wake(handler)
        await asyncio.sleep(1.0)
        assert handler.woken_at[1] <= 60.0 + MAX_REST_S + 0.001

    loop.run_until_complete(run())
