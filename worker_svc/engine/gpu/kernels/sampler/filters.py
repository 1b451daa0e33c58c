"""What the filters ask of a row, and what its softmax says about it before a threshold is searched.

A filter that compares probabilities with a limit (min_p, top_a) is a number that z = logits / temperature must reach:
`limit_of_min_p`, `limit_of_top_a`. A filter that keeps ids up to a count (top_k) or a weight (top_p) is a search for
the largest threshold whose ids reach it: `count_to_reach`, `weight_to_reach`. `candidates.py` searches. The
specification is in `worker_svc/engine/sampling/noise.py`.

Three kernels come before the search: maxima of chunks of the vocabulary, the weights of chunks for rows whose filters
need their sum, and one program per row that makes limits of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from request_fields.fields import FILTERS
from worker_svc.engine.backend import SamplingColumns
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.record import TEMPERATURE, WORDS
from worker_svc.engine.sampling.noise import GREEDY_BELOW, log_of

TOP_K = tl.constexpr(WORDS["top_k"])
TOP_P = tl.constexpr(WORDS["top_p"])
LOG_MIN_P = tl.constexpr(WORDS["min_p"])
TOP_A = tl.constexpr(WORDS["top_a"])
UNIT = tl.constexpr(1099511627776.0)  # 2^40: the weight of the most probable id
# With less left out, the rounding of the integer weights of a million ids would matter, so top_p gives no bound.
MIN_LEFT_OUT = tl.constexpr(1e-6)
MAX_IDS = tl.constexpr(1_000_000)
MARGIN = tl.constexpr(1.0)  # the ids below the bound weigh at most 1/e of what may be left out


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits [S, vocab] of some rows of a step: records of `state`, -1 is padding."""

    logits: torch.Tensor
    state: torch.Tensor
    rows: torch.Tensor

    def arguments(self) -> tuple[Any, ...]:
        """What every kernel over logits gets."""
        return self.logits, self.logits.stride(0), self.logits.shape[1], *self.row_arguments()

    def row_arguments(self) -> tuple[Any, ...]:
        """What every kernel over rows gets."""
        return self.state, self.state.stride(0), self.rows


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Buffers for S rows and the chunks of the vocabulary."""

    lowest: torch.Tensor  # float32 [S]: no smaller z passes; after the search, the smallest z that passes
    top: torch.Tensor  # float32 [S, chunks]: maximum of z per chunk; later of the row in column 0
    weight: torch.Tensor  # int64 [S, chunks]: of the ids that min_p keeps, if the row needs the sum
    bound: torch.Tensor  # float32 [S]: no smaller z passes
    count: torch.Tensor  # int32 [S]: candidates
    total: torch.Tensor  # int64 [S]: sum of the weights

    @classmethod
    def make(cls, max_rows: int, chunks: int, device: torch.device) -> RowLimits:
        return cls(
            lowest=torch.zeros(max_rows, device=device),
            top=torch.zeros(max_rows, chunks, device=device),
            weight=torch.zeros(max_rows, chunks, dtype=torch.int64, device=device),
            bound=torch.zeros(max_rows, device=device),
            count=torch.zeros(max_rows, dtype=torch.int32, device=device),
            total=torch.zeros(max_rows, dtype=torch.int64, device=device),
        )


STORED_AS = {"min_p": log_of}  # parameters that the record holds in another form


def is_needed(columns: SamplingColumns) -> bool:
    """Whether some row uses a filter."""
    is_sampled = columns["temperature"] >= GREEDY_BELOW
    return any(bool((is_sampled & (columns[name] != field.default)).any()) for name, field in FILTERS.items())


@triton.jit
def top_p_of(state):
    return tl.load(state + TOP_P).to(tl.float32, bitcast=True)


@triton.jit
def top_a_of(state):
    return tl.load(state + TOP_A).to(tl.float32, bitcast=True)


@triton.jit
def needs_sum(state):
    """Whether a filter needs the weight of all ids that min_p keeps."""
    return ((tl.load(state + TOP_K) == 0) & (top_p_of(state) < 1.0)) | (top_a_of(state) > 0.0)


@triton.jit
def limit_of_min_p(state, top):
    """The smallest z that min_p keeps; -inf without it. `top`: the largest z."""
    return top + tl.load(state + LOG_MIN_P).to(tl.float32, bitcast=True)


@triton.jit
def limit_of_top_a(state, top, total):
    """The smallest z that top_a keeps; -inf without it. `total`: the weight of the ids that min_p keeps."""
    share = top_a_of(state).to(tl.float64) * UNIT / tl.maximum(total, 1).to(tl.float64)
    return top + tl.log(share).to(tl.float32)


@triton.jit
def count_to_reach(top_k, count):
    """The count that a threshold for top_k must reach among so many ids. 0: all are kept."""
    return tl.where(top_k < count, top_k, 0)


@triton.jit
def weight_to_reach(top_p, total):
    """The weight that a threshold for top_p must reach among ids that weigh `total`."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


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
    """Integer weights: their sum does not depend on its order."""
    distance = tl.maximum(z.to(tl.float64) - top.to(tl.float64), -100.0)
    return tl.floor(tl.exp(distance) * UNIT + 0.5).to(tl.int64)


@triton.jit
def largest(z, is_in, k):
    """The k-th largest of at least k values."""
    order = order_of(z)
    found = tl.zeros([], tl.int64)
    for bit in range(32):
        tried = found | (tl.full([], 1, tl.int64) << (31 - bit))
        if tl.sum((is_in & (order >= tried)).to(tl.int32), 0) >= k:
            found = tried
    return float_of(found)


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
def chunk_weight_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, top_ptr, weight_ptr, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight of the ids that min_p keeps, per chunk, of rows that need it."""
    if PDL:
        after_predecessor()
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    if (temperature < 1e-5) | (not needs_sum(state)):
        return
    place = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(top_ptr + sample * chunks + place, mask=place < chunks, other=-float("inf")), 0)
    id = chunk * CHUNK + tl.arange(0, CHUNK)
    z = load_z(logits_ptr, stride, sample, vocab_size, id, temperature)
    is_kept = (id < vocab_size) & (z >= limit_of_min_p(state, top))
    tl.store(weight_ptr + sample * chunks + chunk, tl.sum(tl.where(is_kept, weight_of(z, top), 0), 0))


@triton.jit
def limits_kernel(
    state_ptr, state_stride, row_ptr, top_ptr, weight_ptr, lowest_ptr, bound_ptr, count_ptr, total_ptr, chunks,
    vocab_size, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`lowest`: no smaller z passes the filters that are limits. `bound`: no smaller z passes top_k and top_p either.
    Column 0 of the maxima becomes the maximum of the row."""
    if PDL:
        after_predecessor()
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    lowest = -float("inf")
    bound = -float("inf")
    total = tl.zeros([], tl.int64)
    if row >= 0:
        state = state_ptr + row.to(tl.int64) * state_stride
        if tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True) >= 1e-5:
            chunk = tl.arange(0, CHUNKS)
            is_chunk = chunk < chunks
            tops = tl.load(top_ptr + sample * chunks + chunk, mask=is_chunk, other=-float("inf"))
            top = tl.max(tops, 0)
            lowest = limit_of_min_p(state, top)
            if needs_sum(state):
                total = tl.sum(tl.load(weight_ptr + sample * chunks + chunk, mask=is_chunk, other=0), 0)
            if top_a_of(state) > 0.0:
                lowest = tl.maximum(lowest, limit_of_top_a(state, top, total))
            bound = lowest
            k = tl.load(state + TOP_K)
            left_out = 1.0 - top_p_of(state)
            if (k > 0) & (k <= chunks):
                bound = tl.maximum(bound, largest(tops, is_chunk, k))
            elif (k == 0) & (top_a_of(state) == 0.0) & (left_out >= MIN_LEFT_OUT) & (vocab_size <= MAX_IDS):
                share = left_out * (total.to(tl.float32) / UNIT) / vocab_size
                bound = tl.maximum(bound, top + tl.log(share) - MARGIN)
            tl.store(top_ptr + sample * chunks, top)
    tl.store(lowest_ptr + sample, lowest)
    tl.store(bound_ptr + sample, bound)
    tl.store(count_ptr + sample, 0)
    tl.store(total_ptr + sample, total)


def find_limits(source: StepLogits, limits: RowLimits, chunk: int) -> None:
    """Everything but the search. `chunk`: ids of a chunk of `limits`."""
    num_samples, vocab_size = source.logits.shape
    chunks = limits.top.shape[1]
    lines = triton.next_power_of_2(chunks)
    grid = (num_samples, chunks)
    chunk_top_kernel[grid](*source.arguments(), limits.top, chunks, CHUNK=chunk, num_warps=4, **dependent())
    chunk_weight_kernel[grid](
        *source.arguments(), limits.top, limits.weight, chunks, CHUNK=chunk, CHUNKS=lines,
        num_warps=4, **dependent(),
    )  # fmt: skip
    limits_kernel[(num_samples,)](
        *source.row_arguments(), limits.top, limits.weight, limits.lowest, limits.bound, limits.count,
        limits.total, chunks, vocab_size, CHUNKS=lines, num_warps=1, **dependent(),
    )  # fmt: skip
