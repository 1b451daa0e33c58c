"""The main loop of a sandbox process, and the limits that the kernel enforces on it.

A process answers one message at a time until its stdin ends, so it also ends with its gateway. `cpu_s` of a message is
the limit on CPU time for its answer. `error` of an answer is empty if the message succeeded; `data`, if any, is
bytes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway_svc.request.sandbox.frames import DATA, read_frame, to_frame

OOM_SCORE = Path("/proc/self/oom_score_adj")
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def limit_process(memory_bytes: int) -> None:
    """Set the limits of the whole process. Memory is address space.

    The process cannot open files or sockets and, unless it runs as root, cannot start processes. If the machine is out
    of memory, the kernel ends this process before the gateway.
    """
    with suppress(OSError):  # not Linux
        OOM_SCORE.write_text("1000")
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, memory_bytes)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        _limit(kind, 0)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def answer_messages(answer: Answer) -> None:
    """Answer messages until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the gateway, which ends this process
    # A traceback may contain a text of the request, so only the type is printed.
    sys.excepthook = lambda kind, error, traceback: print(f"a sandbox process failed: {kind.__name__}", file=sys.stderr)
    while (request := read_frame(sys.stdin.buffer)) is not None:
        _limit_cpu(request["cpu_s"])
        frame = _answer_frame(answer, request)
        _limit_cpu(0)
        _write_all(frame)


def _limit_cpu(seconds: float) -> None:
    """Let the kernel kill this process with SIGPROF after this much more CPU time of all its threads. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer_frame(answer: Answer, request: dict[str, Any]) -> bytes:
    try:
        content = answer(request)
        return to_frame(content, content.pop(DATA, None))
    except UnicodeEncodeError:
        return to_frame({"error": "the result has half of a surrogate pair, which is not valid Unicode"})


def _write_all(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]
