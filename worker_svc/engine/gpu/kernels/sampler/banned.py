"""Sets the logits of banned token ids to minus infinity, before anything else reads them."""

from __future__ import annotations

import torch

from request_fields.fields import MAX_BANNED_IDS
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.record import WORDS

NUM_BANNED = tl.constexpr(WORDS["num_banned"])
BANNED_BEFORE = tl.constexpr(WORDS["banned_before"])
BLOCK = 64


@triton.jit
def banned_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, position_ptr, ids_at, first_id,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    if tl.load(position_ptr + sample) >= tl.load(state + BANNED_BEFORE):
        return
    count = tl.load(state + NUM_BANNED)
    for begin in range(0, count, BLOCK):
        item = begin + tl.arange(0, BLOCK)
        id = tl.load(state + ids_at + item, mask=item < count, other=-1) - first_id
        is_here = (item < count) & (id >= 0) & (id < vocab_size)
        tl.store(logits_ptr + sample.to(tl.int64) * stride + id, -float("inf"), mask=is_here)


def torch_mask_banned(
    logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, first_id: int = 0
) -> None:
    for line, row in enumerate(rows.tolist()):
        if row >= 0 and int(positions[line]) < int(state[row, WORDS["banned_before"]]):
            ids = state[row, -MAX_BANNED_IDS:][: int(state[row, WORDS["num_banned"]])] - first_id
            logits[line, ids[(ids >= 0) & (ids < logits.shape[1])].long()] = -torch.inf


@kernel("mask_banned", torch_mask_banned, writes="logits")
def mask_banned(
    logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, first_id: int = 0
) -> None:
    """Masks logits [S, vocab] of the records `rows` of `state` (-1: padding) at these output positions. With several
    ranks, each passes its part of the vocabulary, which starts at `first_id`."""
    num_samples, vocab_size = logits.shape
    banned_kernel[(num_samples,)](
        logits, logits.stride(0), vocab_size, state, state.stride(0), rows, positions,
        state.shape[1] - MAX_BANNED_IDS, first_id, BLOCK=BLOCK, num_warps=2, **dependent(),
    )  # fmt: skip
