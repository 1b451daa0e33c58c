"""The first kernel of a step: makes token ids, positions and slots from the upload and the row records."""

from __future__ import annotations

import torch

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.record import LAST_TOKEN, NUM_TOKENS, POSITION_DELTA, TABLE, WORDS

BLOCK = 128
DRAFT = -2  # stands for the first draft of a row, DRAFT - 1 for the second
FIRST_DRAFT = tl.constexpr(DRAFT)


@triton.jit(do_not_specialize=["num_tokens_padded"])
def prepare_kernel(
    state_ptr, state_stride, num_rows_ptr, row_ptr, start_ptr, context_ptr, known_ptr,
    token_ptr, position_ptr, slot_ptr, num_tokens_padded, history_ptr, draft_ptr,
    TABLE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr, HISTORY: tl.constexpr,
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
        row = tl.load(row_ptr + batch_row).to(tl.int64)
        state = state_ptr + row * state_stride
        sampled_last = tl.load(state + LAST_TOKEN)
        delta = tl.load(state + POSITION_DELTA)
        if DRAFTS > 0:  # noqa: SIM102 (known to the compiler)
            if context < 0:  # a step that is not answered yet decides
                context = tl.load(state + NUM_TOKENS) - 1
                tl.store(context_ptr + batch_row, context)
        for begin in range(first, last, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            is_token = token < last
            known = tl.load(known_ptr + token, mask=is_token, other=0)
            position = context + token - first
            block = tl.load(state + TABLE + position // PAGE, mask=is_token, other=0)
            id = tl.where(known < 0, sampled_last, known)
            if DRAFTS > 0:
                is_draft = is_token & (known <= FIRST_DRAFT)
                draft = tl.load(draft_ptr + row * DRAFTS + FIRST_DRAFT - known, mask=is_draft, other=0)
                id = tl.where(is_draft, tl.maximum(draft, 0), id)
                tl.store(
                    history_ptr + row * HISTORY + position % HISTORY, id, mask=is_token & (token >= last - HISTORY)
                )
            tl.store(token_ptr + token, id, mask=is_token)
            tl.store(position_ptr + token, position + delta, mask=is_token)
            tl.store(slot_ptr + token, block * PAGE + position % PAGE, mask=is_token)


def torch_prepare(state, num_rows, rows, starts, contexts, known, out, block_size, drafts=None):
    count = int(num_rows)
    if drafts is not None:
        of_rows = state[rows[:count].long(), WORDS["num_tokens"]] - 1
        contexts[:count] = torch.where(contexts[:count] < 0, of_rows, contexts[:count])
    lens = starts[: count + 1].diff()
    lines = torch.arange(count, device=state.device).repeat_interleave(lens)
    tokens = torch.arange(len(lines), device=state.device)
    records, positions = rows[lines].long(), contexts[lines] + tokens - starts[lines]
    blocks = state[records, TABLE + positions // block_size]
    known = known[: len(lines)]
    ids = torch.where(known < 0, state[records, WORDS["last_token"]], known)
    if drafts is not None:
        history, of_rows = drafts
        found = of_rows[records, (DRAFT - known).clamp(0, of_rows.shape[1] - 1).long()].clamp_min(0)
        ids = torch.where(known <= DRAFT, found, ids)
        is_kept = tokens >= starts[lines + 1] - history.shape[1]
        history[records[is_kept], positions[is_kept].long() % history.shape[1]] = ids[is_kept].int()
    slots = blocks * block_size + positions % block_size
    columns = (ids, positions + state[records, WORDS["position_delta"]], slots)
    for column, values, fill in zip(out, columns, (0, 0, -1), strict=True):
        column.fill_(fill)[: len(lines)] = values


@kernel("prepare", torch_prepare, writes="contexts out drafts")
def prepare(
    state: torch.Tensor,
    num_rows: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    known: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_size: int,
    drafts: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes token ids, positions and slots (all int32 [T]) of a batch to `out`. Rows with images have other positions
    than indices.

    `known` [T] are the token ids that the host knows; a negative id stands for the row's last sampled token. Padding
    tokens get slot -1.

    `drafts`: histories and drafts of all rows (drafts.py), if the worker computes some. Then the histories get the
    tokens, a context below 0 is replaced by the number of tokens of the row's record - 1, and DRAFT - i in `known`
    stands for draft i of the row.
    """
    most, (history, of_rows) = (0, (state, state)) if drafts is None else (drafts[1].shape[1], drafts)
    prepare_kernel[(len(rows) + 1,)](
        state, state.stride(0), num_rows, rows, starts, contexts, known, *out, len(out[0]), history, of_rows,
        TABLE=TABLE, PAGE=block_size, BLOCK=BLOCK, DRAFTS=most, HISTORY=history.shape[1], num_warps=4,
    )  # fmt: skip
