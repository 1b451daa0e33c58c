"""Drafts on the device: which are right, and what may follow. The next step reads both, so the host need not wait.

    prepare   the tokens of the rows enter their histories; positions of rows whose length the host does not know
    accept    the samples of a row up to its first wrong draft are its tokens; its record gets the newest one
    suffix    drafts that followed the longest earlier occurrence of the newest tokens

A history is a ring of HISTORY tokens: position p is at p % HISTORY. Drafts of a row that has fewer end with -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.record import LAST_TOKEN, NUM_TOKENS, POSITION_DELTA, PROMPT_LEN, WORDS

HISTORY = 8192  # tokens
LEAST_MATCH, MOST_MATCH = 3, 8  # newest tokens that must occur earlier, and those that are compared
BLOCK = 1024
POSITION_BITS = 24

# Statuses of a sample: bits.
BAD, NO_TOKEN, HAS_DRAFT, IS_RIGHT = 1, 2, 4, 8  # of bad logits; behind a wrong draft; a draft follows; it is right


# What the device keeps of each row, int32: histories [rows, HISTORY] and drafts [rows, most]. Written when a row is
# opened, and by the kernels.
DraftTables = tuple[torch.Tensor, torch.Tensor]


def empty_tables(num_rows: int, most: int, device: torch.device) -> DraftTables:
    history = torch.zeros(num_rows, HISTORY, dtype=torch.int32, device=device)
    return history, torch.full((num_rows, most), -1, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class SampleLines:
    """The samples of a step, int32. Those of a row follow each other."""

    rows: torch.Tensor  # [S], -1: padding
    nth: torch.Tensor  # [S] sample of its row
    tokens: torch.Tensor  # [S] tokens of the step that are sampled from
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] with what images add to them


@triton.jit(do_not_specialize=["num_samples"])
def output_positions_kernel(
    row_ptr, sample_token_ptr, position_ptr, state_ptr, state_stride, out_ptr, num_samples, BLOCK: tl.constexpr
):
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + sample, mask=sample < num_samples, other=-1)
    token = tl.load(sample_token_ptr + sample, mask=row >= 0, other=0)
    position = tl.load(position_ptr + token, mask=row >= 0, other=0)
    state = state_ptr + row.to(tl.int64) * state_stride
    index = position - tl.load(state + POSITION_DELTA, mask=row >= 0, other=0)
    prompt_len = tl.load(state + PROMPT_LEN, mask=row >= 0, other=0)
    tl.store(out_ptr + sample, index + 1 - prompt_len, mask=row >= 0)


@triton.jit(do_not_specialize=["num_samples"])
def accept_kernel(
    token_ptr, status_ptr, kept_ptr, row_ptr, nth_ptr, sample_token_ptr, position_ptr, state_ptr, state_stride,
    history_ptr, draft_ptr, num_samples, MOST: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    row = tl.load(row_ptr + first).to(tl.int64)
    if row < 0:
        tl.store(kept_ptr + first, -1)
        return
    if tl.load(nth_ptr + first) != 0:
        return
    nth = 0
    count = 0
    newest = 0
    goes_on = 1
    is_reached = 1
    while goes_on != 0:
        token = tl.load(token_ptr + first + nth)
        is_bad = tl.load(status_ptr + first + nth)
        draft = tl.load(draft_ptr + row * MOST + nth, mask=nth < MOST, other=-1)
        has_draft = (draft >= 0).to(tl.int32)
        is_right = has_draft * (draft == token).to(tl.int32)
        is_token = is_reached * tl.where(nth == 0, 1, 1 - is_bad)
        tl.store(status_ptr + first + nth, is_bad + 2 * (1 - is_token) + 4 * has_draft + 8 * is_right)
        tl.store(kept_ptr + first + nth, tl.where(is_token != 0, row, -1).to(tl.int32))
        count += is_token
        newest = tl.where(is_token != 0, token, newest)
        is_reached = is_token * is_right * (1 - is_bad)
        nth += 1
        next_nth = tl.load(nth_ptr + first + nth, mask=first + nth < num_samples, other=0)
        goes_on = (next_nth == nth).to(tl.int32)
    state = state_ptr + row * state_stride
    before = tl.load(position_ptr + tl.load(sample_token_ptr + first)) - tl.load(state + POSITION_DELTA)
    tl.store(state + LAST_TOKEN, newest)
    tl.store(state + NUM_TOKENS, before + 1 + count)
    tl.store(history_ptr + row * HISTORY + (before + count) % HISTORY, newest)


@triton.jit
def suffix_kernel(
    row_ptr, nth_ptr, state_ptr, state_stride, history_ptr, draft_ptr, MOST: tl.constexpr, MOST_PADDED: tl.constexpr,
    HISTORY: tl.constexpr, LEAST_MATCH: tl.constexpr, MOST_MATCH: tl.constexpr, POSITION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample).to(tl.int64)
    if row < 0:
        return
    if tl.load(nth_ptr + sample) != 0:
        return
    history = history_ptr + row * HISTORY
    length = tl.load(state_ptr + row * state_stride + NUM_TOKENS)
    # Drafts that were wrong have overwritten the oldest tokens.
    lowest = tl.maximum(length - (HISTORY - MOST_PADDED), 0)
    best = -1
    for begin in range(lowest, length - 1, BLOCK):
        end = begin + tl.arange(0, BLOCK)  # last token of an occurrence
        is_same = end < length - 1
        num_same = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(MOST_MATCH):
            is_same = is_same & (end - back >= lowest)
            wanted = tl.load(history + tl.maximum(length - 1 - back, 0) % HISTORY)
            found = tl.load(history + tl.maximum(end - back, 0) % HISTORY, mask=is_same, other=-1)
            is_same = is_same & (found == wanted)
            num_same += is_same.to(tl.int32)
        key = tl.where(num_same >= LEAST_MATCH, (num_same << POSITION_BITS) | end, -1)
        best = tl.maximum(best, tl.max(key, 0))
    nth = tl.arange(0, MOST_PADDED)
    start = (best & ((1 << POSITION_BITS) - 1)) + 1
    period = tl.maximum(length - start, 1)
    is_draft = (nth < MOST) & (best >= 0)
    draft = tl.load(history + (start + nth % period) % HISTORY, mask=is_draft, other=-1)
    tl.store(draft_ptr + row * MOST + nth, draft, mask=nth < MOST)


def torch_output_positions(lines: SampleLines, state: torch.Tensor, out: torch.Tensor) -> None:
    found = (lines.rows >= 0).nonzero().flatten()
    deltas, prompt_lens = state[lines.rows[found].long()][:, [WORDS["position_delta"], WORDS["prompt_len"]]].T
    out[found] = lines.positions[lines.tokens[found].long()] - deltas + 1 - prompt_lens


@kernel("output_positions", torch_output_positions, writes="out")
def output_positions(lines: SampleLines, state: torch.Tensor, out: torch.Tensor) -> None:
    """Sets the output positions [S] of the tokens that are sampled, for rows whose length the host does not know."""
    count = len(lines.rows)
    output_positions_kernel[(triton.cdiv(count, 128),)](
        lines.rows, lines.tokens, lines.positions, state, state.stride(0), out, count, BLOCK=128, num_warps=4
    )


def torch_accept(lines, state, sampled, tables, kept):
    tokens, statuses = sampled
    history, drafts = tables
    kept[: len(lines.rows)] = -1
    is_reached, nths = True, lines.nth.tolist()
    for line, row in enumerate(lines.rows.tolist()):
        if row < 0:
            continue
        nth, token, is_bad = nths[line], int(tokens[line]), int(statuses[line])
        is_reached = is_reached or nth == 0
        draft = int(drafts[row, nth]) if nth < drafts.shape[1] else -1
        is_token = is_reached and (nth == 0 or not is_bad)
        is_right = 0 <= draft == token
        statuses[line] = is_bad + NO_TOKEN * (not is_token) + HAS_DRAFT * (draft >= 0) + IS_RIGHT * is_right
        is_reached = is_token and is_right and not is_bad
        if not is_token:
            continue
        kept[line] = row
        position = int(lines.positions[int(lines.tokens[line])] - state[row, WORDS["position_delta"]]) + 1
        state[row, WORDS["last_token"]], state[row, WORDS["num_tokens"]] = token, position + 1
        history[row, position % HISTORY] = token


@kernel("accept", torch_accept, writes="state sampled tables kept")
def accept(
    lines: SampleLines,
    state: torch.Tensor,
    sampled: tuple[torch.Tensor, torch.Tensor],
    tables: DraftTables,
    kept: torch.Tensor,
) -> None:
    """Compares the sampled tokens with the drafts of their rows. Sets the statuses of the samples (1: bad logits; see
    above), the newest tokens of the rows and their numbers, and in `kept` [S] the rows of samples that are tokens, -1
    for the others.
    """
    count, (history, drafts) = len(lines.rows), tables
    accept_kernel[(count,)](
        *sampled, kept, lines.rows, lines.nth, lines.tokens, lines.positions, state, state.stride(0), history,
        drafts, count, MOST=drafts.shape[1], HISTORY=HISTORY, num_warps=1,
    )  # fmt: skip


def torch_suffix(lines: SampleLines, state: torch.Tensor, tables: DraftTables) -> None:
    history, drafts = tables
    most = drafts.shape[1]
    for row, nth in zip(lines.rows.tolist(), lines.nth.tolist(), strict=True):
        if row < 0 or nth:
            continue
        length = int(state[row, WORDS["num_tokens"]])
        lowest = max(length - (HISTORY - padded_size(most)), 0)
        tokens = history[row, torch.arange(lowest, length, device=state.device) % HISTORY].tolist()
        found = _continued(tokens, most)
        drafts[row] = torch.tensor(found, dtype=torch.int32, device=state.device)


def _continued(tokens: list[int], most: int) -> list[int]:
    best, start = LEAST_MATCH - 1, None
    for end in range(len(tokens) - 1):
        same = 0
        while same < min(MOST_MATCH, end + 1) and tokens[end - same] == tokens[-1 - same]:
            same += 1
        if same >= max(best, LEAST_MATCH):
            best, start = same, end + 1
    if start is None:
        return [-1] * most
    period = len(tokens) - start
    return [tokens[start + nth % period] for nth in range(most)]


def padded_size(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()


@kernel("suffix", torch_suffix, writes="tables")
def suffix(lines: SampleLines, state: torch.Tensor, tables: DraftTables) -> None:
    """Sets the drafts of the rows that have sampled: the tokens after the longest of their earlier occurrences of the
    newest tokens, and of equally long ones the newest. They repeat if there are fewer."""
    history, drafts = tables
    most = drafts.shape[1]
    suffix_kernel[(len(lines.rows),)](
        lines.rows, lines.nth, state, state.stride(0), history, drafts,
        MOST=most, MOST_PADDED=padded_size(most), HISTORY=HISTORY, LEAST_MATCH=LEAST_MATCH, MOST_MATCH=MOST_MATCH,
        POSITION_BITS=POSITION_BITS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
