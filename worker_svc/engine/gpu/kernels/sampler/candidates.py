"""Thresholds of rows with filters: the few ids that can pass are collected, the threshold is found among them.

`filters.py` gives a bound below which no id passes: for top_k the k-th largest maximum of a chunk; for top_p, an id
that weighs less than total * (1 - top_p) / vocab_size does not matter. One program per row then finds the threshold
by bisection. A row with too many candidates reads its logits instead, which takes longer.

A threshold depends on the whole vocabulary, of which each rank has a part. So ranks exchange their logits once: each
gets all logits of its share of the rows, finds their thresholds as a worker of one rank does, and sends them to the
others. A search over the parts would need a sum over ranks for each of its passes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.record import TEMPERATURE, read_record
from worker_svc.engine.gpu.kernels.sampler.filters import (
    TOP_K,
    RowLimits,
    StepLogits,
    count_to_reach,
    find_limits,
    float_of,
    largest,
    load_z,
    order_of,
    top_p_of,
    weight_of,
    weight_to_reach,
)
from worker_svc.engine.sampling.noise import GREEDY_BELOW, has_token, keep_threshold

CHUNK = 1024
MAX_CANDIDATES = 4096  # of a row


@triton.jit
def collect_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, top_ptr, bound_ptr, count_ptr, z_ptr, chunks,
    CHUNK: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
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
    bound = tl.load(bound_ptr + sample)
    # Column 0 holds the maximum of the row.
    if (chunk == 0) | (tl.load(top_ptr + sample * chunks + chunk) >= bound):
        id = chunk * CHUNK + tl.arange(0, CHUNK)
        z = load_z(logits_ptr, stride, sample, vocab_size, id, temperature)
        is_found = (id < vocab_size) & (z >= bound)
        found = is_found.to(tl.int32)
        num_found = tl.sum(found, 0)
        if num_found > 0:
            place = tl.atomic_add(count_ptr + sample, num_found) + tl.cumsum(found, 0) - 1
            tl.store(z_ptr + sample.to(tl.int64) * ROOM + place, z, mask=is_found & (place < ROOM))


@triton.jit
def _search_candidates(z, is_in, lowest, bound, top, total, top_k, top_p):
    """The threshold among candidates that are all in registers."""
    if top_k > 0:
        is_in = is_in & (z >= lowest)
        count = tl.sum(is_in.to(tl.int32), 0)
        # With a bound above the limit there may be more ids below it.
        if count_to_reach(top_k, count + (bound > lowest).to(tl.int32)) > 0:
            lowest = largest(z, is_in, top_k)
    if top_p < 1.0:
        is_in = is_in & (z >= lowest)
        weight = tl.where(is_in, weight_of(z, top), 0)
        if (top_k > 0) | (bound <= lowest):  # all ids that are kept are candidates
            total = tl.sum(weight, 0)
        need = weight_to_reach(top_p, total)
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
        if count_to_reach(top_k, count) > 0:
            found = none
            for bit in range(32):
                tried = found | (tl.full([], 1, tl.int64) << (31 - bit))
                count = _measure(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, tried, True, BLOCK)
                if count >= top_k:
                    found = tried
            lowest = float_of(found)
    if top_p < 1.0:
        total = _measure(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, none, False, BLOCK)
        need = weight_to_reach(top_p, total)
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
    total_ptr, z_ptr, chunks, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k, top_p = tl.load(state + TOP_K), top_p_of(state)
    if (temperature < 1e-5) | ((top_k <= 0) & (top_p >= 1.0)):
        return
    top, lowest = tl.load(top_ptr + sample * chunks), tl.load(lowest_ptr + sample)
    total, count = tl.load(total_ptr + sample), tl.load(count_ptr + sample)
    if count <= ROOM:
        place = tl.arange(0, ROOM)
        is_in = place < count
        z = tl.load(z_ptr + sample.to(tl.int64) * ROOM + place, mask=is_in, other=-float("inf"))
        lowest = _search_candidates(z, is_in, lowest, tl.load(bound_ptr + sample), top, total, top_k, top_p)
    else:
        lowest = _search_logits(logits_ptr, stride, vocab_size, sample, temperature, lowest, top, top_k, top_p, ROOM)
    tl.store(lowest_ptr + sample, lowest)


class Thresholds:
    """Finds thresholds. It owns the buffers for steps of at most `max_rows` rows."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, group: Group = ALONE) -> None:
        """`vocab_size` is that of all ranks."""
        self._group = group
        self._vocab_size = vocab_size
        share = triton.cdiv(max_rows, group.size)
        self._z = torch.zeros(share, MAX_CANDIDATES, device=device)  # candidates of each row, in any order
        self.limits = RowLimits.make(share, triton.cdiv(vocab_size, CHUNK), device)

    def find(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The smallest z = logits / temperature that each of the S rows keeps, float32 [S]. `rows` are records of
        `state`, -1 is padding. `logits` [S, this rank's part of the vocabulary]."""
        group, count = self._group, len(rows)
        if group.size == 1:
            return self._find(logits, state, rows)
        share = triton.cdiv(count, group.size)
        padding, width = share * group.size - count, group.part_size(self._vocab_size)
        whole = group.exchange_rows(F.pad(logits, (0, width - logits.shape[1], 0, padding)))[:, : self._vocab_size]
        own = F.pad(rows, (0, padding), value=-1)[group.rank * share : (group.rank + 1) * share]
        return group.all_gather(self._find(whole, state, own)).flatten()[:count]

    def _find_in_torch(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        lowest, host = self.limits.lowest[: len(rows)].fill_(-torch.inf), logits.float().cpu().numpy()
        for line, row in enumerate(rows.tolist()):
            params, _ = read_record(state[max(row, 0)])
            if row >= 0 and params.temperature >= np.float32(GREEDY_BELOW) and has_token(host[line]):
                z = host[line] / np.float32(params.temperature)
                lowest[line] = float(keep_threshold(z, params, np.float32(params.min_p)))
        return lowest

    @kernel("thresholds", _find_in_torch)
    def _find(self, logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As `find`, of rows whose logits are complete."""
        source, limits = StepLogits(logits, state, rows), self.limits
        find_limits(source, limits, CHUNK)
        num_samples, chunks = len(source.logits), limits.top.shape[1]
        collect_kernel[(num_samples, chunks)](
            *source.arguments(), limits.top, limits.bound, limits.count, self._z, chunks, CHUNK=CHUNK,
            ROOM=MAX_CANDIDATES, num_warps=4, **dependent(),
        )  # fmt: skip
        select_kernel[(num_samples,)](
            *source.arguments(), limits.top, limits.lowest, limits.bound, limits.count, limits.total, self._z, chunks,
            ROOM=MAX_CANDIDATES, num_warps=4, **dependent(),
        )  # fmt: skip
        return limits.lowest[: len(rows)]
