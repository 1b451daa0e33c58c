"""What the machine, or the control group this process runs in, leaves us."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = CGROUP) -> int:
    """Cores this process may use: its affinity, or the processor time its control group is granted if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes this process may still take: what the system has free, or what its control group leaves if less."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, KeyError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 natively here."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
