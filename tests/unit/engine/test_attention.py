"""The attention of a token is the same bits for any chunks, other rows, threads and block size, on every processor."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.unit.engine.test_engine_kernels import kernel_layout
from worker_svc.engine.backend import AttentionShape, ForwardBatch, HeadShape, PositionBias
from worker_svc.engine.cpu import backend as cpu_backend
from worker_svc.engine.cpu.backend import make_backend
from worker_svc.engine.kernels.build import load_kernels_built_with, native_flags
from worker_svc.engine.kernels.machine import instruction_sets


def shape_of(num_q_heads, num_kv_heads, head_dim, soft_cap=None, window=None):
    return AttentionShape(HeadShape(num_q_heads, num_kv_heads, head_dim), head_dim**-0.5, soft_cap, window)


SHAPES = {
    "4x2": shape_of(4, 2, 32),
    "3x1": shape_of(3, 1, 40),
    "2x1": shape_of(2, 1, 96),
    "window": shape_of(4, 2, 32, window=90),
    "cap": shape_of(2, 1, 96, 1.5, 130),
}
LENGTH = 300
AMX = {"amx_tile", "amx_bf16", "amx_int8"}


class Sequence:
    """Queries, keys and values of all positions: [length, heads, dim]."""

    def __init__(self, shape, length, dtype, seed=0, scale=1.0):
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        heads = shape.heads
        self.q = torch.randn(length, heads.num_q_heads, heads.head_dim, generator=generator).to(dtype)
        self.k, self.v = (
            (torch.randn(length, heads.num_kv_heads, heads.head_dim, generator=generator) * scale).to(dtype)
            for _ in range(2)
        )


def attend(backend, shape, chunks, block_size=16, shared=()):
    """Outputs of each chunk (sequence, first position, end) in one call over scattered blocks. The first shared[i]
    tokens of sequence i are in the blocks of the first sequence. What no token has written is NaN, and so are blocks
    before the window of a chunk's first token: they may belong to other rows. Without `is_causal` of the shape, each
    token sees its whole sequence."""
    dtype, heads = chunks[0][0].q.dtype, shape.heads
    stored = [end if shape.is_causal else sequence.length for sequence, _, end in chunks]
    per_row = -(-max(stored) // block_size)
    order = np.random.default_rng(1).permutation(per_row * len(chunks)).astype(np.int32)
    tables = order.reshape(len(chunks), per_row)
    for table, num_tokens in zip(tables, shared, strict=False):
        table[: num_tokens // block_size] = tables[0, : num_tokens // block_size]
    keys = torch.full((len(order), heads.num_kv_heads, heads.head_dim, block_size), float("nan"), dtype=dtype)
    values = torch.full((len(order), heads.num_kv_heads, block_size, heads.head_dim), float("nan"), dtype=dtype)
    for table, (sequence, first, _), count in zip(tables, chunks, stored, strict=True):
        first_seen = max(0, first - shape.window + 1) if shape.window is not None and shape.is_causal else 0
        seen = np.arange(first_seen // block_size * block_size, count)
        blocks, offsets = torch.from_numpy(table[seen // block_size]).long(), torch.from_numpy(seen % block_size)
        keys[blocks, :, :, offsets] = sequence.k[seen]
        values[blocks, :, offsets] = sequence.v[seen]
    starts = np.cumsum([0, *(end - first for _, first, end in chunks)]).astype(np.int32)
    context = np.array([first for _, first, _ in chunks], np.int32)
    unused = np.zeros(starts[-1], np.int64)
    rows = np.arange(len(chunks), dtype=np.int32)
    key_lens = None if shape.is_causal else np.array(stored, np.int32)
    positions = unused.astype(np.int32)
    batch = ForwardBatch(unused, positions, unused, rows, starts, context, tables, unused, key_lens=key_lens)
    q = torch.cat([sequence.q[first:end] for sequence, first, end in chunks])
    out = torch.empty_like(q)
    cache = kernel_layout(backend, keys, values) if backend.name == "cpu" else (keys, values)
    backend.paged_attention(q, cache, batch, out, shape)
    return list(out.split([end - first for _, first, end in chunks]))


def plain_attention(sequence, shape):
    """The same in float64."""
    group = shape.heads.num_q_heads // shape.heads.num_kv_heads
    q, k, v = (x.double().transpose(0, 1) for x in (sequence.q, sequence.k, sequence.v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    distance = torch.arange(sequence.length)[:, None] - torch.arange(sequence.length)
    if shape.bias is not None:
        scores = scores + shape.bias.values[:, shape.bias.zero - distance].double()
    is_seen = (distance >= 0) & (distance < (shape.window or sequence.length))
    if not shape.is_causal:
        is_seen = distance.abs() <= (shape.window or 2 * sequence.length) // 2
    return (scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_token_does_not_depend_on_its_batch(kernel_build, dtype, shape):
    backend, other_threads = make_backend("cpu", 1, "exact"), make_backend("cpu", 2, "exact")
    sequence = Sequence(shape, LENGTH, dtype)
    broken, huge = Sequence(shape, 150, dtype, 1, float("nan")), Sequence(shape, 40, dtype, 2, 1e30)
    (whole,) = attend(backend, shape, [(sequence, 0, LENGTH)])
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    assert (whole.double() - plain_attention(sequence, shape)).abs().max() < tolerance
    cuts = [0, 1, 7, 100, 128, 129, 255, 256, 290, LENGTH]
    chunks = [(sequence, *ends) for ends in pairwise(cuts)]
    for found, (_, first, end) in zip(attend(backend, shape, chunks), chunks, strict=True):
        assert torch.equal(found, whole[first:end]), (first, end)
    last = (sequence, LENGTH - 1, LENGTH)
    for block_size in (1, 8, 64):
        (found,) = attend(backend, shape, [last], block_size)
        assert torch.equal(found, whole[-1:]), block_size
    crowd = [(broken, 0, 150), (huge, 30, 40), last, (broken, 149, 150), (sequence, 200, 261), (huge, 0, 40)]
    found = attend(other_threads, shape, crowd)
    assert torch.equal(found[2], whole[-1:])
    assert torch.equal(found[4], whole[200:261])


@pytest.mark.parametrize("dim", [24, 80])
def test_a_token_of_a_full_attention_sees_its_whole_row(kernel_build, dtype, dim):
    check_full_attention("cpu", dtype, dim)


def test_the_reference_computes_full_attention(dtype):
    check_full_attention("reference", dtype, 24)


def check_full_attention(name, dtype, dim):
    shape = replace(shape_of(3, 3, dim), is_causal=False)
    backend, other_threads = make_backend(name, 1, "exact"), make_backend(name, 2, "exact")
    sequences = [Sequence(shape, length, dtype, length) for length in (150, 1, 64)]
    alone = [attend(backend, shape, [(sequence, 0, sequence.length)])[0] for sequence in sequences]
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    for sequence, whole in zip(sequences, alone, strict=True):
        assert (whole.double() - plain_attention(sequence, shape)).abs().max() < tolerance
    together = attend(other_threads, shape, [(sequence, 0, sequence.length) for sequence in sequences])
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))


def biased(shape, length):
    values = torch.randn(shape.heads.num_q_heads, 2 * length + 127, generator=torch.Generator().manual_seed(3))
    return replace(shape, bias=PositionBias(values, length))


@pytest.mark.parametrize("name", ["4x2", "3x1", "2x1", "window", "cap", "bias"])
def test_a_token_that_sees_its_whole_text_does_not_depend_on_the_batch(kernel_build, dtype, name):
    backend, other_threads = make_backend("cpu", 1, "exact"), make_backend("cpu", 2, "exact")
    shape = biased(SHAPES["4x2"], LENGTH) if name == "bias" else SHAPES[name]
    shape = replace(shape, is_causal=False)
    sequence, short = Sequence(shape, LENGTH, dtype), Sequence(shape, 7, dtype, 4)
    broken = Sequence(shape, 150, dtype, 1, float("nan"))
    (whole,) = attend(backend, shape, [(sequence, 0, LENGTH)])
    tolerance = 3e-5 if dtype is torch.float32 else 3e-2
    assert (whole.double() - plain_attention(sequence, shape)).abs().max() < tolerance
    crowd = [(broken, 0, 150), (short, 0, 7), (sequence, 0, LENGTH), (broken, 20, 21), (sequence, 100, 161)]
    found = attend(other_threads, shape, crowd)
    assert torch.equal(found[2], whole)
    assert torch.equal(found[4], whole[100:161])
    assert torch.equal(found[1], attend(backend, shape, [(short, 0, 7)])[0])


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("name", ["bias", "window"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_biases_and_windows_of_each_backend(backend, dtype, name, is_causal):
    shape = replace(biased(SHAPES["4x2"], 140) if name == "bias" else SHAPES[name], is_causal=is_causal)
    sequence = Sequence(shape, 140, dtype)
    (found,) = attend(make_backend(backend, 1, "exact"), shape, [(sequence, 0, 140)])
    difference = found.double() - plain_attention(sequence, shape)
    assert difference.abs().max() < (3e-5 if dtype is torch.float32 else 3e-2)


def test_rows_that_see_shared_keys_compute_as_if_alone(kernel_build, dtype):
    """Tokens of several rows over the same keys, as the beams of an encoder-decoder model."""
    shape = replace(shape_of(4, 2, 32), is_causal=False)
    backend, sequence = make_backend("cpu", 1, "exact"), Sequence(shape, LENGTH, dtype)
    (whole,) = attend(backend, shape, [(sequence, 0, LENGTH)])
    chunks = [(sequence, i, i + 1) for i in range(0, 90, 10)]
    found = attend(backend, shape, chunks, shared=[LENGTH // 16 * 16] * len(chunks))
    for output, (_, first, end) in zip(found, chunks, strict=True):
        assert torch.equal(output, whole[first:end])


@pytest.mark.parametrize(
    "shape", [shape_of(4, 2, 32), shape_of(6, 1, 16), SHAPES["window"]], ids=["4x2", "6x1", "window"]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_share_blocks_compute_as_if_alone(kernel_build, dtype, shape, threads):
    backend = make_backend("cpu", threads, "exact")
    first = Sequence(shape, LENGTH, dtype)
    shared = [0, 256, 128, 272, 0, 256, 144, 256, 16]
    ends = [LENGTH, 257, 256, 280, 258, 299, 129, 144, 150]
    chunks = []
    for seed, (num_shared, end) in enumerate(zip(shared, ends, strict=True)):
        sequence = Sequence(shape, end, dtype, seed)
        sequence.k[:num_shared], sequence.v[:num_shared] = first.k[:end][:num_shared], first.v[:end][:num_shared]
        chunks.append((sequence, end - (2 if seed == 5 else 1), end))
    alone = [attend(backend, shape, [chunk])[0] for chunk in chunks]
    order = [0, 4, 7, 2, 5, 1, 8, 3, 6]  # rows with a common prefix are not neighbours
    found = attend(backend, shape, [chunks[i] for i in order], shared=[shared[i] for i in order])
    for i, output in zip(order, found, strict=True):
        assert torch.equal(output, alone[i]), i


@pytest.mark.parametrize("shape", [shape_of(4, 2, 32), shape_of(6, 1, 16)], ids=["4x2", "6x1"])
def test_rows_that_share_blocks_may_have_different_numbers_of_tokens(kernel_build, dtype, shape):
    """The last tokens of prompts beside decoding rows. Sorted by their blocks, either may come first."""
    backend = make_backend("cpu", 1, "exact")
    most = 8 * shape.heads.num_kv_heads // shape.heads.num_q_heads  # more tokens share no keys with other rows
    first = Sequence(shape, LENGTH, dtype)
    chunks = []
    for seed in range(12):
        sequence = Sequence(shape, LENGTH, dtype, seed)
        sequence.k[:256], sequence.v[:256] = first.k[:256], first.v[:256]
        chunks.append((sequence, LENGTH - (1 if seed % 3 == 0 else most), LENGTH))
    alone = [attend(backend, shape, [chunk])[0] for chunk in chunks]
    for start in range(len(chunks)):
        order = [(start + i) % len(chunks) for i in range(len(chunks))]
        found = attend(backend, shape, [chunks[i] for i in order], shared=[256] * len(chunks))
        for i, output in zip(order, found, strict=True):
            assert torch.equal(output, alone[i]), (start, i)


@pytest.mark.parametrize("dim", [48, 96])
def test_tiles_in_software_give_the_bits_of_amx(kernel_builds, monkeypatch, dim):
    if missing := AMX - instruction_sets():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    shape = shape_of(4, 2, dim, window=90)
    sequence = Sequence(shape, 200, torch.bfloat16, scale=2.0)
    results = []
    for kernels in (kernel_builds("native"), load_kernels_built_with(*native_flags(), "-O1", "-DQUIRE_EMULATED_TILES")):
        monkeypatch.setattr(cpu_backend, "load_kernels", lambda kernels=kernels: kernels)
        results.append(attend(make_backend("cpu", 1, "exact"), shape, [(sequence, 0, 200)])[0])
    assert torch.equal(*results)
