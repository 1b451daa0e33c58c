"""The kernels around attention against their references, and planted faults that must be found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from bench.gpu.checks.references import prepared
from tests.gpu.builders import DEVICE, DTYPES, TOLERANCE, ints, relative_error
from worker_svc.engine.backend import HeadShape, Norm, QkvPart, RotaryTable
from worker_svc.engine.cpu.torch_ops import split_heads
from worker_svc.engine.gpu.kernels import activation, fp8, norm, prepare, record, rope_store
from worker_svc.engine.gpu.kernels.linears import linear

EPS = 1e-6


def randn(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (9, 100), (3, 1024)])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kind", [*norm.KINDS, None])
def test_norms(rows, dim, dtype, adds, kind):
    x, residual = randn(rows, dim, dtype=dtype) + 0.5, randn(rows, dim, dtype=dtype, seed=1)
    bias = randn(dim, dtype=dtype, seed=3) if kind == "layer" else None
    chosen = None if kind is None else Norm(randn(dim, dtype=dtype, seed=2), bias, EPS, kind)
    total, expected = norm.reference(x, residual if adds else None, chosen)
    out = torch.full_like(x, float("nan"))
    norm.add_norm(x, residual if adds else None, chosen, out)
    assert torch.equal(x, total)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    norm.add_norm(x, None, chosen, x)  # in place
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activation.GATED)
def test_gated_activation(name, dtype):
    gate_up = randn(5, 2 * 1100, dtype=dtype)
    if name == "clamped_swiglu":
        gate_up *= 4  # beyond the limits
    out = torch.full((5, 1100), float("nan"), dtype=dtype, device=DEVICE)
    activation.gated_activation(gate_up, out, name)
    assert relative_error(out, activation.reference(gate_up, name)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_activation_without_a_gate(name, dtype):
    x = randn(5, 1100, dtype=dtype)
    expected = activation.reference_activate(x, name)
    activation.activate(x, name)
    assert relative_error(x, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype):
    x = 20 * randn(3, 1100, dtype=dtype)
    expected = 7.5 * torch.tanh(x.double() / 7.5)
    activation.soft_cap(x, 7.5)
    assert relative_error(x, expected) < TOLERANCE[dtype]


def run_rope(shape, dtype, *, has_norms, is_wide=False, turned=None, kind="rms", **style):
    """Actual and expected q, k, v of seven tokens, one without a slot, and the pools with guard blocks."""
    dim, block_size, num_blocks = shape.head_dim, 4, 5
    qkv = randn(7, (shape.num_q_heads + 2 * shape.num_kv_heads) * dim, dtype=dtype)
    angles = torch.arange(50, device=DEVICE).float()[:, None] * 1e4 ** -(torch.arange(0, dim, 2, device=DEVICE) / dim)
    angles = angles[:, :turned].contiguous()
    rotary = RotaryTable(angles.cos(), angles.sin(), **style) if turned != 0 else None
    widths = (shape.num_q_heads * dim, shape.num_kv_heads * dim) if is_wide else (dim, dim)
    norms = None
    if has_norms:
        norms = tuple(Norm(randn(size, dtype=dtype, seed=1 + i), None, EPS, kind) for i, size in enumerate(widths))
    positions, slots = ints(0, 7, 49, 3, 8, 1, 30), ints(3, 19, 0, -1, 7, 8, 12)
    size = (block_size, shape.num_kv_heads, dim)
    guarded = [torch.full((num_blocks + 2, *size), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    pools = tuple(blocks[1:-1] for blocks in guarded)
    q = torch.full((7, shape.num_q_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    rope_store.rope_store(qkv, norms, rotary, positions, slots, pools, q, shape)
    expected = split_heads(qkv, QkvPart(shape, rotary, norms), positions)
    return q, guarded, slots + block_size, expected


def rope_error(q, guarded, slots, expected):
    """Infinite if a slot outside the batch was written; the pools have a guard block on each side."""
    flat = [pool.flatten(0, 1) for pool in guarded]
    stored = slots >= 4
    written = torch.zeros(len(flat[0]), dtype=torch.bool, device=DEVICE)
    written[slots[stored].long()] = True
    found = [q, *(pool[slots[stored].long()] for pool in flat)]
    wanted = [expected[0], expected[1][stored], expected[2][stored]]
    untouched = all(torch.isnan(pool[~written]).all() for pool in flat)
    return max(map(relative_error, found, wanted)) if untouched else float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [HeadShape(4, 2, 16), HeadShape(7, 1, 32), HeadShape(3, 3, 64), HeadShape(4, 2, 80)])
@pytest.mark.parametrize("has_norms", [True, False])
def test_rope_store(shape, dtype, has_norms):
    assert rope_error(*run_rope(shape, dtype, has_norms=has_norms)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [None, 6])
@pytest.mark.parametrize("has_norms", [True, False])
def test_rotation_of_neighbours_and_scaled_queries(has_norms, turned, dtype):
    style = {"is_interleaved": True, "q_scales": torch.linspace(1.0, 3.0, 50, device=DEVICE)}
    assert (
        rope_error(*run_rope(HeadShape(3, 2, 16), dtype, has_norms=has_norms, turned=turned, **style))
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "rms_offset"])
@pytest.mark.parametrize("shape", [HeadShape(4, 2, 16), HeadShape(7, 1, 32), HeadShape(3, 3, 80)])
def test_norms_of_all_heads_together(shape, kind, dtype):
    assert rope_error(*run_rope(shape, dtype, has_norms=True, is_wide=True, kind=kind)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [0, 3, 8, 19])
@pytest.mark.parametrize("kind", ["rms", "rms_offset"])
def test_rotation_of_a_part_of_each_head(turned, kind, dtype):
    """`turned` is half of the numbers that are rotated; 0: positions are learned."""
    run = run_rope(HeadShape(4, 2, 40), dtype, has_norms=True, turned=turned, kind=kind)
    assert rope_error(*run) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("turned_b = (b * cos + a * sin)", "turned_b = (b * cos - a * sin)"),
        ("cos_ptr + position * TURNED", "cos_ptr + tl.maximum(position - 1, 0) * TURNED"),
        ("slot * HKV + head - HQ) * D", "slot * HKV + head - HQ + 1) * D"),
        ("if slot >= 0:", "if slot >= -1:"),
        ("tl.store(values + left, first, mask=is_v)", "tl.store(values + left, turned_a, mask=is_v)"),
    ],
)
def test_rope_mutants_are_caught(plant_mutant, old, new):
    plant_mutant(rope_store, old, new)
    assert rope_error(*run_rope(HeadShape(4, 2, 16), torch.float32, has_norms=True)) > 1e-3


@triton.jit
def round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    id = tl.arange(0, BLOCK)
    tl.store(out_ptr + id, fp8.round_e4m3(tl.load(x_ptr + id)).to(out_ptr.dtype.element_ty))


def test_rounding_to_e4m3():
    """Every e4m3 value, the midpoints between neighbours, and values beyond the largest."""
    held = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (held[1:] + held[:-1]) / 2
    x = torch.cat((held, halfway, halfway.nextafter(halfway * 2), halfway.nextafter(halfway * 0)))
    x = torch.cat((x, -x, torch.tensor([500.0, 1e9, torch.inf, -torch.inf])))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x))).to(DEVICE)
    out = torch.empty(1024, dtype=torch.float8_e4m3fn, device=DEVICE)
    round_kernel[(1,)](x, out, BLOCK=1024)
    assert torch.equal(out.float(), fp8.reference(x, torch.ones(1, device=DEVICE)).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 48])
def test_rope_store_in_fp8(dim, dtype):
    shape, scales = HeadShape(4, 2, dim), torch.tensor([[0.25, 1.0], [4.0, 0.5]], device=DEVICE)
    qkv = randn(5, 8 * dim, dtype=dtype)
    angles = torch.arange(50, device=DEVICE).float()[:, None] * torch.linspace(1, 0.01, dim // 2, device=DEVICE)
    rotary, positions, slots = RotaryTable(angles.cos(), angles.sin()), ints(0, 7, 49, 3, 8), ints(3, 7, 0, -1, 5)
    pools = tuple(torch.zeros(2, 4, 2, dim, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.empty(5, 4, dim, dtype=dtype, device=DEVICE)
    rope_store.rope_store(qkv, None, rotary, positions, slots, pools, q, shape, scales)
    wanted = split_heads(qkv, QkvPart(shape, rotary), positions)
    assert relative_error(q, wanted[0]) < TOLERANCE[dtype]
    stored, places = slots >= 0, slots[slots >= 0].long()
    for pool, exact, scale in zip(pools, wanted[1:], scales, strict=True):
        found = fp8.reference_widened(pool.flatten(0, 1).view(torch.uint8)[places].view(pool.dtype), scale[:, None])
        expected = fp8.reference_widened(fp8.reference(exact[stored], scale[:, None]), scale[:, None])
        assert (found != expected).float().mean() < 0.05  # rotations differ in their last bit
        assert relative_error(found, exact[stored]) < 0.04
        assert pool.view(torch.uint8).flatten(0, 1)[[1, 2, 4, 6]].sum() == 0


def test_fp8_scales():
    sizes = torch.tensor([4.0, 1.0, 0.011, 3e4, 0.0])
    assert fp8.scale_for(sizes).tolist() == [1.0, 0.25, 2.0**-9, 2.0**13, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "in_size", "out_size"), [(1, 64, 128), (70, 100, 130)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(n, in_size, out_size, dtype, has_bias):
    x, weight = randn(n, in_size, dtype=dtype), randn(out_size, in_size, dtype=dtype, seed=1)
    bias = randn(out_size, dtype=dtype, seed=2) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert relative_error(linear.linear(x, weight, bias), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_linear_layer_are_independent(dtype):
    x, weight = randn(130, 96, dtype=dtype), randn(64, 96, dtype=dtype, seed=1)
    expected = linear.linear(x, weight, None)
    for start, end in [(0, 1), (77, 78), (3, 130), (60, 125)]:
        assert torch.equal(linear.linear(x[start:end].contiguous(), weight, None), expected[start:end])


def run_prepare(num_rows, block_size=4, padding=6):
    """A batch of `num_rows` rows, padded by `padding` tokens and two rows."""
    generator = torch.Generator().manual_seed(1)
    state = torch.randint(0, 99, (5, record.TABLE + 40), generator=generator).int().to(DEVICE)
    rows, starts, contexts = [4, 0, 2], [0, 1, 134, 137], [9, 3, 0]
    known = torch.randint(0, 99, (137 + padding,), generator=generator).int()
    known[[0, 133, 136]] = -1
    out = tuple(torch.full((137 + padding,), -7, dtype=torch.int32, device=DEVICE) for _ in range(3))
    prepare.prepare(
        state,
        ints(num_rows),
        ints(*rows, 3, 3),
        ints(*starts, 9, 9),
        ints(*contexts, 5, 5),
        known.to(DEVICE),
        out,
        block_size,
    )
    count = starts[num_rows]
    expected = prepared(state, rows[:num_rows], starts[: num_rows + 1], contexts[:num_rows], known.tolist(), 4)
    found = list(zip(*(column.tolist() for column in out), strict=True))
    return found, expected + [(0, 0, -1)] * (137 + padding - count)


@pytest.mark.parametrize("num_rows", [3, 2, 0])
@pytest.mark.parametrize("padding", [0, 6, 200])
def test_prepare(num_rows, padding):
    found, expected = run_prepare(num_rows, padding=padding)
    assert found == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("position = context + token - first", "position = context + token"),
        ("tl.where(known < 0,", "tl.where(known <= -2,"),
        ("block * PAGE + position % PAGE", "block * PAGE + token % PAGE"),
        ("position + delta, mask", "position, mask"),
        ("token * 0 - 1, mask=is_token)", "token * 0, mask=is_token)"),
        ("TABLE + position // PAGE", "TABLE + (position + 1) // PAGE"),
    ],
)
def test_prepare_mutants_are_caught(plant_mutant, old, new):
    plant_mutant(prepare, old, new)
    found, expected = run_prepare(3)
    assert found != expected


@pytest.mark.parametrize("count", [1, 256, 300])
def test_deltas(count):
    state = torch.arange(60 * 20, dtype=torch.int32, device=DEVICE).view(60, 20)
    index = torch.randperm(state.numel(), generator=torch.Generator().manual_seed(0))[:count].to(DEVICE)
    changes = torch.stack((index, index + 5000), 1).int().contiguous()
    expected = state.clone()
    record.torch_deltas(expected, changes)
    record.apply_deltas(state, changes)
    assert torch.equal(state, expected)
