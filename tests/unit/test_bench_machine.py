"""The repeats of benchmark runs that lost processor time."""

from __future__ import annotations

import asyncio
import os

import pytest

from bench import machine


@pytest.fixture
def stolen(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The steal of the next runs, in percent."""
    runs: list[float | None] = []
    monkeypatch.setattr(machine.StealMeter, "pct", lambda self: runs.pop(0))
    return runs


def test_a_run_that_lost_little_is_not_repeated(stolen: list[float | None]) -> None:
    stolen[:] = [4.9, 0.0]
    assert machine.quiet(lambda: {"x": 1}) == {"x": 1, "steal_pct": 4.9, "num_repeats": 0}


def test_a_run_that_lost_much_is_repeated_until_one_lost_little(stolen: list[float | None]) -> None:
    stolen[:] = [30.0, 1.0, 0.0]
    runs = iter(range(10))
    assert machine.quiet(lambda: {"x": next(runs)}) == {"x": 1, "steal_pct": 1.0, "num_repeats": 1}


def test_repeats_are_limited_and_the_run_that_lost_least_is_kept(stolen: list[float | None]) -> None:
    stolen[:] = [30.0, 9.0, 20.0, 0.0]
    runs = iter(range(10))

    async def run() -> machine.Figures:
        return {"x": next(runs)}

    assert asyncio.run(machine.quiet_async(run)) == {"x": 1, "steal_pct": 9.0, "num_repeats": machine.MAX_REPEATS}


def test_a_machine_without_steal_counters_never_repeats(stolen: list[float | None]) -> None:
    stolen[:] = [None]
    assert machine.quiet(dict) == {"steal_pct": None, "num_repeats": 0}


def test_processor_time_of_this_process_grows() -> None:
    before = machine.cpu_s(os.getpid())
    while machine.cpu_s([os.getpid()]) == before:
        sum(range(10_000))
