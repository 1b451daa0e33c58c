"""Each section of the benchmark runs in a process of its own, which ends with its time: a kernel that never ends, a
device that is lost or a crash costs that section what it has not told yet, and no other one anything."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.gpu.report import OutOfTimeError, Report

CONTEXT = multiprocessing.get_context("fork")  # so that torch is imported once
SOFT = 0.85  # of its time: then a section is asked to end, at its next row
END_S = 10.0  # a process that has told everything may take so long to end
LEAST = 0.3  # of its time: with less left a section is not begun


@dataclass(frozen=True)
class Section:
    """What is measured, and how long that may take."""

    name: str
    limit_s: float
    measure: Callable[[Report], None]


def run_all(sections: list[Section], report: Report, budget_s: float, save: Callable[[], None]) -> None:
    """In order. A section that does not fit any more is left out. `save` is called after every row."""
    started = time.monotonic()
    for section in sections:
        left = budget_s - (time.monotonic() - started)
        if left < section.limit_s * LEAST:
            report.row(section.name, "left out", note=f"{left:.0f} s are left, it may take {section.limit_s:.0f}")
        else:
            run_section(section, report, min(section.limit_s, left), save)
        save()


def run_section(section: Section, report: Report, limit_s: float, save: Callable[[], None]) -> None:
    """Adds what the section tells to the report, and whether it did not end by itself."""
    print(f"\n== {section.name}", flush=True)
    started = time.monotonic()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(section, report, limit_s, sender), name=section.name)
    process.start()
    sender.close()
    while receiver.poll(max(started + limit_s - time.monotonic(), 0)):
        try:
            row, report.figures, report.bandwidth, report.tflops = receiver.recv()
        except EOFError:
            process.join(END_S)
            break
        report.rows += [row] if row else []
        save()
    is_late = process.is_alive()
    with suppress(ProcessLookupError):  # where it left none that it had started
        os.killpg(process.pid, signal.SIGKILL)
    process.join(END_S)  # no longer: a driver may hold it
    if is_late:
        report.row(section.name, "killed", ok=False, note=f"it did not end within {limit_s:.0f} s")
    elif process.exitcode:
        report.row(section.name, "died", ok=False, note=f"exit code {process.exitcode}")
    print(f"   {time.monotonic() - started:.1f} s", flush=True)


def _work(section: Section, report: Report, limit_s: float, sender: Connection) -> None:
    """In the section's process. What it starts can be ended together with it."""
    os.setpgid(0, 0)
    report.ends_at = time.monotonic() + SOFT * limit_s
    report.tell = lambda row: sender.send((row, report.figures, report.bandwidth, report.tflops))
    try:
        section.measure(report)
    except OutOfTimeError:
        report.ends_at = math.inf
        report.row(section.name, "the rest", note="left out: the section's time is up")
    except Exception as error:  # others still tell something
        traceback.print_exc()
        report.ends_at = math.inf
        report.row(section.name, "failed", ok=False, note=f"{type(error).__name__}: {str(error)[:200]}")
    report.tell({})
