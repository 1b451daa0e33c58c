"""Processing of logits before sampling, for rows that ask for it. `processors.py` has the specification.

Per row of the worker, on every rank for its part of the vocabulary:

    added   float32 [rows, vocab]  logit_bias; minus infinity for ids that cannot be sampled
    counts  int32 [rows, vocab]    occurrences in the output; the sign bit: the id is in the prompt
    recent  int32 [rows, RECENT]   the last output tokens; output position p is at p % RECENT

They are written when a row is opened (gpu/step/processing.py) and by `record_tokens` after each sample.
"""

from __future__ import annotations

import torch

from request_fields.fields import MAX_BAD_WORD_IDS
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.record import WORDS

IS_PROCESSED = tl.constexpr(WORDS["is_processed"])
REPETITION = tl.constexpr(WORDS["repetition_penalty"])
FREQUENCY = tl.constexpr(WORDS["frequency_penalty"])
PRESENCE = tl.constexpr(WORDS["presence_penalty"])
IN_PROMPT = -(2**31)
RECENT = MAX_BAD_WORD_IDS
CHUNK = 2048
WORDS_AT_ONCE = 16  # programs per row for its bad words
BLOCK = 64
ROWS_AT_ONCE = 128

# Of a step whose rows may have drafts: the number of each sample in its row and the token of the step that it is
# sampled from, and the ids of these tokens.
Drafts = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


@triton.jit
def process_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, added_ptr, count_ptr, out_ptr, nth_ptr,
    sample_token_ptr, token_ptr, first_id, CHUNK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + sample).to(tl.int64)
    if row < 0:
        return
    id = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_id = id < vocab_size
    x = tl.load(logits_ptr + sample * stride + id, mask=is_id, other=0.0).to(tl.float32)
    state = state_ptr + row * state_stride
    if tl.load(state + IS_PROCESSED) != 0:
        added = tl.load(added_ptr + row * vocab_size + id, mask=is_id, other=0.0)
        counts = tl.load(count_ptr + row * vocab_size + id, mask=is_id, other=0)
        if DRAFTS:  # they are the output before this token
            last = token_ptr + tl.load(sample_token_ptr + sample)
            for back in range(tl.load(nth_ptr + sample)):
                counts += (id == tl.load(last - back) - first_id).to(tl.int32)
        repetition = tl.load(state + REPETITION).to(tl.float32, bitcast=True)
        frequency = tl.load(state + FREQUENCY).to(tl.float32, bitcast=True)
        presence = tl.load(state + PRESENCE).to(tl.float32, bitcast=True)
        x = tl.where(added != 0.0, x + added, x)
        x = tl.where(counts != 0, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
        num_output = counts & 0x7FFFFFFF
        x = tl.where(num_output > 0, (x - frequency * num_output.to(tl.float32)) - presence, x)
        x = tl.where(added == -float("inf"), -float("inf"), x)
    tl.store(out_ptr + sample * vocab_size + id, x, mask=is_id)


@triton.jit
def bad_words_kernel(
    logits_ptr, vocab_size, row_ptr, position_ptr, range_ptr, start_ptr, id_ptr, recent_ptr, first_id, nth_ptr,
    sample_token_ptr, token_ptr, DRAFTS: tl.constexpr, RECENT: tl.constexpr, WORDS_AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + sample).to(tl.int64)
    if row < 0:
        return
    num_output = tl.load(position_ptr + sample)
    begin, end = tl.load(range_ptr + 2 * row), tl.load(range_ptr + 2 * row + 1)
    for word in range(begin + tl.program_id(1), end, WORDS_AT_ONCE):
        first = tl.load(start_ptr + word)
        before = tl.load(start_ptr + word + 1) - first - 1
        num_other = 0
        if before > num_output:
            num_other = 1
        else:
            for at in range(0, before, BLOCK):
                item = at + tl.arange(0, BLOCK)
                wanted = tl.load(id_ptr + first + item, mask=item < before, other=0)
                place = (num_output - before + item) % RECENT
                found = tl.load(recent_ptr + row * RECENT + place, mask=item < before, other=0)
                if DRAFTS:
                    back = before - 1 - item  # tokens behind it
                    is_draft = (back >= 0) & (back < tl.load(nth_ptr + sample))
                    draft = tl.load(token_ptr + tl.load(sample_token_ptr + sample) - back, mask=is_draft, other=0)
                    found = tl.where(is_draft, draft, found)
                num_other += tl.sum(((wanted != found) & (item < before)).to(tl.int32), 0)
        if num_other == 0:
            id = tl.load(id_ptr + first + before) - first_id
            tl.store(logits_ptr + sample * vocab_size + id, -float("inf"), mask=(id >= 0) & (id < vocab_size))


@triton.jit(do_not_specialize=["num_samples"])
def record_tokens_kernel(
    token_ptr, row_ptr, position_ptr, count_ptr, recent_ptr, vocab_size, first_id, num_samples,
    RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + sample, mask=sample < num_samples, other=-1).to(tl.int64)
    is_row = row >= 0
    token = tl.load(token_ptr + sample, mask=is_row, other=0)
    position = tl.load(position_ptr + sample, mask=is_row, other=0)
    tl.store(recent_ptr + row * RECENT + position % RECENT, token, mask=is_row)
    id = token - first_id
    is_here = is_row & (id >= 0) & (id < vocab_size)
    count = count_ptr + row * vocab_size + id
    tl.atomic_add(count, 1, mask=is_here, sem="relaxed")  # a row with drafts has several tokens


def _drafts_before(line: int, drafts: Drafts) -> list[int]:
    """The drafts before a sample, which count as its row's output."""
    if drafts is None:
        return []
    nth, tokens, token_ids = drafts
    last = int(tokens[line])
    found: list[int] = token_ids[last + 1 - int(nth[line]) : last + 1].tolist()
    return found


def torch_process(logits, state, rows, added, counts, first_id=0, drafts=None):
    out = logits.to(torch.float32, copy=True)
    for line, row in enumerate(rows.tolist()):
        if row < 0 or not int(state[row, WORDS["is_processed"]]):
            continue
        penalties = state[row, [WORDS[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")]]
        repetition, frequency, presence = penalties.view(torch.float32)
        x, bias, seen = out[line], added[row], counts[row].clone()
        for token in _drafts_before(line, drafts):
            if 0 <= token - first_id < len(seen):
                seen[token - first_id] += 1
        x = torch.where(bias != 0, x + bias, x)
        x = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
        num_output = seen & 0x7FFFFFFF
        x = torch.where(num_output > 0, (x - frequency * num_output) - presence, x)
        out[line] = torch.where(bias == -torch.inf, -torch.inf, x)
    return out


def torch_ban_bad_words(logits, rows, positions, words, recent, first_id, drafts=None):
    ranges, starts, ids = (part.tolist() for part in words)
    for line, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        for word in range(*ranges[row]) if row >= 0 else ():
            *before, last = ids[starts[word] : starts[word + 1]]
            behind = _drafts_before(line, drafts)
            places = [place % RECENT for place in range(position - len(before), position - len(behind))]
            output = [*recent[row, places].tolist(), *behind][max(len(behind) - len(before), 0) :]
            is_here = 0 <= last - first_id < logits.shape[1]
            if is_here and len(before) <= position and output == before:
                logits[line, last - first_id] = -torch.inf


def torch_record_tokens(tokens, rows, positions, counts, recent, first_id):
    lines = (rows >= 0).nonzero().flatten()
    rows, tokens = rows[lines].long(), tokens[lines]
    recent[rows, positions[lines].long() % RECENT] = tokens
    ids = tokens.long() - first_id
    is_here = (ids >= 0) & (ids < counts.shape[1])
    counts.index_put_((rows[is_here], ids[is_here]), torch.ones_like(tokens[is_here]), accumulate=True)


@kernel("process", torch_process)
def process(
    logits: torch.Tensor, state: torch.Tensor, rows: torch.Tensor, added: torch.Tensor, counts: torch.Tensor,
    first_id: int = 0, drafts: Drafts = None,
) -> torch.Tensor:  # fmt: skip
    """float32 logits [S, vocab] of the records `rows` of `state` (-1: padding), with biases, penalties and bans. With
    several ranks, they are a part of the vocabulary that starts at `first_id`."""
    num_samples, vocab_size = logits.shape
    out = torch.empty(num_samples, vocab_size, device=logits.device)
    # A fused multiply-add would round differently from the specification.
    process_kernel[(num_samples, triton.cdiv(vocab_size, CHUNK))](
        logits, logits.stride(0), vocab_size, state, state.stride(0), rows, added, counts, out,
        *(drafts or (rows, rows, rows)), first_id, CHUNK=CHUNK, DRAFTS=drafts is not None, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@kernel("bad_words", torch_ban_bad_words, writes="logits")
def ban_bad_words(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    words: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    recent: torch.Tensor,
    first_id: int,
    drafts: Drafts = None,
) -> None:
    """Sets the logit of a bad word's last id to minus infinity if the row's output ends with the ids before it.

    `words`: the range of words of each row [rows, 2], the first id of each word [words + 1], and all ids. `positions`
    are output positions. With several ranks, logits [S, vocab] are a part of the vocabulary that starts at `first_id`.
    """
    num_samples, vocab_size = logits.shape
    bad_words_kernel[(num_samples, WORDS_AT_ONCE)](
        logits, vocab_size, rows, positions, *words, recent, first_id, *(drafts or (rows, rows, rows)),
        DRAFTS=drafts is not None, RECENT=RECENT, WORDS_AT_ONCE=WORDS_AT_ONCE, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


@kernel("record_tokens", torch_record_tokens, writes="counts recent")
def record_tokens(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    recent: torch.Tensor,
    first_id: int,
) -> None:
    """Records sampled tokens [S] at their output positions. A row may have several; -1 is padding."""
    num_samples, vocab_size = len(tokens), counts.shape[1]
    record_tokens_kernel[(triton.cdiv(num_samples, ROWS_AT_ONCE),)](
        tokens, rows, positions, counts, recent, vocab_size, first_id, num_samples,
        RECENT=RECENT, BLOCK=ROWS_AT_ONCE, num_warps=4,
    )  # fmt: skip
