"""Products with int4 weights: the kernels against torch, torch's own kernel, and rows that depend on no others."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.builders import DEVICE, relative_error
from tests.gpu.int4_library import weight_int4pack_mm
from worker_svc.engine.gpu.kernels.linears import int4_linear
from worker_svc.engine.gpu.kernels.linears.int4_linear import Int4Weight
from worker_svc.engine.gpu.layers import linears
from worker_svc.engine.gpu.layers.linears import DeviceLinears, library_int4_product, library_serves_int4


def random(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def make(outputs, inputs, group, dtype=torch.float32, order=None):
    """A weight, and the same in a float type."""
    generator = torch.Generator().manual_seed(outputs)
    groups = -(-inputs // group)
    steps = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, groups, generator=generator) + 0.1
    zeros = torch.randint(0, 16, (outputs, groups), generator=generator).float()
    numbers = int4_linear.scales_and_zeros(scales, zeros, dtype)
    spread = [part.repeat_interleave(group, 1)[:, :inputs] for part in (scales, zeros)]
    plain = (steps.float() - spread[1]) * spread[0]
    return Int4Weight(int4_linear.packed(steps).to(DEVICE), numbers.to(DEVICE), group, order), plain.to(DEVICE)


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(40, 256, 128), (72, 384, 32), (8, 384, 96), (64, 512, 256)])
def test_words_hold_the_weight(outputs, inputs, group):
    weight, plain = make(outputs, inputs, group)
    assert torch.allclose(int4_linear.reference(weight), plain, atol=1e-5)
    assert torch.allclose(int4_linear.widened(weight), plain, atol=1e-5)


def test_groups_that_torchs_kernel_lacks_become_shorter_ones():
    groups = {
        (group, inputs): int4_linear.unit_of(group, inputs) for group in (32, 96, 256, 512) for inputs in (384, 512)
    }
    assert groups == {
        (32, 384): 32, (32, 512): 32, (96, 384): 96, (96, 512): 96, (256, 384): 128, (256, 512): 256, (512, 384): 128,
        (512, 512): 128,
    }  # fmt: skip


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_match_torch(dtype, is_exact):
    weight, _ = make(72, 256, 64, dtype)
    expected = int4_linear.reference(weight).to(dtype).double()
    bias = random(72, seed=1, dtype=dtype)
    for count in (1, 67):
        x = random(count, 256, dtype=dtype)
        found = int4_linear.int4_linear(x, weight, bias, is_exact=is_exact)
        assert relative_error(found, x.double() @ expected.T + bias.double()) < (
            1e-6 if dtype is torch.float32 else 1e-3
        )
    assert int4_linear.int4_linear(x[:0], weight, bias, is_exact=is_exact).shape == (0, 72)


@pytest.mark.parametrize("determinism", ["exact", "best_effort"])
def test_many_rows_and_inputs_in_another_order(determinism):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight, plain = make(40, 256, 64, order=order)
    layer = DeviceLinears(determinism, torch.float32).make_int4_linear(weight, None)
    natural = torch.empty_like(plain)
    natural[:, order] = plain
    assert torch.allclose(layer.widened(), natural, atol=1e-5)
    x = random(linears.FEW_ROWS + 3, 256)
    for count in (2, len(x)):
        assert relative_error(layer(x[:count]), x[:count].double() @ natural.double().T) < 1e-6
    if determinism == "exact":
        assert torch.equal(layer(x[:1]), layer(x)[:1])


@pytest.fixture
def library(monkeypatch):
    """Replaces torch's kernel, and forgets whether it serves."""
    library_serves_int4.cache_clear()
    yield lambda product: monkeypatch.setattr(torch, "_weight_int4pack_mm", product)
    library_serves_int4.cache_clear()


def test_torchs_kernel_reads_the_same_words(library):
    library(weight_int4pack_mm)
    weight, _ = make(40, 256, 32, torch.bfloat16)
    x, bias = random(5, 256, dtype=torch.bfloat16), random(40, seed=1, dtype=torch.bfloat16)
    expected = x.double() @ int4_linear.reference(weight).double().T + bias.double()
    assert relative_error(library_int4_product(x, weight, bias), expected) < 8e-3
    assert library_int4_product(x[:0], weight, bias).shape == (0, 40)
    made = DeviceLinears("best_effort", torch.bfloat16).make_int4_linear(weight, bias)
    assert made.product is library_int4_product
    for mode, dtype in (("exact", torch.bfloat16), ("best_effort", torch.float16)):
        assert DeviceLinears(mode, dtype).make_int4_linear(weight, bias).product is not library_int4_product


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch's kernel for CPUs")
def test_scales_and_zeros_mean_what_torch_computes():
    """The kernel for CPUs has other words, but the same numbers."""
    weight, plain = make(48, 256, 64)
    steps = ((plain / weight.scales_and_zeros[:, :, 0].T.repeat_interleave(64, 1)).round()).int()
    low = steps.view(48, 4, 64).amin(2, keepdim=True)
    shifted = (steps.view(48, 4, 64) - low).clamp(0, 15).view(48, 256)
    zeros = -low[:, :, 0].float()
    numbers = int4_linear.scales_and_zeros(weight.scales_and_zeros[:, :, 0].T, zeros, torch.float32)
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(shifted, 8)
    x = random(5, 256)
    found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, words, 64, numbers)
    assert relative_error(found, x.double() @ plain.double().T) < 1e-5


@pytest.mark.parametrize("fault", [RuntimeError("not implemented"), None])
def test_a_library_that_fails_or_is_wrong_is_not_used(library, fault):
    def product(x, words, group, numbers):
        if fault is not None:
            raise fault
        return weight_int4pack_mm(x, words.flip(2).contiguous(), group, numbers)

    library(product)
    assert not library_serves_int4(DEVICE)
