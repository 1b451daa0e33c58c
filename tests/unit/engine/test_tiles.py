"""Products of tiles, by AMX and in software, against a model in numpy."""

from __future__ import annotations

import errno
import logging

import numpy as np
import pytest

from tests.unit.engine.tile_model import bfloat16_product
from worker_svc.engine.cpu_backend import declare
from worker_svc.engine.kernels import build
from worker_svc.engine.kernels.build import load_kernels, load_kernels_built_with
from worker_svc.engine.machine import instruction_sets

SEEDS = range(40)


@pytest.fixture(scope="module", params=["native", "emulated"])
def product(request):
    """A function that adds a product of two tiles to sums, with the instructions or in software."""
    if request.param == "native":
        if missing := {"amx_tile", "amx_bf16", "amx_int8"} - instruction_sets():
            pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
        kernels = declare(load_kernels())
    else:
        kernels = declare(load_kernels_built_with("-O1", "-DQUIRE_EMULATED_TILES"))

    def multiply(rows, weights, sums):
        out = sums.copy()
        is_int8 = rows.dtype == np.int8
        if not kernels.quire_tile_product(is_int8, rows.ctypes.data, weights.ctypes.data, out.ctypes.data):
            pytest.skip("this compiler or system has no AMX")
        return out

    return multiply


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


class Library:
    def __init__(self, error):
        self.quire_permit_tiles = lambda: error


def test_kernels_without_tiles_serve_where_amx_is_refused(monkeypatch, caplog):
    loaded = []

    def load(*flags):
        loaded.append(flags)
        return Library(0 if build.NO_TILES in flags else errno.EPERM)

    monkeypatch.setattr(build, "_load_fastest", load)
    with caplog.at_level(logging.WARNING):
        assert build.load_kernels().quire_permit_tiles() == 0
    assert loaded == [(), (build.NO_TILES,)]
    assert "AMX is not used: the system does not permit it to this process (Operation not permitted)" in caplog.text


@pytest.mark.parametrize(("value", "flags"), [("1", (build.NO_TILES,)), ("0", ()), ("", ())])
def test_a_variable_disables_amx(monkeypatch, value, flags):
    loaded = []
    monkeypatch.setenv("QUIRE_DISABLE_AMX", value)
    monkeypatch.setattr(build, "_load_fastest", lambda *flags: loaded.append(flags) or Library(0))
    build.load_kernels()
    assert loaded == [flags]
