"""Cores and memory respect the limits of a control group, as in a container."""

from __future__ import annotations

import os

from worker_svc.engine.kernels.machine import available_cores, available_memory


def test_cores_follow_the_quota(tmp_path):
    everything = len(os.sched_getaffinity(0))
    assert available_cores(tmp_path) == everything
    quota = tmp_path / "cpu.max"
    for text, expected in (
        ("max 100000", everything),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", everything),
    ):
        quota.write_text(text)
        assert available_cores(tmp_path) == expected


def test_memory_follows_the_limit(tmp_path):
    free = available_memory(tmp_path)
    assert free > 0
    (tmp_path / "memory.current").write_text("1000")
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 5000
