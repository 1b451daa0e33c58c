"""Child processes that end with this process, and are started again when they die. Standard library only."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# Linux sends SIGTERM to the child when its parent dies (PR_SET_PDEATHSIG = 1); the setting survives exec.
LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses before restarts: they double, and begin again after a process has run for `steady_s`."""

    first_s: float
    max_s: float
    steady_s: float


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that should run. `status` is negative for a signal."""

    status: int
    start: int  # 0: the first process
    was_steady: bool
    pause_s: float  # until the next start


async def spawn(
    command: Sequence[str],
    *,
    stdin: int,
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start a program, by its path. It gets SIGTERM when this process dies for any reason. Raises OSError.

    It runs in a session of its own, so that Ctrl-C in a terminal reaches only this process. `output`: stdout and
    stderr; None: those of this process.
    """
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())] if sys.platform == "linux" else []
    return await asyncio.create_subprocess_exec(
        *launcher, *command, stdin=stdin, stdout=output, stderr=output, start_new_session=True, env=environment
    )


async def keep_running(
    run_once: Callable[[int], Awaitable[int]],
    stopping: asyncio.Event,
    backoff: Backoff,
    on_death: Callable[[Death], None],
) -> int:
    """Run a process, and again whenever it dies, until `stopping` is set. Returns its last exit status, 0 in a pause.

    `run_once(n)` runs the process of start n, from 0, to its end. `on_death` reports the death of a process; it
    raises if a restart would not help.
    """
    pause_s, start = backoff.first_s, 0
    while True:
        started = time.monotonic()
        status = await run_once(start)
        if stopping.is_set():
            return status
        was_steady = time.monotonic() - started >= backoff.steady_s
        pause_s = backoff.first_s if was_steady else pause_s
        on_death(Death(status, start, was_steady, pause_s))
        if await is_set_within(stopping, pause_s):
            return 0
        pause_s, start = min(2 * pause_s, backoff.max_s), start + 1


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most for `seconds`. Returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
