"""Large memory that the CPU kernels read: in huge pages where the system has them."""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE = 2 << 20  # of x86, and of ARM with pages of 4 KiB


def lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros [num_bytes] whose pages the system hands out when they are first written, in huge pages if it can.

    With small pages the hardware stops prefetching at the end of each page, and nearly every page that is read for the
    first time in a step misses the address cache: weights are read up to a third slower. torch.zeros would touch all of
    it at once. The rest after the last whole huge page has small ones, which take no more memory than is asked for.
    """
    if num_bytes < HUGE_PAGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    first = -mapped.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes // HUGE_PAGE * HUGE_PAGE)
    return mapped[first : first + num_bytes]
