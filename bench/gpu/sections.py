"""Runs each section of the benchmark in its own process with a time limit. A kernel that hangs, a lost device or a
crash costs only the section's remaining rows."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import triton

from bench.gpu.report import OutOfTimeError, Report

CONTEXT = multiprocessing.get_context("fork")  # torch is imported once, before the fork
SOFT = 0.85  # fraction of its time limit after which a section stops at its next row
END_S = 10.0  # time limit for the exit of a process that has sent all rows
MIN_SHARE = 0.3  # a section starts only if this fraction of its time limit remains


@dataclass(frozen=True, slots=True)
class Section:
    """A measurement and its time limit. `function` is MODULE:NAME. `when`: only with kernels of the engine that are
    right, or wrong."""

    name: str
    limit_s: float
    function: str
    when: Literal["always", "right", "wrong"] = "always"

    def load(self) -> Callable[[Report], None]:
        module, name = self.function.split(":")
        function: Callable[[Report], None] = getattr(importlib.import_module(module), name)
        return function


def run_all(sections: list[Section], report: Report, budget_s: float, save: Callable[[], None]) -> None:
    """Runs sections in order, skipping those that no longer fit. Calls `save` after every row. Without the kernels that
    serve, no speed is measured; the time goes to the sections that find the reason."""
    started = time.monotonic()
    for section in sections:
        wrong = report.figures.get("wrong_kernels")
        if section.when == "wrong" and not wrong:
            continue
        left = budget_s - (time.monotonic() - started)
        report.begin(section.name)
        if section.when == "right" and wrong:
            report.row(section.name, "skipped", note=f"{', '.join(wrong)} failed the self_checks")
        elif left < section.limit_s * MIN_SHARE:
            report.row(section.name, "skipped", note=f"{left:.0f} s are left, but it may take {section.limit_s:.0f} s")
        elif run_section(section, report, min(section.limit_s, left), save):
            report.cuts.append(section.name)
        else:
            report.done.append(section.name)
        save()


def run_section(section: Section, report: Report, limit_s: float, save: Callable[[], None]) -> bool:
    """Adds the rows of the section to the report, and an error row if the section was killed or crashed.

    Returns whether it ran out of time.
    """
    print(f"\n== {section.name}", flush=True)
    started = time.monotonic()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(section, report, limit_s, sender), name=section.name)
    process.start()
    sender.close()
    is_late = True
    try:
        while receiver.poll(max(started + limit_s - time.monotonic(), 0)):
            try:
                row = report.receive(receiver.recv())
            except EOFError:
                process.join(END_S)
                is_late = process.is_alive()
                break
            report.rows += [row] if row else []
            save()
    finally:
        if process.pid is not None:
            with suppress(ProcessLookupError):  # its process group is already gone
                os.killpg(process.pid, signal.SIGKILL)
        process.join(END_S)  # a driver may keep it alive
    if is_late:
        report.row(section.name, "killed", ok=False, note=f"it did not finish within {limit_s:.0f} s")
    elif process.exitcode:
        report.row(section.name, "died", ok=False, note=f"exit code {process.exitcode}")
    print(f"   {time.monotonic() - started:.1f} s", flush=True)
    return is_late or report.was_cut


class _LateCompilations:
    """Triton's listener: kernels that were not in the cache, and so took time of this section."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, *, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            self.names.append(str(src.name))

    def tell(self, section: Section, report: Report) -> None:
        if self.names:
            counts = ", ".join(f"{count} x {name}" for name, count in Counter(self.names).items())
            report.row(section.name, "compiled late", note=counts)


def _work(section: Section, report: Report, limit_s: float, sender: Connection) -> None:
    """Main function of a section's process. It leads a process group, so that its children can be killed with it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    report.ends_at = time.monotonic() + SOFT * limit_s
    report.tell = lambda row: sender.send(report.message(row))
    late = _LateCompilations()
    triton.knobs.compilation.listener = late
    try:
        section.load()(report)
        late.tell(section, report)
    except OutOfTimeError:
        report.ends_at = math.inf
        report.was_cut = True
        report.row(section.name, "remaining rows", note="skipped: the time of the section is over")
    except Exception as error:  # the other sections are still useful
        traceback.print_exc()
        report.ends_at = math.inf
        report.row(section.name, "failed", ok=False, note=f"{type(error).__name__}: {str(error)[:200]}")
    report.tell({})
