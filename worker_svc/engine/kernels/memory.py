"""Large memory that the CPU kernels read: in huge pages where the system has them.

With small pages the hardware stops prefetching at the end of each page, and nearly every page that is read for the
first time in a step misses the address cache: weights are read up to a third slower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

HUGE_PAGE = 2 << 20  # of x86, and of ARM with pages of 4 KiB
CACHE_LINE = 64
MAPPED_AT_ONCE = 64 << 20  # for weights; a page that no weight fills takes no memory
MADV_DONTNEED, MADV_HUGEPAGE, MADV_COLLAPSE = 4, 14, 25  # of Linux; the last since 6.1
SMAPS = Path("/proc/self/smaps")
# Start, end and file of a mapping without changed pages.
CLEAN_MAPPING = re.compile(r"^(\w+)-(\w+) \S+ \S+ \S+ \d+ +(/.*)\n(?:\w+: .*\n)*?Anonymous: +0 kB$", re.MULTILINE)


def aligned_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros [num_bytes] whose pages the system hands out when they are first written. They may become huge pages."""
    if num_bytes < HUGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    first = -mapped.data_ptr() % HUGE_PAGE
    return mapped[first : first + num_bytes]


def lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros [num_bytes] that take memory when they are first written, in huge pages if the system has them.

    The rest after the last whole huge page has small ones, which take no more memory than is asked for.
    """
    zeros = aligned_zeros(num_bytes)
    _advise(zeros, MADV_HUGEPAGE)
    return zeros


def release(zeros: torch.Tensor) -> None:
    """Give the whole huge pages of what `lazy_zeros` returned back to the system. They are zeros again."""
    _advise(zeros.flatten().view(torch.uint8), MADV_DONTNEED)


def resident_bytes(zeros: torch.Tensor) -> int:
    """The part of a contiguous tensor in host memory that takes memory."""
    first = zeros.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(zeros.data_ptr() + zeros.nbytes - first) // mmap.PAGESIZE)
    is_resident = torch.zeros(num_pages, dtype=torch.uint8)
    size, flags = ctypes.c_size_t(num_pages * mmap.PAGESIZE), ctypes.c_void_p(is_resident.data_ptr())
    ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size, flags)
    return int((is_resident & 1).sum()) * mmap.PAGESIZE


def release_files(paths: Iterable[Path]) -> None:
    """Give back the mapped pages of these files; pages that are read again come from the page cache. A mapping in which
    a page was changed keeps its pages.
    """
    wanted = {os.path.realpath(path) for path in paths}
    with suppress(OSError):  # no Linux
        for start, end, path in CLEAN_MAPPING.findall(SMAPS.read_text()):
            if path in wanted:
                address, size = int(start, 16), int(end, 16) - int(start, 16)
                ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_DONTNEED)


class WeightMemory:
    """Memory for weights, one behind the other, so that those smaller than a huge page share one."""

    def __init__(self) -> None:
        self._mapped, self._num_used = torch.zeros(0, dtype=torch.uint8), 0
        self._full: list[torch.Tensor] = []
        self.num_bytes = 0  # given so far

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Zeros [num_bytes] from the start of a cache line on."""
        if num_bytes > len(self._mapped) - self._num_used:
            self._full.append(self._mapped[: self._num_used])
            self._mapped, self._num_used = aligned_zeros(max(num_bytes, MAPPED_AT_ONCE)), 0
        start = self._num_used
        self.num_bytes += num_bytes
        self._num_used = min(start + num_bytes + -num_bytes % CACHE_LINE, len(self._mapped))
        return self._mapped[start : start + num_bytes]

    def take(self) -> list[torch.Tensor]:
        """All that was given since the last call, for `collapse`."""
        taken = [part for part in (*self._full, self._mapped[: self._num_used]) if len(part)]
        self._mapped, self._num_used, self._full = torch.zeros(0, dtype=torch.uint8), 0, []
        return taken


def collapse(memory: Sequence[torch.Tensor]) -> None:
    """Move memory of these functions that was written since to huge pages. Contents stay; readers wait for a page while
    it is moved.
    """
    for zeros in memory:
        _advise(zeros, MADV_HUGEPAGE)  # a system without the next advice moves them in its own time
        _advise(zeros, MADV_COLLAPSE)


def _advise(zeros: torch.Tensor, advice: int) -> None:
    """Ignores the error of a system that cannot follow the advice. Other Python threads run meanwhile."""
    num_bytes = zeros.numel() // HUGE_PAGE * HUGE_PAGE
    if num_bytes and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(zeros.data_ptr()), ctypes.c_size_t(num_bytes), advice)
