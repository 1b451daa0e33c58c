"""Products of tiles and the linear layers on them, by AMX and in software, against a model in numpy."""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.unit.engine.tile_model import bfloat16_linear, bfloat16_product
from worker_svc.engine.kernels import build
from worker_svc.engine.kernels.linear import BFLOAT16, INT8, KernelLinear
from worker_svc.engine.kernels.paths import NO_MATRICES, NO_TILES

SEEDS = range(20)
ROWS = (*range(1, 70), 95, 96, 97, 127, 128, 129, 255, 256, 257, 272, 300, 500, 513)
FEW_ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 65, 257, 513)  # in software, and for large outputs


@pytest.fixture(scope="module", params=["native", "tiles"])
def kernels(request, kernel_builds):
    """Kernels with tiles: with the instructions, then in software."""
    library = kernel_builds(request.param)
    if "tiles" not in library.quire_arithmetic().decode().split():
        pytest.skip("this processor, compiler or system has no AMX")
    return library


@pytest.fixture
def product(kernels):
    """A function that adds a product of two tiles to sums."""

    def multiply(rows, weights, sums):
        out = sums.copy()
        is_int8 = rows.dtype == np.int8
        assert kernels.quire_tile_product(is_int8, rows.ctypes.data, weights.ctypes.data, out.ctypes.data)
        return out

    return multiply


@pytest.fixture
def make_linear(kernels):
    """A function that makes a layer with these kernels."""

    def make(weight, bias=None, kind=BFLOAT16, threads=1):
        return KernelLinear(kernels, kind, weight, bias, threads)

    return make


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits_of(kind, rng, *shape):
    """bfloat16 numbers as bits: like activations, around the smallest normal number, or any bits."""
    bits = rng.integers(0, 1 << 16, shape, np.uint16)
    if kind == "any":
        return bits
    first, count = {"ordinary": (120, 12), "wide": (90, 70), "small": (56, 16)}[kind]
    return (bits & 0x807F) | (rng.integers(first, first + count, shape, np.uint16) << 7)


def same_bits(found, expected):
    return (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))


@pytest.mark.parametrize("kind", ["ordinary", "wide", "small", "any"])
def test_a_bfloat16_product_has_the_bits_of_the_model(product, kind):
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        rows, weights = bits_of(kind, rng, 16, 32), bits_of(kind, rng, 16, 16, 2)
        sums = (bits_of(kind, rng, 16, 16).astype(np.uint32) << 16 | seed).view(np.float32)
        if kind == "small":
            sums = (sums.view(np.uint32) & 0x83FFFFFF).view(np.float32)
        assert same_bits(product(rows, weights, sums), bfloat16_product(rows, weights, sums)).all(), seed


def test_a_row_of_a_product_depends_on_no_other_row(product):
    rng = np.random.default_rng(0)
    rows, weights = bits_of("ordinary", rng, 16, 32), bits_of("ordinary", rng, 16, 16, 2)
    sums = rng.standard_normal((16, 16)).astype(np.float32)
    expected = product(rows, weights, sums)
    for value in (0x7FC0, 0x7F80, 0x7149):  # NaN, infinity, 1e30
        rows[3] = value
        assert np.array_equal(np.delete(product(rows, weights, sums), 3, 0), np.delete(expected, 3, 0))


def test_int8_products_are_exact(product):
    rng = np.random.default_rng(0)
    rows, weights = rng.integers(-128, 128, (16, 64), np.int8), rng.integers(0, 256, (16, 16, 4), np.uint8)
    sums = rng.integers(-(2**30), 2**30, (16, 16), np.int32)
    expected = sums + rows.astype(np.int32) @ weights.transpose(0, 2, 1).reshape(64, 16).astype(np.int32)
    assert np.array_equal(product(rows, weights, sums), expected)


def same_rows(found, expected):
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("out_size", "in_size"), [(96, 40), (57, 33), (33, 300), (40, 1)])
def test_a_layer_has_the_bits_of_the_model(make_linear, out_size, in_size):
    weight, bias, x = randn(out_size, in_size), randn(out_size, seed=1), randn(53, in_size, seed=2)
    x[7] *= 1e-38  # denormals
    x[9], bias[: out_size // 2] = 0, 1e-39  # an output that is a denormal
    for added in (None, bias):
        expected = torch.from_numpy(bfloat16_linear(*(t.float().numpy() for t in (x, weight))))
        expected = (expected if added is None else expected + added.float()).bfloat16()
        assert same_rows(make_linear(weight, added)(x), expected)


@pytest.mark.parametrize("kind", [BFLOAT16, INT8])
@pytest.mark.parametrize(("out_size", "in_size"), [(70, 96), (33, 290), (2048, 40)])
def test_a_row_depends_on_no_other_row(request, make_linear, out_size, in_size, kind):
    """Neither on their number and values, nor on its position and on threads."""
    is_native = "native" in request.node.callspec.id
    if out_size == 2048 and not is_native:
        pytest.skip("outputs larger than a cache take too long in software")
    weight, bias, x = randn(out_size, in_size), randn(out_size, seed=1), randn(613, in_size, seed=2)
    x[333] *= 1e30
    x[334] = float("nan")
    linears = [make_linear(weight, bias, kind, threads) for threads in (1, 2)]
    whole = linears[0](x)
    assert not torch.isnan(whole[:334]).any()
    assert torch.isnan(whole[334]).all()
    for n in ROWS if is_native and out_size < 2048 else FEW_ROWS:
        for start in (0, 1, 100) if n < 257 else (100,):
            for linear in linears:
                found = linear(x[start : start + n].contiguous())
                assert same_rows(found, whole[start : start + n]), (n, start)


@pytest.mark.parametrize("kind", [BFLOAT16, INT8])
def test_threads_and_signals_change_no_bits(make_linear, kind):
    """Signals arrive while tiles are in use, on the stack of the thread and on an alternate one."""
    linear = make_linear(randn(256, 96), None, kind, 2)
    inputs = [randn(70 + i, 96, seed=i) for i in range(4)]
    expected = [linear(x) for x in inputs]
    num_signals = 0

    def count(*_):
        nonlocal num_signals
        num_signals += 1

    previous = signal.signal(signal.SIGALRM, count)
    with open(os.devnull, "w") as devnull, ThreadPoolExecutor(3) as pool:
        faulthandler.register(signal.SIGUSR1, file=devnull)
        signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
        try:
            jobs = [pool.submit(lambda x=x: [linear(x) for _ in range(20)]) for x in inputs[1:]]
            own = []
            while not all(job.done() for job in jobs) or num_signals < 20:
                own.append(linear(inputs[0]))
                os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
            faulthandler.unregister(signal.SIGUSR1)
    for results, y in zip([own, *(job.result() for job in jobs)], expected, strict=True):
        assert all(same_rows(result, y) for result in results)


def test_a_process_that_is_refused_amx_serves_without_it(kernel_builds):
    """The system refuses tiles to a process with an alternate signal stack that is too small for them."""
    if "tiles" not in kernel_builds("native").quire_arithmetic().decode().split():
        pytest.skip("this processor, compiler or system has no AMX")
    code = """
import ctypes, logging
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
from worker_svc.engine.cpu.backend import CpuBackend
logging.basicConfig()
print(CpuBackend(1).arithmetic)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bfloat16-pairs" in done.stdout
    assert "tiles" not in done.stdout
    assert "AMX is not used: the system does not permit it to this process (No space left on device)" in done.stderr


class Library:
    def __init__(self, error, is_as_specified=1):
        self.quire_permit_tiles = lambda: error
        self.quire_verify_matrices = lambda: is_as_specified


def test_kernels_without_tiles_serve_where_amx_is_refused(monkeypatch, caplog):
    loaded = []

    def load(*flags):
        loaded.append(flags)
        return Library(0 if NO_TILES in flags else errno.EPERM)

    monkeypatch.setattr(build, "_load_fastest", load)
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels().quire_permit_tiles() == 0
    assert loaded == [(), (NO_TILES,)]
    assert "AMX is not used: the system does not permit it to this process (Operation not permitted)" in caplog.text


def test_kernels_without_matrices_serve_where_the_processor_rounds_otherwise(monkeypatch, caplog):
    monkeypatch.setattr(build, "_load_fastest", lambda *flags: Library(0, int(NO_MATRICES in flags)))
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels().quire_verify_matrices() == 1
    assert "BFMMLA is not used: this processor rounds it in another way than Arm specifies" in caplog.text


@pytest.mark.parametrize(("value", "flags"), [("1", (NO_TILES,)), ("0", ()), ("", ())])
def test_a_variable_disables_amx(monkeypatch, value, flags):
    loaded = []
    monkeypatch.setenv("QUIRE_DISABLE_AMX", value)
    monkeypatch.setattr(build, "_load_fastest", lambda *flags: loaded.append(flags) or Library(0))
    build.load_kernels()
    assert loaded == [flags]
