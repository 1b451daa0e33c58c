"""Linear layers with weights in 4 bits: bits against a model in numpy or the converted weights, on each path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import make_model
from tests.unit.engine.quantized import FORMATS, awq, quantize_model
from tests.unit.engine.test_engine_models import load, prompts
from tests.unit.engine.tile_model import to_odd
from worker_svc.engine.checkpoint.quantized import fp4_rows
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels.four_bits import E2M1, INT4, FourBitRows, scale_bits, unit_of, units_of

SHAPES = [(70, 200, 128), (33, 104, 40), (5, 20, 20), (97, 320, 32), (40, 130, 64)]  # outputs, inputs, group
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 32, 33)
MOST_ROWS = 70
FIXED_BITS = 14


def random_rows(out_size, in_size, group, *, is_fp4=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = -(-in_size // group)
    codes = torch.randint(0, 16, (out_size, in_size), generator=generator, dtype=torch.uint8)
    if is_fp4:
        return FourBitRows(
            codes, torch.exp2(torch.randint(-12, 3, (out_size, groups), generator=generator)), None, group
        )
    scales = (torch.rand(out_size, groups, generator=generator) / 10 + 1e-3).half().float()
    zeros = torch.randint(0, 16, (out_size, groups), generator=generator, dtype=torch.uint8)
    scales[0] = 0
    return FourBitRows(codes, scales, zeros, group)


def inputs_of(in_size, dtype):
    x = torch.randn(MOST_ROWS, in_size, generator=torch.Generator().manual_seed(1))
    x[3, ::5] *= 1e4
    x[4], x[5] = 0, 1e-30
    return x.to(dtype)


def fixed_point(x, parts):
    """Integers [parts, n, unit] and the power of two [n] of a unit [n, unit]."""
    top = np.abs(x).max(1).view(np.uint32) >> 23
    exponent = np.maximum(top, 40).astype(np.int64) - 127
    rest, found = np.ldexp(x.astype(np.float64), (FIXED_BITS - 1 - exponent)[:, None]), []
    for _ in range(parts):
        found.append(np.rint(rest))
        rest = np.ldexp(rest - found[-1], FIXED_BITS)
    return np.array(found), np.ldexp(np.float32(1), exponent - FIXED_BITS * parts + 1).astype(np.float32)


def model_of(x, rows, *, has_fma):
    """float32 [n, out], as linear_4bit.h specifies it for vectors."""
    parts = 2 if x.dtype is torch.float32 else 1
    wide, unit, in_size = x.float().numpy(), unit_of(rows.group, x.shape[1]), x.shape[1]
    halves = 2 if rows.zeros is None else 1
    y = np.zeros((len(wide), len(rows.codes)), np.float32)
    for first in range(0, in_size, unit):
        group = first // rows.group
        codes = rows.codes[:, first : first + unit]
        steps = (
            torch.tensor(E2M1)[codes.int()] * 2 if rows.zeros is None else codes.float() - rows.zeros[:, group, None]
        )
        integers, powers = fixed_point(wide[:, first : first + unit], parts)
        sums = (integers @ steps.double().numpy().T).astype(np.int32).astype(np.float32)  # exact, then rounded once
        total = sums[0] if parts == 1 else sums[0] * np.float32(1 << FIXED_BITS) + sums[1]
        scales = powers[:, None] * (rows.scales[:, group] / halves).numpy()[None]
        products = total.astype(np.float64) * scales
        y = to_odd(products, y.astype(np.float64)).astype(np.float32) if has_fma else products.astype(np.float32) + y
    return torch.from_numpy(y)


def same_bits(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_fp4", [False, True], ids=["int4", "fp4"])
def test_a_layer_has_the_bits_of_its_model_with_any_rows_and_threads(kernel_build, is_fp4, dtype):
    backends = [make_backend("cpu", threads, "exact") for threads in (1, 2)]
    words = backends[0].arithmetic.split()
    for shape in SHAPES:
        rows, x = random_rows(*shape, is_fp4=is_fp4), inputs_of(shape[1], dtype)
        bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
        if "tiles" in words and dtype is torch.bfloat16:
            expected = backends[0].make_linear(rows.widened().bfloat16(), bias)(x)
        else:
            expected = (model_of(x, rows, has_fma="fma" in words) + bias.float()).to(dtype)
        for linear in (backend.make_four_bit_linear(rows, bias) for backend in backends):
            assert same_bits(linear(x), expected), shape
            for n in ROWS:
                first = 7 * n % (MOST_ROWS - n)
                assert same_bits(linear(x[first : first + n].contiguous()), expected[first : first + n]), (shape, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_at_least_as_near_as_those_of_converted_weights(kernel_build, dtype):
    rows, x = random_rows(64, 512, 128), torch.randn(9, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    backend = make_backend("cpu", 1, "exact")
    expected = x.double() @ rows.widened().double().T
    found, converted = (
        backend.make_four_bit_linear(rows, None)(x),
        backend.make_linear(rows.widened().to(dtype), None)(x),
    )
    assert (found - expected).norm() <= max((converted - expected).norm(), 1e-6 * expected.norm())


def test_columns_in_another_order_belong_to_their_inputs():
    rows, x = random_rows(40, 96, 32), inputs_of(96, torch.float32)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    ordered = FourBitRows(rows.codes, rows.scales, rows.zeros, 32, order)
    backend = make_backend("cpu", 1, "exact")
    found = backend.make_four_bit_linear(ordered, None)(x)
    assert same_bits(found, backend.make_four_bit_linear(rows, None)(x[:, order].contiguous()))
    assert torch.equal(ordered.widened()[:, order], rows.widened())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_affects_no_other_row(kernel_build, value):
    rows, x = random_rows(40, 120, 40), inputs_of(120, torch.bfloat16)
    linear = make_backend("cpu", 1, "exact").make_four_bit_linear(rows, None)
    expected = linear(x)
    x[3, 99] = value
    found = linear(x)
    assert not torch.isfinite(found[3, 1:]).any()
    assert same_bits(found[4:], expected[4:])


def test_blocks_of_mxfp4():
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.full((2, 8), 127, dtype=torch.uint8)
    scales[0, 1], scales[1, 2], blocks[1, 2] = 120, 0, 0x80
    rows = fp4_rows(blocks, scales)
    values = torch.tensor(E2M1)
    expected = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1).flatten(2)
    assert torch.equal(rows.widened(), (expected * torch.exp2(scales.float() - 127)[..., None]).flatten(1))
    assert rows.group == 32
    x = inputs_of(256, torch.float32)
    found = make_backend("cpu", 1, "exact").make_four_bit_linear(rows, None)(x)
    torch.testing.assert_close(found.double(), x.double() @ rows.widened().double().T, rtol=1e-5, atol=1e-4)


def test_scales_in_16_bits():
    every = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()  # positive float16, denormals too
    bits = scale_bits(every).int() & 0xFFFF
    assert torch.equal((1 + (bits & 1023) / 1024) * torch.exp2((bits >> 10) - 48.0), every)
    for value in (0.1, 2.0**-49, 2.0**16, -1.0, 0.0):
        assert scale_bits(torch.tensor([1.0, value])) is None


def test_weights_that_the_kernels_do_not_compute_are_left_to_a_conversion():
    assert units_of(random_rows(8, 52, 26)) is None
    rows = random_rows(8, 64, 32)
    assert units_of(FourBitRows(rows.codes, rows.scales + 1e-7, rows.zeros, 32)) is None
    assert make_backend("cpu", 1, "exact", "int8").make_four_bit_linear(rows, None) is None
    assert [unit_of(group, 512) for group in (32, 48, 64, 96, 128, 200, 256, 512, 26)] == [
        32, 48, 64, 96, 128, 40, 128, 128, None,
    ]  # fmt: skip


def test_a_checkpoint_keeps_its_4_bits(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3_moe", intermediate_size=96)
    plain = load(quantize_model(folder, awq(32)))
    runner = load(folder)
    parts = runner._model.parts
    layer = parts.layers[0]
    assert layer.qkv.kind == layer.o.kind == INT4
    assert {linear.kind for linear in layer.feed_forward.experts.gate_up} == {INT4}
    assert runner._model._fused is not None
    assert runner.info.numerics == plain.info.numerics + ", int4 weights"
    assert load(folder, quantize="int8").info.numerics == plain.info.numerics


def test_a_row_gives_the_same_bits_alone_in_chunks_and_among_others(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3_moe")
    quantize_model(folder, FORMATS["gptq-int4-act-order"])
    for dtype in ("float32", "bfloat16"):
        runner, found = load(folder, dtype=dtype), []
        for chunk, mates in ((45, 0), (7, 0), (45, 5)):
            runner.reset_rows()
            driver = Driver(runner)
            for row, prompt in enumerate(prompts([45, *range(20, 20 + mates)])):
                driver.open(row, prompt)
                driver.prefill(row, chunk)
            driver.decode(list(range(1 + mates)), 4)
            found.append({position: row for (key, position), row in driver.logits.items() if key == 0})
        assert all(torch.equal(one[at], found[0][at]) for one in found[1:] for at in found[0])
