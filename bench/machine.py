"""The machine under a benchmark: processor time of processes, time stolen by other virtual machines, pinning.

A virtual machine can lose processor time to its neighbours (`steal` of /proc/stat). Figures of a run that lost much are
worthless, so `quiet` repeats such a run a limited number of times, keeps the run that lost least, and adds to it:

    steal_pct    share of all processor time that was stolen during the run; None where /proc/stat does not exist
    num_repeats  how often the run was repeated for that reason
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

MAX_STEAL_PCT = 5.0  # a run that lost more is repeated
MAX_REPEATS = 2
STEAL_FIELD = 7  # field in line 1 of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice
NUM_FIELDS = 8  # guest time is part of user time

Figures = dict[str, Any]


class StealMeter:
    """The share of processor time that was stolen since the meter was made."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def pct(self) -> float | None:
        """Percent of the time of all processors."""
        spent = [now - before for before, now in zip(self._before, _cpu_times(), strict=True)]
        return round(100 * spent[STEAL_FIELD] / max(1, sum(spent)), 1) if spent else None


def _cpu_times() -> list[int]:
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1 : 1 + NUM_FIELDS]]
    except OSError:
        return []


class Attempts:
    """Runs of one measurement until one of them lost little time, at most 1 + MAX_REPEATS."""

    def __init__(self) -> None:
        self._runs: list[Figures] = []

    @property
    def is_done(self) -> bool:
        return bool(self._runs) and (len(self._runs) > MAX_REPEATS or _steal_of(self.best) <= MAX_STEAL_PCT)

    @property
    def best(self) -> Figures:
        """The run that lost least."""
        return min(self._runs, key=_steal_of) | {"num_repeats": len(self._runs) - 1}

    def add(self, figures: Figures, meter: StealMeter) -> None:
        """Add a run that began when the meter was made and has just ended."""
        self._runs.append(figures | {"steal_pct": meter.pct()})


def _steal_of(figures: Figures) -> float:
    return figures["steal_pct"] or 0.0


def quiet(run: Callable[[], Figures]) -> Figures:
    """The figures of `run`, repeated while it loses more than MAX_STEAL_PCT of the time, with the machine's figures."""
    attempts = Attempts()
    while not attempts.is_done:
        meter = StealMeter()
        attempts.add(run(), meter)
    return attempts.best


async def quiet_async(run: Callable[[], Awaitable[Figures]]) -> Figures:
    """`quiet` for a coroutine function."""
    attempts = Attempts()
    while not attempts.is_done:
        meter = StealMeter()
        attempts.add(await run(), meter)
    return attempts.best


def cpu_s(pids: int | Iterable[int]) -> float:
    """Processor seconds that processes have used, without their children."""
    ticks = 0
    for pid in [pids] if isinstance(pids, int) else pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pin(pid: int, cores: Sequence[int]) -> None:
    """Restrict all threads of a process to these cores. Threads that it starts later inherit the restriction."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe() -> Figures:
    """The machine, for the last line of a benchmark."""
    return {"machine": f"{processor()}, {time.strftime('%Y-%m-%d')}", "cores": len(os.sched_getaffinity(0))}
