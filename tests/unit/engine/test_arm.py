"""The kernels compiled for ARM, under an emulator: the bits of x86, and those of the specified instructions.

Needs a cross compiler and an emulator: `apt-get install g++-aarch64-linux-gnu qemu-user`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engine.tile_model import to_odd
from worker_svc.engine.kernels.build import SOURCES, STRICT_FLAGS, compile_objects
from worker_svc.engine.kernels.linear import BFLOAT16, INT8

DRIVER = Path(__file__).parent / "kernel_driver" / "driver.cpp"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SMALLEST_NORMAL = np.float32(2.0**-126)
# Instruction sets of a Neoverse V1 or later, an N1, and a Cortex-A72.
MATRICES = "armv8.2-a+dotprod+bf16+i8mm"
PROCESSORS = {
    MATRICES: "fma bfloat16-matrices neon",
    "armv8.2-a+dotprod": "fma neon",
    "armv8-a": "fma neon",
}


def compile_driver(folder: Path, processor: str) -> Path:
    """The driver and all kernels for ARM, statically linked. -O1 compiles in a third of the time."""
    command = [CROSS_COMPILER, *STRICT_FLAGS, "-O1", f"-march={processor}"]
    objects = compile_objects(command, (*SOURCES, DRIVER), folder)
    subprocess.run([*command, "-static", *objects, "-o", folder / "driver"], check=True)
    return folder / "driver"


def driver_of(processor: str, shared: Path) -> Path:
    """The driver of a processor. The first test process that needs it compiles it for all."""
    folder = shared / f"arm-{processor}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder / "driver" if (folder / "driver").exists() else compile_driver(folder, processor)


@pytest.fixture(scope="module")
def run_arm(tmp_path_factory):
    """A function that runs the driver of a processor, and returns its lines."""
    if missing := [name for name in (CROSS_COMPILER, EMULATOR) if not shutil.which(name)]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def run(processor, *arguments):
        command = [EMULATOR, "-cpu", "max", driver_of(processor, shared), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.fixture(scope="module")
def x86_digests(kernel_builds, tmp_path_factory):
    """The driver with the kernels that other tests have compiled too."""
    kernels, driver = kernel_builds("avx2")._name, tmp_path_factory.mktemp("x86") / "driver"
    subprocess.run(["g++", *STRICT_FLAGS, "-O1", DRIVER, kernels, "-o", driver], check=True)
    return subprocess.run([driver, "digests"], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    "processor", [MATRICES, *(pytest.param(name, marks=pytest.mark.deep) for name in ("armv8-a", "armv8.2-a+dotprod"))]
)
def test_arm_gives_the_bits_of_x86_and_a_row_depends_on_no_other_row(run_arm, x86_digests, processor):
    """Except for layers in bfloat16 on matrix instructions, which have a test of their own."""
    found = run_arm(processor, "digests")
    assert found[0] == f"arithmetic {PROCESSORS[processor]}"
    assert x86_digests[0] == "arithmetic fma avx2"
    skipped = "linear bfloat16" if "bfloat16-matrices" in found[0] else "nothing"
    pairs = zip(found[1:], x86_digests[1:], strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1] and not pair[0].startswith(skipped)] == []
    assert sum(line.startswith("linear int8") for line in found) == 9


def flushed(x):
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def add_to_odd(a, b):
    """a + b of float32, rounded to odd."""
    total = to_odd(a.astype(np.float64), b.astype(np.float64))
    truncated = total.astype(np.float32)
    is_beyond = np.abs(truncated.astype(np.float64)) > np.abs(total)
    truncated = np.where(is_beyond, np.nextafter(truncated, np.float32(0)), truncated)
    is_inexact = truncated.astype(np.float64) != total
    return flushed((truncated.view(np.uint32) | is_inexact).view(np.float32))


def matrix_linear(x, weight):
    """x [n, in] times weight [out, in], both of bfloat16 values, as linear_matrices.h specifies: float32 [n, out]."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    for i in range(0, x.shape[1], 2):
        even, odd = (flushed(x[:, i + k, None] * weight[None, :, i + k]) for k in range(2))  # exact
        sums = add_to_odd(sums, add_to_odd(even, odd))
    return sums


def bfloat16_numbers(rng, *shape):
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def to_bits(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def round_to_bits(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("n", [1, 2, 13])
def test_a_layer_on_matrix_instructions_has_the_bits_of_the_model(run_arm, tmp_path, n):
    """The second half of the inputs cancels the first one, so outputs are what roundings have left."""
    half, out_size = 305, 200
    rng = np.random.default_rng(n)
    x, weight = bfloat16_numbers(rng, n, half), bfloat16_numbers(rng, out_size, half)
    x[0, :8], weight[:, :8] = 2.0**-70, 2.0**-60  # products are denormals
    x, weight = np.hstack([x, x]), np.hstack([weight, -weight])
    (tmp_path / "x").write_bytes(to_bits(x).tobytes())
    (tmp_path / "w").write_bytes(to_bits(weight).tobytes())
    run_arm(MATRICES, "linear", BFLOAT16, n, 2 * half, out_size, *(tmp_path / name for name in "xwy"))
    found = np.frombuffer((tmp_path / "y").read_bytes(), np.uint16).reshape(n, out_size)
    assert np.count_nonzero(found) > found.size // 2
    assert np.array_equal(found, round_to_bits(matrix_linear(x, weight)))


def test_int8_products_are_exact(run_arm, tmp_path):
    """Rows that int8 holds exactly: their layer is a product of integers."""
    n, in_size, out_size = 7, 41, 33
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-127, 128, shape).astype(np.float32) for shape in ((n, in_size), (out_size, in_size)))
    x[:, 0], weight[:, 0] = 127, -127
    for name, values in (("x", x), ("w", weight)):
        (tmp_path / name).write_bytes(to_bits(values).tobytes())
    run_arm(MATRICES, "linear", INT8, n, in_size, out_size, *(tmp_path / name for name in "xwy"))
    found = np.frombuffer((tmp_path / "y").read_bytes(), np.uint16).reshape(n, out_size)
    assert np.array_equal(found, round_to_bits((x.astype(np.int64) @ weight.astype(np.int64).T).astype(np.float32)))
