"""Fixtures of the engine tests."""

from __future__ import annotations

import json
import os

import pytest

from worker_svc.engine import cpu_backend
from worker_svc.engine.kernels.build import load_kernels, load_kernels_built_with
from worker_svc.engine.machine import instruction_sets

# Threads that wait for each other sleep: on a busy machine spinning takes the core that the other one needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def rewrite_config():
    """Changes fields of a checkpoint's config.json (or another JSON file); None removes one."""

    def rewrite(folder, name="config.json", **fields):
        path = folder / name
        config = json.loads(path.read_text()) if path.exists() else {}
        config |= fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return rewrite


# Compiler flags of processors with fewer instructions, and what this processor must have to run the result. -O1
# compiles in a third of the time, and shows that the optimiser decides no result.
BUILDS = {
    "native": ((), ()),
    "avx512": (("-march=x86-64-v4", "-O1"), ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")),
    "avx2": (("-mavx2", "-mfma", "-O1"), ("avx2", "fma")),
    "generic": (("-O1",), ()),
}


@pytest.fixture(scope="session")
def kernel_builds():
    """Kernels compiled as for the processor of that name in BUILDS; skips the test if this one cannot run them."""

    def load(name):
        flags, needed = BUILDS[name]
        if missing := set(needed) - instruction_sets():
            pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
        return load_kernels_built_with(*flags) if flags else load_kernels()

    return load


@pytest.fixture(params=BUILDS)
def kernel_build(request, kernel_builds, monkeypatch):
    """Lets CPU backends use the kernels of each build in turn; the build's name."""
    kernels = kernel_builds(request.param)
    monkeypatch.setattr(cpu_backend, "load_kernels", lambda: kernels)
    return request.param
