"""Cores and memory respect the limits of a control group, as in a container."""

from __future__ import annotations

import os

import pytest
import torch

from worker_svc.engine.backend import KVLayout
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.kernels.machine import available_cores, available_memory, total_memory
from worker_svc.flags import check_memory, make_parser


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


def test_all_memory_follows_the_limit(tmp_path):
    everything = total_memory(tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    assert total_memory(tmp_path) == 5000 < everything
    (tmp_path / "memory.max").write_text("max\n")
    assert total_memory(tmp_path) == everything


def test_a_pool_that_no_memory_can_hold_is_refused_in_one_line():
    def flags(*words):
        return make_parser().parse_args(["--model", "m", *words])

    with pytest.raises(ValueError, match=r"--kv-cache-memory is 921600\.0 GiB, but this machine or its control group"):
        check_memory(flags("--kv-cache-memory", "900T"))
    for others in (["--num-blocks", "8"], ["--backend", "cuda"], ["--executor", "sim"]):
        check_memory(flags("--kv-cache-memory", "900T", *others))
    check_memory(flags("--kv-cache-memory", "64M"))
    with pytest.raises(ValueError, match=r"keys and values of 1000000000 blocks need .* GiB: Cannot allocate memory"):
        KVCachePool([KVLayout(8, 128, 128)] * 30, 1_000_000_000, 16, torch.float32)
