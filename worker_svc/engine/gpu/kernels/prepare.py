"""The first kernel of a step: makes token ids, positions and slots from the upload and the row records."""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.record import LAST_TOKEN, TABLE, WORDS

BLOCK = 128
POSITION_DELTA = tl.constexpr(WORDS["position_delta"])


@triton.jit(do_not_specialize=["num_tokens_padded"])
def prepare_kernel(
    state_ptr, state_stride, num_rows_ptr, row_ptr, start_ptr, context_ptr, known_ptr,
    token_ptr, position_ptr, slot_ptr, num_tokens_padded,
    TABLE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch_row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    if batch_row == tl.num_programs(0) - 1:  # the last program writes the padding tokens
        first = tl.load(start_ptr + num_rows)
        for begin in range(first, num_tokens_padded, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            is_token = token < num_tokens_padded
            tl.store(token_ptr + token, token * 0, mask=is_token)
            tl.store(position_ptr + token, token * 0, mask=is_token)
            tl.store(slot_ptr + token, token * 0 - 1, mask=is_token)
    elif batch_row < num_rows:
        first = tl.load(start_ptr + batch_row)
        last = tl.load(start_ptr + batch_row + 1)
        context = tl.load(context_ptr + batch_row)
        state = state_ptr + tl.load(row_ptr + batch_row).to(tl.int64) * state_stride
        sampled_last = tl.load(state + LAST_TOKEN)
        delta = tl.load(state + POSITION_DELTA)
        for begin in range(first, last, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            is_token = token < last
            known = tl.load(known_ptr + token, mask=is_token, other=0)
            position = context + token - first
            block = tl.load(state + TABLE + position // PAGE, mask=is_token, other=0)
            tl.store(token_ptr + token, tl.where(known < 0, sampled_last, known), mask=is_token)
            tl.store(position_ptr + token, position + delta, mask=is_token)
            tl.store(slot_ptr + token, block * PAGE + position % PAGE, mask=is_token)


def torch_prepare(
    state: torch.Tensor,
    num_rows: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    known: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_size: int,
) -> None:
    count = int(num_rows)
    lens = starts[: count + 1].diff()
    lines = torch.arange(count, device=state.device).repeat_interleave(lens)
    tokens = torch.arange(len(lines), device=state.device)
    records, positions = rows[lines].long(), contexts[lines] + tokens - starts[lines]
    blocks = state[records, TABLE + positions // block_size]
    ids = torch.where(known[: len(lines)] < 0, state[records, WORDS["last_token"]], known[: len(lines)])
    slots = blocks * block_size + positions % block_size
    found = (ids, positions + state[records, WORDS["position_delta"]], slots)
    for column, values, fill in zip(out, found, (0, 0, -1), strict=True):
        column.fill_(fill)[: len(lines)] = values


@kernel("prepare", torch_prepare, writes="out")
def prepare(
    state: torch.Tensor,
    num_rows: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    known: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_size: int,
) -> None:
    """Writes token ids, positions and slots (all int32 [T]) of a batch to `out`. Rows with images have other positions
    than indices.

    `known` [T] are the token ids that the host knows; a negative id stands for the row's last sampled token. Padding
    tokens get slot -1.
    """
    prepare_kernel[(len(rows) + 1,)](
        state, state.stride(0), num_rows, rows, starts, contexts, known, *out, len(out[0]),
        TABLE=TABLE, PAGE=block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
