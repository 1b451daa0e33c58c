"""min_p, top_k and top_p without sorting: one threshold on z = logits / temperature per row.

A radix search finds the threshold: z as an ordered integer, four bits per pass. Each pass counts ids (top_k) or sums
their integer weights (top_p) per chunk of the vocabulary; then one program per row chooses the digit. The specification
is in `worker_svc/engine/sampling/noise.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from request_fields.fields import SamplingParams
from worker_svc.engine.backend import SamplingColumns
from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.record import TEMPERATURE, WORDS
from worker_svc.engine.sampling.noise import GREEDY_BELOW, keep_threshold

TOP_K = tl.constexpr(WORDS["top_k"])
TOP_P = tl.constexpr(WORDS["top_p"])
LOG_MIN_P = tl.constexpr(WORDS["min_p"])
CHUNK = 4096
# First bit of the first of 8 digits. Kernels take the bit as an argument, so that all digits share one kernel.
TOP_SHIFT = tl.constexpr(28)
COUNT, WEIGH = 0, 1


def log_min_p(min_p: float) -> float:
    """The value that a record holds for min_p: its logarithm."""
    return float(np.log(np.float64(np.float32(min_p)))) if min_p > 0 else -np.inf


STORED_AS = {"min_p": log_min_p}  # parameters that the record holds in another form


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers of the search for S rows. `lowest` [S] float32 is its result."""

    lowest: torch.Tensor
    top: torch.Tensor  # float32 [S, chunks]: maximum of z per chunk; later of the row in column 0
    prefix: torch.Tensor  # int64 [S]: digits found so far
    need: torch.Tensor  # int64 [S]: count or weight still to be reached; 0: no search
    sums: torch.Tensor  # int64 [S, chunks, 16]

    @classmethod
    def make(cls, num_rows: int, vocab_size: int, device: torch.device) -> Scratch:
        chunks = triton.cdiv(vocab_size, CHUNK)
        return cls(
            lowest=torch.zeros(num_rows, device=device),
            top=torch.zeros(num_rows, chunks, device=device),
            prefix=torch.zeros(num_rows, dtype=torch.int64, device=device),
            need=torch.zeros(num_rows, dtype=torch.int64, device=device),
            sums=torch.zeros(num_rows, chunks, 16, dtype=torch.int64, device=device),
        )


@triton.jit
def load_z(logits_ptr, stride, sample, vocab_size, id, temperature):
    """z of these ids; -inf beyond the vocabulary."""
    logits = tl.load(logits_ptr + sample.to(tl.int64) * stride + id, mask=id < vocab_size, other=-float("inf"))
    return tl.div_rn(logits.to(tl.float32), temperature)


@triton.jit
def order_of(z):
    """An int64 with the same order as the float32."""
    bits = z.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return flipped.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def float_of(order):
    """The float32 of an ordered integer, the inverse of `order_of`."""
    flipped = order.to(tl.uint32).to(tl.int32, bitcast=True)
    bits = tl.where(flipped < 0, flipped ^ -2147483648, ~flipped)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(z, top):
    """The integer weights of top_p."""
    distance = tl.maximum(z.to(tl.float64) - top.to(tl.float64), -100.0)
    return tl.floor(tl.exp(distance) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def chunk_top_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, top_ptr, chunks,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    temperature = tl.load(state_ptr + row.to(tl.int64) * state_stride + TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature < 1e-5:
        return
    z = load_z(logits_ptr, stride, sample, vocab_size, chunk * CHUNK + tl.arange(0, CHUNK), temperature)
    tl.store(top_ptr + sample * chunks + chunk, tl.max(z, 0))


@triton.jit
def start_kernel(state_ptr, state_stride, row_ptr, top_ptr, lowest_ptr, chunks, CHUNKS: tl.constexpr):
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    lowest = -float("inf")
    if row >= 0:
        state = state_ptr + row.to(tl.int64) * state_stride
        if tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True) >= 1e-5:
            chunk = tl.arange(0, CHUNKS)
            top = tl.max(tl.load(top_ptr + sample * chunks + chunk, mask=chunk < chunks, other=-float("inf")), 0)
            tl.store(top_ptr + sample * chunks, top)
            lowest = top + tl.load(state + LOG_MIN_P).to(tl.float32, bitcast=True)
    tl.store(lowest_ptr + sample, lowest)


@triton.jit
def _is_searched(state, KIND: tl.constexpr):
    """Whether this row uses this filter."""
    if KIND == 0:
        is_on = tl.load(state + TOP_K) > 0
    else:
        is_on = tl.load(state + TOP_P).to(tl.float32, bitcast=True) < 1.0
    return is_on & (tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True) >= 1e-5)


@triton.jit(do_not_specialize=["shift"])
def digit_sums_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, top_ptr, lowest_ptr, prefix_ptr, sums_ptr, chunks,
    shift, KIND: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    if not _is_searched(state, KIND):
        return
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    z = load_z(logits_ptr, stride, sample, vocab_size, chunk * CHUNK + tl.arange(0, CHUNK), temperature)
    is_in = chunk * CHUNK + tl.arange(0, CHUNK) < vocab_size
    order = order_of(z)
    is_kept = is_in & (z >= tl.load(lowest_ptr + sample))
    prefix = tl.load(prefix_ptr + sample, mask=shift < TOP_SHIFT, other=0)  # before the first digit every id matches
    is_kept = is_kept & ((order >> (shift + 4)) == prefix)
    if KIND == 0:
        weight = is_kept.to(tl.int64)
    else:
        weight = tl.where(is_kept, weight_of(z, tl.load(top_ptr + sample * chunks)), 0)
    digit = (order >> shift) & 15
    sums = sums_ptr + (sample * chunks + chunk) * 16
    for value in tl.static_range(16):
        tl.store(sums + value, tl.sum(tl.where(digit == value, weight, 0), 0))


@triton.jit(do_not_specialize=["shift"])
def descend_kernel(
    state_ptr, state_stride, row_ptr, lowest_ptr, prefix_ptr, need_ptr, sums_ptr, chunks, shift,
    KIND: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    if not _is_searched(state, KIND):
        return
    chunk = tl.arange(0, CHUNKS)[:, None]
    value = tl.arange(0, 16)
    found = tl.load(sums_ptr + (sample * chunks + chunk) * 16 + value[None, :], mask=chunk < chunks, other=0)
    sums = tl.sum(found, 0)
    from_here = tl.sum(
        tl.where(value[None, :] >= value[:, None], sums[None, :], 0), 1
    )  # weight of this digit and above
    if shift == TOP_SHIFT:
        total = tl.sum(sums, 0)
        if KIND == 0:
            need = tl.load(state + TOP_K).to(tl.int64)
            need = tl.where(need < total, need, 0)
        else:
            part = tl.load(state + TOP_P).to(tl.float32, bitcast=True).to(tl.float64) * total.to(tl.float64)
            need = tl.maximum(tl.ceil(part).to(tl.int64), 1)
        prefix = total * 0
    else:
        need = tl.load(need_ptr + sample)
        prefix = tl.load(prefix_ptr + sample)
    if need > 0:
        digit = tl.max(tl.where(from_here >= need, value, 0), 0)
        need -= tl.sum(tl.where(value > digit, sums, 0), 0)
        prefix = prefix * 16 + digit
    tl.store(need_ptr + sample, need)
    tl.store(prefix_ptr + sample, prefix)
    if (shift == 0) & (need > 0):
        tl.store(lowest_ptr + sample, float_of(prefix))


def is_needed(columns: SamplingColumns) -> bool:
    """Whether some row uses a filter."""
    asks = (columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)
    return bool((asks & (columns["temperature"] >= GREEDY_BELOW)).any())


def find_thresholds(
    logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor, scratch: Scratch, group: Group = ALONE
) -> torch.Tensor:
    """The smallest z that each of the S rows keeps, float32 [S]. `rows` are records of `state`, -1 is padding.

    With several ranks the integer sums are all-reduced. Every rank then finds the same result as one rank with all
    logits would, and no logits are exchanged.
    """
    num_samples, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    grid = (num_samples, chunks)
    lines = triton.next_power_of_2(chunks)
    common = (state, state.stride(0), rows)
    source = (logits, logits.stride(0), vocab_size, *common)
    chunk_top_kernel[grid](*source, scratch.top, chunks, CHUNK=CHUNK, num_warps=8, **dependent())
    if group.size > 1:
        top = scratch.top[:num_samples]
        top[:, 0] = group.all_reduce_max(top.amax(1))
    start_kernel[(num_samples,)](*common, scratch.top, scratch.lowest, chunks, CHUNKS=lines, num_warps=1)
    for kind in (COUNT, WEIGH):
        for shift in range(TOP_SHIFT.value, -1, -4):
            digit_sums_kernel[grid](
                *source, scratch.top, scratch.lowest, scratch.prefix, scratch.sums, chunks, shift,
                KIND=kind, CHUNK=CHUNK, num_warps=8,
            )  # fmt: skip
            sums, parts = scratch.sums, chunks
            if group.size > 1:
                sums, parts = group.all_reduce(sums[:num_samples].sum(1)), 1
            descend_kernel[(num_samples,)](
                *common, scratch.lowest, scratch.prefix, scratch.need, sums, parts, shift,
                KIND=kind, CHUNKS=triton.next_power_of_2(parts), num_warps=1,
            )  # fmt: skip
    return scratch.lowest


def reference(logits: torch.Tensor, params: SamplingParams) -> np.float32:
    """The threshold of one row of logits [vocab]."""
    return keep_threshold((logits.float().numpy() / np.float32(params.temperature)).astype(np.float32), params)
