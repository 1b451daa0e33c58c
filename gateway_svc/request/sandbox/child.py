"""The main loop of a sandbox process, and the limits that the kernel enforces on it.

A process answers one message at a time until its stdin ends, so it also ends with its gateway. `cpu_s` of a message is
the limit on CPU time for its answer. `error` of an answer is empty if the message succeeded; `data`, if any, is
bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LENGTH = struct.Struct(">I")
DATA = "data"


def to_frame(content: Mapping[str, Any], data: bytes | None = None) -> bytes:
    """A message as bytes: its length in 4 bytes, then JSON. The entry `data`, bytes, follows a line break after it.

    Raises ValueError for content that JSON cannot represent.
    """
    text = json.dumps(content, ensure_ascii=False).encode()
    if data is None:
        return LENGTH.pack(len(text)) + text
    return b"".join((LENGTH.pack(len(text) + 1 + len(data)), text, b"\n", data))


def parse_frame(payload: bytes) -> dict[str, Any]:
    """The content of a message, without its length."""
    text, line_break, data = payload.partition(b"\n")
    content: dict[str, Any] = json.loads(text)
    return content | {DATA: data} if line_break else content


def read_frame(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return parse_frame(stream.read(LENGTH.unpack(header)[0]))


OOM_SCORE = Path("/proc/self/oom_score_adj")
# seccomp(2): by architecture its number in a filter, the number of the call itself, and the column of CALLS
ARCHITECTURES = {"x86_64": (0xC000003E, 317, 0), "aarch64": (0xC00000B7, 277, 1)}
# System calls that a process may make: its pipes, memory, clocks, locks and its end. All others fail with EPERM.
CALLS = {
    "read": (0, 63), "write": (1, 64), "writev": (20, 66), "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80),
    "newfstatat": (262, 79), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "mremap": (25, 216), "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "setitimer": (38, 103),
    "clock_gettime": (228, 113), "gettimeofday": (96, 169), "getrandom": (318, 278), "futex": (202, 98),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getpid": (39, 172), "gettid": (186, 178),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
SET_NO_NEW_PRIVS = 38  # an option of prctl(2)
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of a filter
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def limit_process(memory_bytes: int) -> None:
    """Set the limits of the whole process. Memory is address space.

    The process cannot open files or sockets, start processes, or reach others, such as its gateway. If the machine is
    out of memory, the kernel ends this process before the gateway.
    """
    with suppress(OSError):  # not Linux
        OOM_SCORE.write_text("1000")
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, memory_bytes)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        _limit(kind, 0)
    if sys.platform == "linux" and not _limit_calls():
        print("this machine cannot filter system calls: a sandbox process has its other limits only", file=sys.stderr)


def _limit_calls() -> bool:
    """Let all threads make CALLS only. False if the machine cannot do this."""
    if platform.machine() not in ARCHITECTURES:
        return False
    architecture, seccomp, column = ARCHITECTURES[platform.machine()]
    numbers = [pair[column] for pair in CALLS.values()]
    program = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, len(numbers) + 1, architecture), (LOAD, 0, 0, 0)]
    program += [(JUMP_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(RETURN, 0, 0, FAIL_WITH_EPERM), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return int(libc.syscall(ctypes.c_long(seccomp), 1, 1, header)) == 0  # a filter, for all threads


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def answer_messages(answer: Answer, memory_bytes: int) -> None:
    """Answer messages until stdin ends, under the limits of the whole process."""
    limit_process(memory_bytes)
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
