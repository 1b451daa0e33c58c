"""The memory of this process: its limit, and the requests that it receives at the same time, so that a service refuses
requests before the kernel kills it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from svc_common.config import Flag, size_bytes
from svc_common.errors import LateRequestError, OverloadedError

T = TypeVar("T")

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
STATM, SMAPS = Path("/proc/self/statm"), Path("/proc/self/smaps")
MAPPING = re.compile(r"^\w+-\w+ \S+ \S+ \S+ \d+ *(.*)\nSize: .*\n(?:\w+: .*\n)*?Rss: +(\d+) kB$", re.MULTILINE)
DEFAULT_FRACTION = 0.85  # fraction of the container's limit; the rest is for requests that are open
READ_INTERVAL_S = 0.05
TRIM_INTERVAL_S = 5.0
TRIM_BYTES = 32 << 20  # without a limit: growth since the last trim
MALLOC_OPTIONS = {-1: 256 << 20, -2: 16 << 20, -3: 32 << 20, -8: 2}  # glibc: trim, pad, mmap threshold, arenas
MAX_RECEIVING = 64  # requests that arrive at the same time; with 16 MiB each they have 1 GiB
SENDER_FRACTION = 0.25  # fraction of MAX_RECEIVING for one sender
REQUEST_TIMEOUT_S = 60.0  # from the start of a request to its last byte
# A probe has some bytes, which arrive with its header. gRPC receives as many as a message may have, so the probes that
# arrive have few places and little time.
STRANGER_BYTES = 256 << 20  # sum of the largest messages that strangers may send at the same time
STRANGER_TIMEOUT_S = 2.0
CHECK_INTERVAL_S = 1.0
RETRY_FULL_S = 1.0

MEMORY_FLAG = Flag("--max-memory-bytes", size_bytes,
    "memory of a process above which new requests are refused with RESOURCE_EXHAUSTED while others are open. Unset: 85 "
    "percent of the container's limit; outside of a container no limit",
)  # fmt: skip


def container_limit() -> int | None:
    """The memory limit of this process's cgroup (version 2 or 1) in bytes; None: there is none."""
    with suppress(OSError):
        own = next((line[3:] for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")), "/")
        limits = [_limit_in(CGROUPS / own.lstrip("/") / "memory.max"), _limit_in(CGROUPS / "memory.max")]
        limits.append(_limit_in(CGROUPS / "memory" / "memory.limit_in_bytes"))
        return min((limit for limit in limits if limit is not None), default=None)
    return None


def _limit_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None  # version 1 has a huge number for "no limit"


def keep_freed_memory() -> None:
    """Let this process keep large buffers that it frees for the next ones, some hundred MB: a page that comes back from
    the kernel costs more than copying it.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            for parameter, value in MALLOC_OPTIONS.items():
                mallopt(parameter, value)


def trim() -> None:
    """Return free memory to the kernel, which the C library keeps after a peak."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process that is not swapped out; 0 where it is not known."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def memory_kinds() -> dict[str, int]:
    """Resident bytes of this process by kind of mapping; empty where they are not known."""
    kinds: Counter[str] = Counter()
    with suppress(OSError):
        for path, kib in MAPPING.findall(SMAPS.read_text()):
            kind = "shared" if path.startswith(("/dev/", "/memfd:")) else "libraries" if ".so" in path else "files"
            kinds[kind if path.startswith("/") else "anonymous"] += int(kib) << 10
    return dict(kinds)


class MemoryLimit:
    """Compares the process's memory with a limit. None: no limit."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._used = 0
        self._trim_above = max_bytes or resident_bytes() + TRIM_BYTES
        self._read_at = self._trimmed_at = -TRIM_INTERVAL_S

    @classmethod
    def of_container(cls) -> MemoryLimit:
        """The default: a fraction of the container's limit."""
        limit = container_limit()
        return cls(None if limit is None else int(DEFAULT_FRACTION * limit))

    @classmethod
    def of_flag(cls, max_bytes: int | None) -> MemoryLimit:
        """The limit of --max-memory-bytes, or its default."""
        return cls.of_container() if max_bytes is None else cls(max_bytes)

    def exceeded_by(self) -> int | None:
        """The used bytes if they exceed the limit, else None. Cheap: memory is read every 50 ms at most."""
        now = time.monotonic()
        if now - self._read_at > READ_INTERVAL_S:
            self._used, self._read_at = resident_bytes(), now
            self._trim(now)
        return self._used if self.max_bytes is not None and self._used > self.max_bytes else None

    def check(self) -> None:
        """Raise OverloadedError if the limit is exceeded."""
        if (used := self.exceeded_by()) is not None:
            raise OverloadedError(
                f"this process uses {used} bytes of memory; the limit is {self.max_bytes} (--max-memory-bytes); "
                "retry later",
                retry_after_s=RETRY_FULL_S,
            )

    def _trim(self, now: float) -> None:
        if self._used <= self._trim_above or now - self._trimmed_at < TRIM_INTERVAL_S:
            return
        self._trimmed_at = now
        trim()
        self._used = resident_bytes()
        self._trim_above = self.max_bytes or self._used + TRIM_BYTES


class Intake:
    """Bounds the memory of requests while they arrive, and the calls that begin while memory is scarce.

    Until a request is read, gRPC and HTTP hold one window (64 KiB) of it, and its sender waits. So a request is read
    when its sender is known and has a place: any number of calls and connections hold `max_receiving` at most.
    """

    def __init__(self, limit: MemoryLimit | None = None, max_receiving: int = MAX_RECEIVING) -> None:
        self._limit = limit or MemoryLimit(None)
        self._places = asyncio.Semaphore(max_receiving)
        self._max_of_sender = max(1, int(max_receiving * SENDER_FRACTION))
        self._of_sender: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._began: dict[asyncio.Task[Any], float] = {}  # the requests that arrive, oldest first
        self.max_message_bytes = 16 << 20  # limit of its port
        self._of_strangers: dict[asyncio.Task[Any], None] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._num_calls = 0

    def __enter__(self) -> None:
        """A call begins."""
        self._num_calls += 1

    def __exit__(self, *exc: object) -> None:
        self._num_calls -= 1

    async def keep_trimmed(self) -> None:
        """Return free memory to the kernel, also while no calls begin. Never ends."""
        while True:
            await asyncio.sleep(TRIM_INTERVAL_S)
            self._limit.exceeded_by()

    def check_memory(self) -> None:
        """Raise OverloadedError if memory exceeds its limit while other calls are open."""
        if self._num_calls > 1:
            self._limit.check()

    async def receive(self, sender: str, read: Callable[[], Awaitable[T]]) -> T:
        """What `read` returns, once there is a place. Raises LateRequestError if it takes too long.

        `sender` is empty for a caller without credentials, which no other caller waits for.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can receive a request")
        self._began[task] = time.monotonic()
        if self._timer is None:  # one for all requests: a timer for each costs more than the rest of this method
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._end_late)
        try:
            return await (self._receive_in_place(sender, read) if sender else self._receive_of_stranger(task, read))
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel():
                raise
            seconds = REQUEST_TIMEOUT_S if sender else STRANGER_TIMEOUT_S
            raise LateRequestError(
                f"the request did not arrive within {seconds:g} s, or before others needed its place; retry",
                retry_after_s=RETRY_FULL_S,
            ) from None
        finally:
            del self._began[task]
            self._late.discard(task)

    async def _receive_in_place(self, sender: str, read: Callable[[], Awaitable[T]]) -> T:
        own = self._of_sender.get(sender)
        if own is None:
            own = self._of_sender[sender] = asyncio.Semaphore(self._max_of_sender)
        async with own, self._places:
            return await read()

    async def _receive_of_stranger(self, task: asyncio.Task[Any], read: Callable[[], Awaitable[T]]) -> T:
        """Strangers do not wait for each other: the oldest request loses its place. Health checks arrive at once."""
        self._of_strangers[task] = None
        if len(self._of_strangers) * self.max_message_bytes > STRANGER_BYTES:
            self._end(next(iter(self._of_strangers)))
        timer = asyncio.get_running_loop().call_later(STRANGER_TIMEOUT_S, self._end, task)
        try:
            return await read()
        finally:
            timer.cancel()
            self._of_strangers.pop(task, None)

    def _end_late(self) -> None:
        now, self._timer = time.monotonic(), None
        for task in [task for task, began in self._began.items() if now - began > REQUEST_TIMEOUT_S]:
            self._end(task)
        if self._began:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._end_late)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._of_strangers.pop(task, None)
        self._late.add(task)
        task.cancel()
