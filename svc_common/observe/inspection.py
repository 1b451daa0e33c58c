"""What an operator may ask of a running service: a profile, or a report for support.

A report has versions, settings, metrics and the last lines of the log. It has no secrets: settings hide them, and logs
do not contain prompts, outputs or keys. As a second defence, passwords in URLs and bearer tokens are removed from it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from quire.v1 import inference_pb2 as pb

from svc_common.errors import InvalidRequestError, OverloadedError
from svc_common.memory import memory_kinds
from svc_common.observe.logs import recent_lines
from svc_common.observe.metrics import quire_version

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
    """Converts samples of stacks to slices: a trace in Chrome's JSON format, which Perfetto opens. Not thread-safe.

    stacks at each sample        a b c | a b c | a b d | a        becomes slices   a: 1 to 4
                                                                                   b: 1 to 3
                                                                                   c: 1 to 2, d: 3

    Native code (the model's kernels, gRPC) appears as the Python function that called it.
    """

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


MIN_SECONDS, MAX_SECONDS, DEFAULT_SECONDS = 0.1, 60.0, 10.0
MAX_HZ, DEFAULT_HZ = 1000, 200
ANSWER_S = 15.0  # for the answer after a profile of some seconds
PACKAGES = (
    "grpcio", "protobuf", "uvloop", "numpy", "torch", "triton", "safetensors", "tokenizers", "llguidance", "jinja2",
    "xxhash", "redis", "starlette", "uvicorn", "prometheus-client", "cryptography", "opentelemetry-sdk",
)  # fmt: skip
PASSWORD = re.compile(r"(?<=://)\S*@")  # up to the last @: a password may contain others
BEARER = re.compile(r"(?i)(bearer\s+)[\w.~+/=-]+")


class Inspector:
    """Profiles and reports of this process. `settings`: the settings in force, without secrets. `memory`: bytes of its
    anonymous memory whose use is known.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        settings: str,
        metrics: Callable[[], bytes],
        memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._service = service
        self._instance = instance
        self._settings = settings
        self._metrics = metrics
        self._memory = memory
        self._started_at = time.time()
        self._is_profiling = False

    async def inspect(self, kind: pb.InspectKind.ValueType, seconds: float, hz: int) -> bytes:
        """The profile as JSON in gzip, or the report as JSON. Raises InvalidRequestError or OverloadedError."""
        if kind == pb.INSPECT_KIND_REPORT:
            memory = await asyncio.to_thread(self._kinds_of_memory)
            return json.dumps(self._report() | {"memory": memory}).encode()
        if kind != pb.INSPECT_KIND_PROFILE:
            raise InvalidRequestError(
                f"kind is {kind}; must be INSPECT_KIND_PROFILE or INSPECT_KIND_REPORT", field="kind"
            )
        seconds, hz = checked_times(seconds, hz)
        if self._is_profiling:
            raise OverloadedError(f"{self._instance} is being profiled; retry when that profile is complete")
        self._is_profiling = True
        stop = threading.Event()
        try:
            return await asyncio.to_thread(record, f"quire-{self._service} {self._instance}", seconds, hz, stop)
        finally:
            stop.set()  # if the caller has left
            self._is_profiling = False

    def _kinds_of_memory(self) -> dict[str, int]:
        """Resident bytes by kind, which add up to the memory of the process."""
        known, kinds = dict(self._memory()), memory_kinds()
        other = kinds.pop("anonymous", 0) - sum(known.values())
        return known | {"other": max(0, other)} | kinds

    def _report(self) -> dict[str, object]:
        return {
            "service": self._service,
            "instance": self._instance,
            "versions": versions(),
            "uptime_s": round(time.time() - self._started_at, 1),
            "settings": without_secrets(self._settings),
            "metrics": without_secrets(self._metrics().decode()),
            "log": without_secrets("\n".join(recent_lines())),
        }


def checked_times(seconds: float, hz: int) -> tuple[float, int]:
    """Duration and rate of a profile; 0 is the default. Raises InvalidRequestError."""
    seconds, hz = seconds or DEFAULT_SECONDS, hz or DEFAULT_HZ
    if not math.isfinite(seconds) or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        limits = f"{MIN_SECONDS:g} to {MAX_SECONDS:g}"
        raise InvalidRequestError(f"seconds is {seconds:g}; must be from {limits}", field="seconds")
    if hz > MAX_HZ:
        raise InvalidRequestError(f"hz is {hz}; must be at most {MAX_HZ}", field="hz")
    return seconds, hz


def answer_timeout_s(kind: pb.InspectKind.ValueType, seconds: float) -> float:
    """How long a caller waits for the answer."""
    is_profile = kind == pb.INSPECT_KIND_PROFILE and math.isfinite(seconds)
    return ANSWER_S + (min(max(seconds or DEFAULT_SECONDS, 0.0), MAX_SECONDS) if is_profile else 0.0)


def versions() -> dict[str, str]:
    """Versions of Quire, Python, the system and the packages that are installed."""
    found = {"quire": quire_version(), "python": sys.version.split()[0], "system": platform.platform()}
    found["cpus"] = str(os.cpu_count())
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def without_secrets(text: str) -> str:
    """The text without passwords in URLs and bearer tokens."""
    return BEARER.sub(r"\1***", PASSWORD.sub("***@", text))
