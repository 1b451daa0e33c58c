"""Profiles of this process: a thread samples the Python stacks of all threads. The result is a trace in Chrome's JSON
format, which Perfetto opens. It has names of functions and files, never values.

    stacks at each sample        a b c | a b c | a b d | a        becomes slices   a: 1 to 4
                                                                                   b: 1 to 3
                                                                                   c: 1 to 2, d: 3

Native code (the model's kernels, gRPC) appears as the Python function that called it.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MAX_SLICES = 200_000
MAX_DEPTH = 128
ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Slice:
    """One function that is on a stack. Times are in microseconds since the start."""

    code: CodeType
    start: int
    end: int = 0


@dataclass(slots=True)
class ThreadStack:
    """The functions on the stack of one thread at the last sample, the outermost first."""

    name: str
    open: list[Slice] = field(default_factory=list)


class StackRecorder:
    """Converts samples of stacks to slices. Not thread-safe."""

    def __init__(self, max_slices: int = MAX_SLICES) -> None:
        self._threads: dict[int, ThreadStack] = {}
        self._slices: list[tuple[int, Slice]] = []  # with the id of the thread
        self._max_slices = max_slices

    @property
    def is_full(self) -> bool:
        return len(self._slices) >= self._max_slices

    def sample(self, frames: dict[int, FrameType], names: dict[int, str], at_us: int) -> None:
        """Add the stacks of all threads at one time."""
        for thread_id in [known for known in self._threads if known not in frames]:
            self._shorten(thread_id, 0, at_us)
            del self._threads[thread_id]
        for thread_id, frame in frames.items():
            self._sample_thread(thread_id, names.get(thread_id, f"thread {thread_id}"), stack_of(frame), at_us)

    def _sample_thread(self, thread_id: int, name: str, stack: list[CodeType], at_us: int) -> None:
        thread = self._threads.setdefault(thread_id, ThreadStack(name))
        same = 0
        for known, code in zip(thread.open, stack, strict=False):
            if known.code is not code:
                break
            same += 1
        self._shorten(thread_id, same, at_us)
        thread.open += [Slice(code, at_us) for code in stack[same:]]

    def _shorten(self, thread_id: int, length: int, at_us: int) -> None:
        """End the slices above `length`."""
        open_slices = self._threads[thread_id].open
        for ended in open_slices[length:]:
            ended.end = at_us
            self._slices.append((thread_id, ended))
        del open_slices[length:]

    def finish(self, process: str, at_us: int) -> dict[str, Any]:
        """End all slices. Returns the trace."""
        names = {thread_id: thread.name for thread_id, thread in self._threads.items()}
        for thread_id in names:
            self._shorten(thread_id, 0, at_us)
        pid = os.getpid()
        events: list[dict[str, Any]] = [_name("process_name", pid, 0, process)]
        events += [_name("thread_name", pid, thread_id, name) for thread_id, name in names.items()]
        events += self._events(pid)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _events(self, pid: int) -> Iterator[dict[str, Any]]:
        for thread_id, slice_ in sorted(self._slices, key=lambda item: (item[1].start, -item[1].end)):
            yield {
                "ph": "X",
                "name": slice_.code.co_qualname,
                "cat": "python",
                "pid": pid,
                "tid": thread_id,
                "ts": slice_.start,
                "dur": max(1, slice_.end - slice_.start),
                "args": {"file": _place(slice_.code)},
            }


def stack_of(frame: FrameType | None) -> list[CodeType]:
    """The functions on a stack, the outermost first; of a very deep stack, the outermost ones."""
    codes: list[CodeType] = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    codes.reverse()
    return codes[:MAX_DEPTH]


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _place(code: CodeType) -> str:
    path = Path(code.co_filename)
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    elif "site-packages" in path.parts:
        path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    return f"{path}:{code.co_firstlineno}"


def record(process: str, seconds: float, hz: int, stop: threading.Event) -> bytes:
    """Sample for `seconds` with `hz` samples per second, or until `stop` is set. Returns the trace as JSON in gzip.

    Blocks; call it in a thread, which is left out of the profile.
    """
    recorder, own_thread = StackRecorder(), threading.get_ident()
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds and not recorder.is_full:
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != own_thread}
        names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
        recorder.sample(frames, names, int(1e6 * elapsed))
        del frames  # a frame keeps the variables of its function alive
        if stop.wait(1 / hz):
            break
    trace = recorder.finish(process, int(1e6 * (time.monotonic() - began)))
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6)
