"""Cores, memory and instruction sets that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
CPUINFO_FIELDS = ("flags", "Features")  # x86, ARM


def available_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: its affinity, or the CPU quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still allocate: free memory, or the rest of its control group's limit if less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, KeyError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def total_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory of this machine, or of its control group's limit if that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        return memory
    return memory if limit == "max" else min(memory, int(limit))


def instruction_sets(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The processor's instruction sets as /proc/cpuinfo names them; empty if there is no such file."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith(CPUINFO_FIELDS)), frozenset()
    )
