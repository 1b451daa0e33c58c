"""The speed of the kernels that `quire doctor` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from worker_svc.engine.machine import instruction_sets
from worker_svc.engine.probe import paths


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fma bfloat16-pairs tiles avx512f", ("AMX", "AMX", "AVX512")),
        ("fma bfloat16-pairs avx512f", ("AVX512-BF16", "AVX512", "AVX512")),
        ("fma avx2", ("AVX2", "AVX2", "AVX2")),
        ("fma neon", ("NEON", "NEON", "NEON")),
        ("generic", ("no vector instructions",) * 3),
    ],
)
def test_paths_by_number_type(words, expected):
    assert tuple(paths(words.split()).values()) == expected


def run_probe(**environment):
    command = [sys.executable, "-m", "worker_svc.engine.probe"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_speeds_of_this_machine():
    found = run_probe()
    assert found["paths"].keys() == found["giga_operations"].keys() == {"bfloat16", "int8", "float32"}
    assert all(speed > 0.1 for speed in found["giga_operations"].values())
    assert found["has_unused_amx"] == (found["paths"]["bfloat16"] != "AMX" and "amx_bf16" in instruction_sets())


def test_without_a_compiler_the_reason_is_reported():
    assert "no-such-compiler" in run_probe(CXX="no-such-compiler")["error"]
