"""Products with weights in 8 bits: the kernels against torch, the library's product, rows that depend on no others."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.builders import DEVICE, relative_error
from worker_svc.engine.backend import Norm
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.linears import int8_linear, scaled_linear
from worker_svc.engine.gpu.kernels.linears.scaled_linear import (
    Fp8Weight,
    quantize_rows,
    quantized,
    reference,
    reference_rows,
)
from worker_svc.engine.gpu.kernels.norm import WIDEST, add_norm, add_norm_rows, can_round
from worker_svc.engine.gpu.layers.linears import DeviceLinears, library_product, library_serves
from worker_svc.engine.kernels.torch_linear import Int8Linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EXACT = DeviceLinears("exact", torch.float32)
SIZES = {"one group": (200, 72, 200), "groups": (160, 40, 32), "a short group": (200, 130, 64)}


def random(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weight_of(outputs, inputs, group):
    rows = reference_rows(random(outputs, inputs, seed=1), group)
    return Fp8Weight(rows.steps, rows.scales.T.contiguous(), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_rows_are_rounded_as_in_torch(monkeypatch, name, dtype):
    monkeypatch.setattr(scaled_linear, "WIDEST", 128)
    inputs, _, group = SIZES[name]
    x = random(5, inputs, dtype=dtype)
    x[1] = 0
    x[2, :group] = 0
    x[3] *= 1e4
    found, expected = quantize_rows(x, group), reference_rows(x, group)
    assert torch.equal(found.steps.float(), expected.steps.float())
    assert torch.equal(found.scales, expected.scales)
    assert not found.steps[1].float().any()


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer", None])
@pytest.mark.parametrize("group", [72, 32])
def test_a_norm_that_rounds_gives_the_same_rows(kind, group):
    """72 inputs are one group or three, of which the last is short."""
    dim = 72
    norm = (
        None
        if kind is None
        else Norm(random(dim, seed=3), random(dim, seed=4) if kind == "layer" else None, 1e-6, kind)
    )
    for residual in (None, random(5, dim, seed=1)):
        x = random(5, dim)
        x[2, 3] = torch.nan
        plain, normed = x.clone(), torch.empty_like(x)
        add_norm(plain, residual, norm, normed)
        expected = quantize_rows(normed, group)
        assert can_round(dim, group)
        found = add_norm_rows(x, residual, norm, group)
        assert torch.equal(x[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])
        assert torch.equal(found.scales.isnan(), expected.scales.isnan())
        has_nan = found.scales[2].isnan()
        assert has_nan[0] if kind is None else has_nan.all()  # a norm carries NaN into all groups of a row
        rows = [0, 1, 3, 4]
        assert torch.equal(found.steps.float()[rows], expected.steps.float()[rows])
        assert torch.equal(found.scales[rows], expected.scales[rows])
    assert not can_round(dim, 24)
    assert not can_round(2 * WIDEST, 128)


def test_a_row_with_nan_has_no_result_and_others_have_theirs():
    x = random(3, 64)
    layer = EXACT.make_fp8_linear(weight_of(40, 64, 64), None)
    expected = layer(x)
    x[1, 5] = torch.nan
    found = layer(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_products_match_float64(name, is_exact):
    inputs, outputs, group = SIZES[name]
    weight, bias = weight_of(outputs, inputs, group), random(outputs, seed=2)
    rows = reference_rows(random(67, inputs), group)
    found = scaled_linear.scaled_linear(rows, weight, bias, torch.float32, is_exact=is_exact)
    assert relative_error(found, reference(rows, weight, bias)) < 1e-6


def test_rows_have_the_same_bits_alone_in_exact_mode():
    layer = EXACT.make_fp8_linear(weight_of(40, 160, 32), None)
    x = random(67, 160)
    whole = layer(x)
    for row in (0, 66):
        assert torch.equal(layer(x[row : row + 1]), whole[row : row + 1])


def test_one_scale_for_the_library_and_the_kernel():
    """A weight that is stored with one scale per output is multiplied by torch._scaled_mm, unless the mode is exact."""
    weight = quantized(random(48, 64, seed=1))
    bias, x = random(48, seed=2), random(7, 64)
    made = {mode: DeviceLinears(mode, torch.float32).make_fp8_linear(weight, bias) for mode in ("exact", "best_effort")}
    assert made["best_effort"].product is library_product
    assert made["exact"].product is not library_product
    expected = reference(reference_rows(x, 64), weight, bias)
    for layer in made.values():
        assert relative_error(layer(x), expected) < 1e-6
        assert layer(x[:0]).shape == (0, 48)
        assert torch.equal(layer.widened(), weight.widened())
    odd = DeviceLinears("best_effort", torch.float32).make_fp8_linear(weight_of(40, 72, 72), None)
    assert odd.product is not library_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 67])
def test_int8_layers_give_the_bits_of_the_cpu(monkeypatch, dtype, num_rows):
    """Few and many rows, rows that are read in two parts, without size, or with numbers that are not finite."""
    monkeypatch.setattr(int8_linear, "WIDEST", 128)
    x, weight, bias = random(num_rows, 200, dtype=dtype), random(130, 200, seed=1, dtype=dtype), random(130, seed=2)
    if num_rows > 1:
        x[1] = 0
        x[2] *= 1e4
        x[3, 150], x[4, 0] = torch.nan, torch.inf
    expected = Int8Linear(weight.cpu(), bias.cpu())(x.cpu()).to(DEVICE)
    finite = [row for row in range(num_rows) if row not in (3, 4)]
    for form in (forms.TRITON, forms.TORCH):
        with forms.using(form):
            found = EXACT.make_int8_linear(int8_linear.torch_int8_rows(weight), bias)(x)
        assert torch.equal(found[finite], expected[finite])
        assert found[3:5].isnan().all()


@pytest.mark.parametrize("fault", [RuntimeError("not implemented"), None])
def test_a_library_that_fails_or_is_wrong_is_not_used(monkeypatch, fault):
    def product(x, weight, **options):
        if fault is not None:
            raise fault
        return torch.zeros(len(x), weight.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", product)
    library_serves.cache_clear()
    try:
        assert not library_serves(torch.float32, DEVICE)
    finally:
        library_serves.cache_clear()
