"""Fixtures of the engine tests."""

from __future__ import annotations

import json

import pytest

from worker_svc.engine.cpu import backend as cpu_backend
from worker_svc.engine.kernels.build import load_kernels, load_kernels_built_with
from worker_svc.engine.kernels.machine import instruction_sets
from worker_svc.engine.kernels.paths import available_paths, chosen_path


@pytest.fixture
def rewrite_config():
    """Changes fields of a checkpoint's config.json (or another JSON file); None removes one."""

    def rewrite(folder, name="config.json", **fields):
        path = folder / name
        config = json.loads(path.read_text()) if path.exists() else {}
        config |= fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return rewrite


# Compiler flags of processors with fewer instructions, and the instruction sets that they need. -O1 and -Og
# compile in a third of the time, and show that results do not depend on the optimiser. -Og is too slow for tiles.
BUILDS = {
    "native": ((), ()),
    "avx512": (("-march=x86-64-v4", "-Og"), ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")),
    "avx512bf16": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-Og"),
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_bf16", "avx512_vnni"),
    ),
    "tiles": (("-mavx2", "-mfma", "-O1", "-DQUIRE_EMULATED_TILES"), ("avx2", "fma")),
    "avx2": (("-mavx2", "-mfma", "-O1"), ("avx2", "fma")),
    "generic": (("-Og",), ()),
}
# The build for the path of this processor is left out: "native" has the same instructions.
SAME_AS_NATIVE = (chosen_path() or available_paths()[0]).name.replace("_", "")


@pytest.fixture(scope="session")
def kernel_builds():
    """A function that compiles the kernels of a build by name, and skips the test if this processor cannot run them."""

    def load(name):
        flags, needed = BUILDS["native" if name == SAME_AS_NATIVE else name]
        if missing := set(needed) - instruction_sets():
            pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
        return load_kernels_built_with(*flags) if flags else load_kernels()

    return load


@pytest.fixture(params=[name for name in BUILDS if name != SAME_AS_NATIVE])
def kernel_build(request, kernel_builds, monkeypatch):
    """Makes CPU backends use the kernels of each build in turn. Returns the name of the build."""
    kernels = kernel_builds(request.param)
    monkeypatch.setattr(cpu_backend, "load_kernels", lambda: kernels)
    return request.param
