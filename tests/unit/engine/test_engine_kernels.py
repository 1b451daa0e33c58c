"""Each compiled kernel against the same operation in plain torch."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from worker_svc.engine.backend import AttentionShape, ForwardBatch, HeadShape, KVLayout, Norm, QkvPart, RotaryTable
from worker_svc.engine.cpu.backend import CpuBackend, make_backend
from worker_svc.engine.decoder.pool.kv_cache import KVCachePool
from worker_svc.engine.decoder.rotary import QueryScaling, Rotary

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # largest difference allowed for values of magnitude 1


@pytest.fixture(scope="module")
def backends():
    kernels = make_backend("cpu", 2, "exact")
    assert isinstance(kernels, CpuBackend)
    return kernels, make_backend("reference", 1, "exact")


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def assert_close(found, expected, dtype):
    assert not torch.isnan(found).any()
    assert (found.float() - expected.float()).abs().max() <= DTYPES[dtype] * expected.float().abs().max().clamp_min(1)


def make_norm(randn, kind, dim, dtype):
    if kind is None:
        return None
    bias = randn(dim).to(dtype) if kind == "layer" else None
    return Norm(randn(dim).to(dtype), bias, 1e-6, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 33, 64, 160])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer", None])
def test_add_norm(backends, randn, dtype, dim, has_residual, kind):
    x, norm = randn(300, dim).to(dtype) + 1, make_norm(randn, kind, dim, dtype)
    residual = randn(300, dim).to(dtype) if has_residual else None
    results = []
    for backend in backends:
        kept, out = x.clone(), torch.empty_like(x)
        backend.add_norm(kept, residual, norm, out)
        results.append((kept, out))
        in_place = kept.clone()
        backend.add_norm(in_place, None, norm, in_place)
        assert torch.equal(in_place, out)
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], dtype)


def test_any_number_is_rounded_to_the_nearest_bfloat16(backends):
    """Sums of any two bfloat16 numbers, also where a result is a denormal, infinite or NaN."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randint(-(1 << 15), 1 << 15, (500, 64), generator=generator).short() for _ in range(2))
    x[:250], residual[:250] = x[:250] & ~0x7E00, residual[:250] & ~0x7E00  # small numbers
    x, residual = x.view(torch.bfloat16), residual.view(torch.bfloat16)
    expected = (x.float() + residual.float()).bfloat16()
    backends[0].add_norm(x, residual, Norm(torch.ones(64).bfloat16(), None, 1e-6), torch.empty_like(x))
    is_nan = expected.isnan()
    assert 0 < is_nan.sum() < is_nan.numel() // 10
    assert (expected.abs() < 2.0**-126).sum() > 1000
    assert torch.equal(x.isnan(), is_nan)
    assert torch.equal(x[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [7, 32])
def test_activation_and_soft_cap(backends, randn, dtype, dim):
    x = (randn(200, dim) * 9).to(dtype)
    x[0, 0], x[1, 0] = 300.0, -300.0
    kernels, reference = backends
    for apply in (
        lambda b, y: b.activation(y, "gelu_tanh"),
        lambda b, y: b.activation(y, "relu2"),
        lambda b, y: b.soft_cap(y, 5.0),
    ):
        found, expected = x.clone(), x.clone()
        apply(kernels, found)
        apply(reference, expected)
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [7, 32, 100])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation(backends, randn, dtype, dim, activation):
    gate_up = (randn(200, 2 * dim) * 5).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    outs = [torch.empty(200, dim, dtype=dtype) for _ in backends]
    for backend, out in zip(backends, outs, strict=True):
        backend.gated_activation(gate_up, out, activation)
    assert_close(outs[0], outs[1], dtype)


def is_paired(kernels, keys):
    dim, block = keys.shape[-2:]
    return kernels._kernels.quire_kv_is_paired(int(keys.dtype is torch.bfloat16), block, dim)


def kernel_layout(kernels, keys, values):
    """Keys [.., dim, block] and values [.., block, dim] in the layout of the kernels."""
    *lead, dim, block = keys.shape
    if not is_paired(kernels, keys):
        return keys, values
    keys = keys.reshape(*lead, dim // 2, 2, block).transpose(-1, -2).reshape(keys.shape)
    values = values.reshape(*lead, block // 2, 2, dim).transpose(-1, -2).reshape(values.shape)
    return keys, values


def plain_layout(kernels, keys, values):
    """The inverse of `kernel_layout`."""
    *lead, dim, block = keys.shape
    if not is_paired(kernels, keys):
        return keys, values
    keys = keys.reshape(*lead, dim // 2, block, 2).transpose(-1, -2).reshape(keys.shape)
    values = values.reshape(*lead, block // 2, dim, 2).transpose(-1, -2).reshape(values.shape)
    return keys, values


def mixed_batch(pool, shape, query_lens, context_lens, seed=0):
    """A batch over scattered blocks whose past tokens are in the pool already."""
    rng = np.random.default_rng(seed)
    size, ends = pool.block_size, np.add(query_lens, context_lens)
    tables = np.full((len(ends) + 2, max(-(-int(e) // size) for e in ends)), -1, np.int32)
    blocks = iter(rng.permutation(pool.num_blocks))
    rows = rng.permutation(len(tables))[: len(ends)].astype(np.int32)
    positions, slots = [], []
    for row, start, end in zip(rows, context_lens, ends, strict=True):
        count = -(-int(end) // size)
        tables[row, :count] = [next(blocks) for _ in range(count)]
        at = np.arange(start, end)
        positions.append(at)
        slots.append(tables[row, at // size].astype(np.int64) * size + at % size)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    flat = np.concatenate(positions).astype(np.int32)
    return ForwardBatch(
        token_ids=np.zeros(len(flat), np.int64),
        positions=flat,
        slots=np.concatenate(slots),
        rows=rows,
        query_starts=starts,
        context_lens=np.array(context_lens, np.int32),
        tables=tables,
        head_tokens=starts[1:].astype(np.int64) - 1,
    )


SHAPES = [HeadShape(4, 4, 32), HeadShape(8, 2, 64), HeadShape(6, 1, 128), HeadShape(6, 2, 24), HeadShape(2, 1, 256),
          HeadShape(3, 1, 10), HeadShape(80, 1, 16), HeadShape(4, 2, 15)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_q_heads}x{s.num_kv_heads}x{s.head_dim}")
@pytest.mark.parametrize("block_size", [2, 16, 64])
def test_attention_of_mixed_batches(backends, randn, dtype, shape, block_size):
    check_attention(backends, randn, dtype, AttentionShape.plain(shape), block_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [HeadShape(6, 2, 24), HeadShape(8, 2, 64)], ids=["24", "64"])
@pytest.mark.parametrize("more", [{"window": 40}, {"chunk": 24}, {"soft_cap": 3.0}, {}], ids=str)
def test_attention_with_sinks(backends, randn, dtype, shape, more):
    sinks = randn(shape.num_q_heads) * 4
    check_attention(backends, randn, dtype, replace(AttentionShape.plain(shape), sinks=sinks, **more), 16)


def check_attention(backends, randn, dtype, attention, block_size):
    shape = attention.heads
    query_lens, context_lens = [1, 37, 1, 5, 1, 140], [0, 0, 300, 127, 128, 33]
    pool = KVCachePool([KVLayout.of(shape)], 2048 // block_size, block_size, dtype)
    keys, values = pool.layer(0)
    keys.copy_(randn(*keys.shape) * 3)
    values.copy_(randn(*values.shape))
    batch = mixed_batch(pool, shape, query_lens, context_lens)
    q = randn(len(batch.positions), shape.num_q_heads, shape.head_dim).to(dtype)
    outs = [torch.empty_like(q) for _ in backends]
    kernels, reference = backends
    kernels.paged_attention(q, kernel_layout(kernels, keys, values), batch, outs[0], attention)
    reference.paged_attention(q, (keys, values), batch, outs[1], attention)
    assert_close(outs[0], outs[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms", "rms_offset", "wide", None])
@pytest.mark.parametrize("shape", [HeadShape(4, 2, 32), HeadShape(3, 1, 18)], ids=["32", "18"])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("unrotated", [0, 4, None], ids=["whole", "part", "none"])
def test_qk_norm_rope_store(backends, randn, dtype, norm, shape, block_size, unrotated):
    check_rope_store(backends, randn, dtype, norm, shape, block_size, unrotated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms", None])
@pytest.mark.parametrize("unrotated", [0, 4], ids=["whole", "part"])
@pytest.mark.parametrize(
    "style",
    [{"is_interleaved": True}, {"is_first": True}, {"is_interleaved": True, "is_first": True},
     {"q_scaling": QueryScaling(0.4, 16, 1)}],
    ids=["interleaved", "first", "both", "scaled"],
)  # fmt: skip
def test_styles_of_rotation(backends, randn, dtype, norm, unrotated, style):
    check_rope_store(backends, randn, dtype, norm, HeadShape(3, 1, 18), 8, unrotated, **style)


def check_rope_store(backends, randn, dtype, norm, shape, block_size, unrotated, **style):
    norms, widths = None, (shape.head_dim, shape.head_dim)
    if norm == "wide":  # over all heads
        norm, widths = "rms", (shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    if norm is not None:
        norms = make_norm(randn, norm, widths[0], dtype), make_norm(randn, norm, widths[1], dtype)
    table = None
    if unrotated is not None:
        dims = shape.head_dim - unrotated
        table = Rotary(1.0 / 1e4 ** (torch.arange(0, dims, 2).float() / dims), **style).table(256)
    results = []
    qkv = randn(120, (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim).to(dtype)
    for backend in backends:
        pool = KVCachePool([KVLayout.of(shape)], 512 // block_size, block_size, dtype)
        batch = mixed_batch(pool, shape, [1, 100, 19], [50, 0, 131])
        q = qkv.new_empty(120, shape.num_q_heads, shape.head_dim)
        backend.qk_norm_rope_store(qkv, QkvPart(shape, table, norms), batch, pool.layer(0), q)
        pools = tuple(pool.tensors)
        results.append((q, *(plain_layout(backend, *pools) if backend is backends[0] else pools)))
    assert_close(results[0][0], results[1][0], dtype)
    assert_close(results[0][1], results[1][1], dtype)
    assert torch.equal(results[0][2], results[1][2])


def test_callers_share_no_threads(randn):
    """Each calling thread has its own helper threads, which end with it. Here there are more helpers than cores."""
    kernels = make_backend("cpu", 5, "exact")
    layer = kernels.make_linear(randn(512, 256), None)
    x = randn(200, 256)
    expected = layer(x)
    assert torch.equal(layer(x), expected)  # torch has started its threads
    num_threads = len(os.listdir("/proc/self/task"))
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: [layer(x) for _ in range(50)], range(4)))
    assert all(torch.equal(found, expected) for result in results for found in result)
    deadline = time.monotonic() + 60  # a joined thread disappears a moment later
    while len(os.listdir("/proc/self/task")) > num_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= num_threads


def test_rotation_is_the_rotary_embedding():
    """One pair of dimensions turned by a known angle."""
    table = Rotary(torch.tensor([1.0])).table(4)
    assert isinstance(table, RotaryTable)
    assert torch.allclose(table.cos[3], torch.tensor([3.0]).cos())
    assert torch.allclose(table.sin[3], torch.tensor([3.0]).sin())


def test_store_and_attention_agree_on_the_layout(backends, randn):
    """Attention reads the value that was stored at a slot."""
    kernels, _ = backends
    shape = HeadShape(1, 1, 16)
    pool = KVCachePool([KVLayout.of(shape)], 8, 4, torch.float32)
    batch = mixed_batch(pool, shape, [9], [0])
    qkv = randn(9, 48)
    q, out = torch.empty(9, 1, 16), torch.empty(9, 1, 16)
    table = Rotary(torch.zeros(8)).table(16)
    kernels.qk_norm_rope_store(qkv, QkvPart(shape, table), batch, pool.layer(0), q)
    kernels.paged_attention(q, pool.layer(0), batch, out, AttentionShape(shape, 0.25))
    plain_q, k, v = qkv.split(16, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(plain_q[None], k[None], v[None], is_causal=True)[0]
    assert (out[:, 0] - expected).abs().max() < 1e-5
