"""min_p, top_k and top_p in one rank: the few ids that can pass are collected, the threshold is found among them.

The maxima of chunks of the vocabulary give a bound below which no id passes. For top_k it is the k-th largest maximum.
For top_p, an id that weighs less than total * (1 - top_p) / vocab_size does not matter; the maxima give a lower bound
of the total. One program per row then finds the threshold by bisection. A row with too many candidates reads its logits
instead, which takes longer. The specification is in `worker_svc/engine/sampling/noise.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.record import TEMPERATURE
from worker_svc.engine.gpu.kernels.sampler.threshold import (
    LOG_MIN_P,
    TOP_K,
    TOP_P,
    chunk_top_kernel,
    float_of,
    load_z,
    order_of,
    weight_of,
)

CHUNK = 1024
MOST = 4096  # candidates of a row
# With less left out, the rounding of the integer weights of a million ids would matter, so top_p gives no bound.
LEAST_LEFT_OUT = tl.constexpr(1e-6)
MOST_IDS = tl.constexpr(1_000_000)
MARGIN = tl.constexpr(1.0)  # the ids below the bound weigh at most 1/e of what may be left out


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers for S rows. `lowest` [S] float32 is the result."""

    lowest: torch.Tensor
    top: torch.Tensor  # float32 [S, chunks]: maximum of z per chunk
    bound: torch.Tensor  # float32 [S]: no smaller z passes
    count: torch.Tensor  # int32 [S]: candidates
    total: torch.Tensor  # int64 [S]: weight of all ids that min_p keeps, if top_p needs it
    z: torch.Tensor  # float32 [S, MOST]: the candidates in any order

    @classmethod
    def make(cls, num_rows: int, vocab_size: int, device: torch.device) -> Scratch:
        return cls(
            lowest=torch.zeros(num_rows, device=device),
            top=torch.zeros(num_rows, triton.cdiv(vocab_size, CHUNK), device=device),
            bound=torch.zeros(num_rows, device=device),
            count=torch.zeros(num_rows, dtype=torch.int32, device=device),
            total=torch.zeros(num_rows, dtype=torch.int64, device=device),
            z=torch.zeros(num_rows, MOST, device=device),
        )


@triton.jit
def _largest(z, is_in, k):
    """The k-th largest of at least k values."""
    order = order_of(z)
    found = tl.zeros([], tl.int64)
    for bit in range(32):
        tried = found | (tl.full([], 1, tl.int64) << (31 - bit))
        if tl.sum((is_in & (order >= tried)).to(tl.int32), 0) >= k:
            found = tried
    return float_of(found)


@triton.jit
def bound_kernel(
    state_ptr, state_stride, row_ptr, top_ptr, lowest_ptr, bound_ptr, count_ptr, total_ptr, chunks, vocab_size,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    lowest = -float("inf")
    bound = -float("inf")
    if row >= 0:
        state = state_ptr + row.to(tl.int64) * state_stride
        if tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True) >= 1e-5:
            chunk = tl.arange(0, CHUNKS)
            tops = tl.load(top_ptr + sample * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
            top = tl.max(tops, 0)
            lowest = top + tl.load(state + LOG_MIN_P).to(tl.float32, bitcast=True)
            bound = lowest
            k = tl.load(state + TOP_K)
            left_out = 1.0 - tl.load(state + TOP_P).to(tl.float32, bitcast=True)
            if (k > 0) & (k <= chunks):
                bound = tl.maximum(bound, _largest(tops, chunk < chunks, k))
            elif (k == 0) & (left_out >= LEAST_LEFT_OUT) & (vocab_size <= MOST_IDS):
                least_total = tl.sum(tl.exp(tops - top), 0)
                bound = tl.maximum(bound, top + tl.log(left_out * least_total / vocab_size) - MARGIN)
            tl.store(top_ptr + sample * chunks, top)
    tl.store(lowest_ptr + sample, lowest)
    tl.store(bound_ptr + sample, bound)
    tl.store(count_ptr + sample, 0)
    tl.store(total_ptr + sample, tl.zeros([], tl.int64))


@triton.jit
def collect_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, top_ptr, lowest_ptr, bound_ptr, count_ptr,
    total_ptr, z_ptr, chunks, CHUNK: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature < 1e-5:
        return
    top = tl.load(top_ptr + sample * chunks)
    bound = tl.load(bound_ptr + sample)
    # Column 0 holds the maximum of the row.
    has_candidates = (chunk == 0) | (tl.load(top_ptr + sample * chunks + chunk) >= bound)
    needs_total = (tl.load(state + TOP_P).to(tl.float32, bitcast=True) < 1.0) & (tl.load(state + TOP_K) == 0)
    if has_candidates | needs_total:
        id = chunk * CHUNK + tl.arange(0, CHUNK)
        z = load_z(logits_ptr, stride, sample, vocab_size, id, temperature)
        if needs_total:
            is_kept = (id < vocab_size) & (z >= tl.load(lowest_ptr + sample))
            tl.atomic_add(total_ptr + sample, tl.sum(tl.where(is_kept, weight_of(z, top), 0), 0))
        is_found = (id < vocab_size) & (z >= bound)
        found = is_found.to(tl.int32)
        num_found = tl.sum(found, 0)
        if num_found > 0:
            place = tl.atomic_add(count_ptr + sample, num_found) + tl.cumsum(found, 0) - 1
            tl.store(z_ptr + sample.to(tl.int64) * MOST + place, z, mask=is_found & (place < MOST))


@triton.jit
def _search_candidates(z, is_in, lowest, bound, top, total, top_k, top_p):
    """The threshold among candidates that are all in registers."""
    if top_k > 0:
        is_in = is_in & (z >= lowest)
        count = tl.sum(is_in.to(tl.int32), 0)
        if (top_k < count) | ((top_k == count) & (bound > lowest)):  # there may be more ids below the bound
            lowest = _largest(z, is_in, top_k)
    if top_p < 1.0:
        is_in = is_in & (z >= lowest)
        weight = tl.where(is_in, weight_of(z, top), 0)
        if top_k > 0:
            total = tl.sum(weight, 0)
        need = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        found = tl.zeros([], tl.int64)
        for bit in range(32):
            tried = found | (tl.full([], 1, tl.int64) << (31 - bit))
            if tl.sum(tl.where(order_of(z) >= tried, weight, 0), 0) >= need:
                found = tried
        lowest = float_of(found)
    return lowest


@triton.jit
def _measure(
    logits_ptr, stride, vocab_size, sample, temperature, lowest, top, tried, IS_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The number, or the weight, of the ids of a row from `lowest` and `tried` on."""
    total = tl.zeros([], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        id = start + tl.arange(0, BLOCK)
        z = load_z(logits_ptr, stride, sample, vocab_size, id, temperature)
        is_in = (id < vocab_size) & (z >= lowest) & (order_of(z) >= tried)
        if IS_COUNT:
            total += tl.sum(is_in.to(tl.int64), 0)
        else:
            total += tl.sum(tl.where(is_in, weight_of(z, top), 0), 0)
    return total


@triton.jit
def _search_logits(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, top_k, top_p, BLOCK: tl.constexpr):
    """The threshold of a row with too many candidates."""
    none = tl.zeros([], tl.int64)
    if top_k > 0:
        count = _measure(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, none, True, BLOCK)
        if top_k < count:
            found = none
            for bit in range(32):
                tried = found | (tl.full([], 1, tl.int64) << (31 - bit))
                count = _measure(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, tried, True, BLOCK)
                if count >= top_k:
                    found = tried
            lowest = float_of(found)
    if top_p < 1.0:
        total = _measure(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, none, False, BLOCK)
        need = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        found = none
        for bit in range(32):
            tried = found | (tl.full([], 1, tl.int64) << (31 - bit))
            if _measure(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, tried, False, BLOCK) >= need:
                found = tried
        lowest = float_of(found)
    return lowest


@triton.jit
def select_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, top_ptr, lowest_ptr, bound_ptr, count_ptr,
    total_ptr, z_ptr, chunks, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(state + TOP_K)
    top_p = tl.load(state + TOP_P).to(tl.float32, bitcast=True)
    if (temperature < 1e-5) | ((top_k <= 0) & (top_p >= 1.0)):
        return
    top, lowest = tl.load(top_ptr + sample * chunks), tl.load(lowest_ptr + sample)
    count = tl.load(count_ptr + sample)
    if count <= MOST:
        place = tl.arange(0, MOST)
        is_in = place < count
        z = tl.load(z_ptr + sample.to(tl.int64) * MOST + place, mask=is_in, other=-float("inf"))
        bound, total = tl.load(bound_ptr + sample), tl.load(total_ptr + sample)
        lowest = _search_candidates(z, is_in, lowest, bound, top, total, top_k, top_p)
    else:
        lowest = _search_logits(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, top_k, top_p, MOST)
    tl.store(lowest_ptr + sample, lowest)


def find_thresholds(logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The smallest z that each of the S rows keeps, float32 [S]. `rows` are records of `state`, -1 is padding."""
    num_samples, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    common = (state, state.stride(0), rows)
    source = (logits, logits.stride(0), vocab_size, *common)
    chunk_top_kernel[(num_samples, chunks)](*source, scratch.top, chunks, CHUNK=CHUNK, num_warps=4, **dependent())
    bound_kernel[(num_samples,)](
        *common, scratch.top, scratch.lowest, scratch.bound, scratch.count, scratch.total, chunks, vocab_size,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **dependent(),
    )  # fmt: skip
    collect_kernel[(num_samples, chunks)](
        *source, scratch.top, scratch.lowest, scratch.bound, scratch.count, scratch.total, scratch.z, chunks,
        CHUNK=CHUNK, MOST=MOST, num_warps=4, **dependent(),
    )  # fmt: skip
    select_kernel[(num_samples,)](
        *source, scratch.top, scratch.lowest, scratch.bound, scratch.count, scratch.total, scratch.z, chunks, MOST=MOST,
        num_warps=4, **dependent(),
    )  # fmt: skip
    return scratch.lowest
