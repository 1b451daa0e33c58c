"""The speed of the kernels that `quire doctor` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from worker_svc.engine.kernels import probe
from worker_svc.engine.kernels.paths import available_paths, path_of
from worker_svc.engine.kernels.probe import instructions


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fma bfloat16-pairs tiles avx512f", ("amx", "AMX", "AMX", "AVX512")),
        ("fma bfloat16-pairs avx512f", ("avx512_bf16", "AVX512-BF16", "AVX512", "AVX512")),
        ("fma avx512f", ("avx512", "AVX512", "AVX512", "AVX512")),
        ("fma avx2", ("avx2", "AVX2", "AVX2", "AVX2")),
        ("fma bfloat16-matrices neon", ("neon_bf16", "BFMMLA", "SMMLA", "NEON")),
        ("fma neon", ("neon", "NEON", "NEON", "NEON")),
        ("generic", ("generic", *("no vector instructions",) * 3)),
    ],
)
def test_path_and_instructions_by_number_type(words, expected):
    assert (path_of(words).name, *instructions(words.split()).values()) == expected


def run_probe(**environment):
    command = [sys.executable, "-m", "worker_svc.engine.kernels.probe"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_speeds_of_this_machine():
    found = run_probe()
    assert found["instructions"].keys() == found["giga_operations"].keys() == {"bfloat16", "int8", "float32"}
    assert all(speed > 0.1 for speed in (*found["giga_operations"].values(), found["read_gb_s"], found["copy_gb_s"]))
    assert found["fastest"] == available_paths()[0].name
    assert not found["is_chosen"]


def test_the_other_paths_are_measured_by_their_kernels(kernel_builds, monkeypatch):
    fastest, *_, generic = available_paths()
    monkeypatch.setattr(probe, "available_paths", lambda: [fastest, generic])
    monkeypatch.setattr(probe, "load_kernels_of", lambda path, sources: kernel_builds(path.name))
    (found,) = probe.measure_others(fastest.name)
    assert found["path"] == "generic"
    assert all(speed > 0.1 for speed in (*found["giga_operations"].values(), found["read_gb_s"]))


def test_a_path_that_the_processor_lacks_is_reported():
    found = run_probe(QUIRE_CPU_PATH="vfp")
    assert found["error"].startswith("QUIRE_CPU_PATH = vfp: not a path of this processor; set one of ")
    assert found["is_fatal"]


def test_without_a_compiler_the_reason_is_reported():
    found = run_probe(CXX="no-such-compiler")
    assert "no-such-compiler" in found["error"]
    assert not found["is_fatal"]
