"""Profiles: slices from samples, the trace that Perfetto reads, and limits."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb

from svc_common.errors import OverloadedError
from svc_common.observe import inspection
from svc_common.observe.inspection import Inspector, without_secrets


def outer(depth: int) -> FrameType:
    """A frame below `depth` frames of this function."""
    return outer(depth - 1) if depth else sys._getframe()


def inner() -> FrameType:
    return sys._getframe()


def caller() -> FrameType:
    return inner()


def slices(trace: dict[str, Any], name: str) -> list[tuple[int, int]]:
    """Start and duration of the slices of one function."""
    return [(e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == name]


def test_consecutive_samples_become_slices() -> None:
    recorder = inspection.StackRecorder()
    first, second = caller(), inner()
    for at, frame in ((0, first), (10, first), (20, second), (30, first)):
        recorder.sample({1: frame}, {1: "main"}, at)
    trace = recorder.finish("test", 40)
    assert slices(trace, "caller") == [(0, 20), (30, 10)]
    assert slices(trace, "inner") == [(0, 20), (20, 10), (30, 10)]
    names = {e["name"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"process_name": "test", "thread_name": "main"}
    test_name = "test_consecutive_samples_become_slices"
    assert slices(trace, test_name) == [(0, 40)], "a function that stays on the stack is one slice"
    files = {e["args"]["file"].partition(":")[0] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert "tests/unit/common/test_profiler.py" in files


def test_deep_stacks_and_long_profiles_are_bounded() -> None:
    assert len(inspection.stack_of(outer(500))) == inspection.MAX_DEPTH
    recorder = inspection.StackRecorder(max_slices=10)
    at = 0
    while not recorder.is_full:
        recorder.sample({1: inner() if at % 2 else caller()}, {}, at)
        at += 1
    assert at < 20


def test_the_running_function_is_in_the_profile() -> None:
    stop = threading.Event()

    def work_for_the_profile() -> None:
        while not stop.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=work_for_the_profile, name="worker-thread")
    thread.start()
    try:
        data = inspection.record("quire-test", 0.2, 200, threading.Event())
    finally:
        stop.set()
        thread.join()
    trace = json.loads(gzip.decompress(data))
    assert any(name.endswith("work_for_the_profile") for name in {e["name"] for e in trace["traceEvents"]})
    assert not slices(trace, "record"), "the sampling thread is left out"


def inspector() -> Inspector:
    return Inspector("gateway", "g", 'redis = "redis://user:secret@host"', lambda: b"quire_x 1\n")


async def test_one_profile_at_a_time_and_it_ends_with_its_caller() -> None:
    running = inspector()
    first = asyncio.create_task(running.inspect(pb.INSPECT_KIND_PROFILE, 30.0, 100))
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError, match="is being profiled"):
        await running.inspect(pb.INSPECT_KIND_PROFILE, 0.1, 100)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    deadline = time.monotonic() + 60.0
    while any(thread.name.startswith("asyncio_") and is_recording(thread) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread still records"
        await asyncio.sleep(0.01)
    assert gzip.decompress(await running.inspect(pb.INSPECT_KIND_PROFILE, 0.1, 100))


def is_recording(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return any(code is inspection.record.__code__ for code in inspection.stack_of(frame))


async def test_a_report_has_no_secrets() -> None:
    report = json.loads(await inspector().inspect(pb.INSPECT_KIND_REPORT, 0.0, 0))
    assert report["metrics"] == "quire_x 1\n"
    assert report["versions"]["python"] == sys.version.split()[0]
    assert "secret" not in json.dumps(report)
    assert without_secrets("Authorization: Bearer abc.def-1 redis://:p@ss@h rest") == (
        "Authorization: Bearer *** redis://***@h rest"
    )
