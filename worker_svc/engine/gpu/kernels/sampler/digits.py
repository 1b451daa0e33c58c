"""The search for a threshold over several ranks, without exchanging logits: a radix search by sums of digits.

z is an ordered integer, searched four bits per pass. Each pass counts ids (top_k) or sums their integer weights (top_p)
per chunk of the vocabulary; the sums of all ranks are added, and one program per row chooses the digit.
"""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.record import TEMPERATURE
from worker_svc.engine.gpu.kernels.sampler.filters import (
    TOP_K,
    RowLimits,
    StepLogits,
    count_to_reach,
    float_of,
    load_z,
    order_of,
    top_p_of,
    weight_of,
    weight_to_reach,
)

CHUNK = 4096
# First bit of the first of 8 digits. Kernels take the bit as an argument, so that all digits share one kernel.
TOP_SHIFT = tl.constexpr(28)
COUNT, WEIGH = 0, 1


@triton.jit
def _is_searched(state, KIND: tl.constexpr):
    """Whether this row uses this filter."""
    if KIND == 0:
        is_on = tl.load(state + TOP_K) > 0
    else:
        is_on = top_p_of(state) < 1.0
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
            need = count_to_reach(tl.load(state + TOP_K).to(tl.int64), total)
        else:
            need = weight_to_reach(top_p_of(state), total)
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


class DigitSearch:
    """Buffers for the search of S rows. Every rank finds the same thresholds as one rank with all logits would."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, group: Group) -> None:
        self._group = group
        self._prefix = torch.zeros(max_rows, dtype=torch.int64, device=device)  # digits found so far
        self._need = torch.zeros_like(self._prefix)  # count or weight still to be reached; 0: no search
        self._sums = torch.zeros(max_rows, triton.cdiv(vocab_size, CHUNK), 16, dtype=torch.int64, device=device)

    def search(self, source: StepLogits, limits: RowLimits) -> None:
        """Raises the lowest z of rows with top_k or top_p."""
        num_samples, vocab_size = source.logits.shape
        chunks = triton.cdiv(vocab_size, CHUNK)
        rows = source.row_arguments()
        for kind in (COUNT, WEIGH):
            for shift in range(TOP_SHIFT.value, -1, -4):
                digit_sums_kernel[(num_samples, chunks)](
                    *source.arguments(), limits.top, limits.lowest, self._prefix, self._sums, chunks, shift,
                    KIND=kind, CHUNK=CHUNK, num_warps=8,
                )  # fmt: skip
                sums, parts = self._sums, chunks
                if self._group.size > 1:
                    sums, parts = self._group.all_reduce(sums[:num_samples].sum(1)), 1
                descend_kernel[(num_samples,)](
                    *rows, limits.lowest, self._prefix, self._need, sums, parts, shift,
                    KIND=kind, CHUNKS=triton.next_power_of_2(parts), num_warps=1,
                )  # fmt: skip
