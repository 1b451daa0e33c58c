"""The memory of this process and its limit, so that a service refuses requests before the kernel kills it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
STATM = Path("/proc/self/statm")
DEFAULT_FRACTION = 0.85  # of the container's limit; the rest is for requests that are open
READ_INTERVAL_S = 0.05
TRIM_INTERVAL_S = 5.0


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


def resident_bytes() -> int:
    """Memory of this process that is not swapped out; 0 where it is not known."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class MemoryLimit:
    """Compares the process's memory with a limit. None: no limit."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._used = 0
        self._read_at = self._trimmed_at = -TRIM_INTERVAL_S

    @classmethod
    def of_container(cls, num_processes: int) -> MemoryLimit:
        """The default: a share of the container's limit for each of the service's processes."""
        limit = container_limit()
        return cls(None if limit is None else int(DEFAULT_FRACTION * limit / num_processes))

    def exceeded_by(self) -> int | None:
        """The used bytes if they exceed the limit, else None. Cheap: memory is read every 50 ms at most."""
        if self.max_bytes is None:
            return None
        now = time.monotonic()
        if now - self._read_at > READ_INTERVAL_S:
            self._used, self._read_at = resident_bytes(), now
            self._trim(now)
        return self._used if self._used > self.max_bytes else None

    def _trim(self, now: float) -> None:
        """Return free memory to the kernel, which the C library keeps after a peak."""
        if self.max_bytes is None or self._used <= self.max_bytes or now - self._trimmed_at < TRIM_INTERVAL_S:
            return
        self._trimmed_at = now
        if sys.platform == "linux":
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
        self._used = resident_bytes()
