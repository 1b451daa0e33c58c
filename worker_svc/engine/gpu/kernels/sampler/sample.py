"""Samples tokens: argmax of z + noise over the ids that pass the threshold. The specification is `engine/noise.py`.

The first kernel finds the best score of each chunk with approximate noise. The second computes exact noise in float64
for the few chunks that can contain the best id, and stores the token in the row record, where the next step reads it.
The approximation has an error bound.

With tensor parallelism each rank samples from its own part of the vocabulary and makes a key of score and id. The
largest key of all ranks is the token that a single rank would have sampled:

    score as an ordered signed 32-bit integer | 0xFFFFFFFF - id       score 0x7FFFFFFF: NaN or +inf among the logits
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from worker_svc.engine.gpu.collectives.group import ALONE, Group
from worker_svc.engine.gpu.kernels.forms import kernel
from worker_svc.engine.gpu.kernels.language import tl, triton
from worker_svc.engine.gpu.kernels.launch import after_predecessor, dependent
from worker_svc.engine.gpu.kernels.record import LAST_TOKEN, TEMPERATURE, WORDS, read_record
from worker_svc.engine.gpu.kernels.sampler.filters import load_z
from worker_svc.engine.sampling.noise import GREEDY_BELOW, has_token, pick_token

SEED_LOW = tl.constexpr(WORDS["seed"])
SEED_HIGH = tl.constexpr(WORDS["seed"] + 1)
SAMPLE_INDEX = tl.constexpr(WORDS["sample_index"])
CHUNK = 2048
KEYS = 128  # per program
# Bound of |approximate - exact|: the series is cut off at 1e-8, and the fast logarithm has an error of 2^-22.
APPROXIMATION_ERROR = 5e-5
IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter runs no instructions of a GPU
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def philox_words(seed_low, seed_high, position, sample_index, first_id, BLOCK: tl.constexpr):
    """Random words of the ids [first_id, first_id + BLOCK). `first_id` is a multiple of 4: one call makes 4 words."""
    key = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    counter = (first_id // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(
        key, counter, zero + position.to(tl.uint32, bitcast=True), zero + sample_index.to(tl.uint32, bitcast=True), zero
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _fast_log(x):
    """The natural logarithm. On a GPU it is one instruction instead of 20. It has an error of 2^-22 in the logarithm to
    base 2: absolute between 0.5 and 2, else relative."""
    if IS_COMPILED:
        instruction: tl.constexpr = "lg2.approx.f32 $0, $1;"
        result = LOG_2 * tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        result = tl.log(x)
    return result


@triton.jit
def approximate_noise(word):
    """-log(-log1p(-u)) in float32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u without cancellation
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    return -_fast_log(tl.where(u < 0.03125, series, -_fast_log(rest)))


@triton.jit
def exact_noise(word):
    """As specified: 1 - u has 33 bits, so a float64 holds it exactly and its logarithm is log1p(-u)."""
    rest = ((word ^ 0xFFFFFFFF).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10
    return (-tl.log(-tl.log(rest))).to(tl.float32)


@triton.jit
def chunk_scores_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, position_ptr, lowest_ptr, score_ptr, bad_ptr,
    chunks, first_id, FILTER: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    is_greedy = temperature < 1e-5
    id = chunk * CHUNK + tl.arange(0, CHUNK)
    score = load_z(logits_ptr, stride, sample, vocab_size, id, tl.where(is_greedy, 1.0, temperature))
    is_bad = (score != score) | (score == float("inf"))
    tl.store(bad_ptr + sample * chunks + chunk, tl.max(is_bad.to(tl.int32), 0))
    if not is_greedy:
        words = philox_words(
            tl.load(state + SEED_LOW),
            tl.load(state + SEED_HIGH),
            tl.load(position_ptr + sample),
            tl.load(state + SAMPLE_INDEX),
            first_id + chunk * CHUNK,
            CHUNK,
        )
        if FILTER:
            score = tl.where(score >= tl.load(lowest_ptr + sample), score, -float("inf"))
        score += approximate_noise(words)
    tl.store(score_ptr + sample * chunks + chunk, tl.max(score, 0))


@triton.jit
def pick_kernel(
    logits_ptr, stride, vocab_size, state_ptr, state_stride, row_ptr, position_ptr, lowest_ptr, score_ptr, bad_ptr,
    chunks, first_id, token_ptr, status_ptr, key_ptr, ERROR: tl.constexpr, FILTER: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, IS_PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        after_predecessor()
    sample = tl.program_id(0)
    row = tl.load(row_ptr + sample)
    if row < 0:
        return
    state = state_ptr + row.to(tl.int64) * state_stride
    temperature = tl.load(state + TEMPERATURE).to(tl.float32, bitcast=True)
    is_greedy = temperature < 1e-5
    temperature = tl.where(is_greedy, 1.0, temperature)
    chunk = tl.arange(0, CHUNKS)
    scores = tl.load(score_ptr + sample * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    best = tl.max(scores, 0)
    has_fault = tl.max(tl.load(bad_ptr + sample * chunks + chunk, mask=chunk < chunks, other=0), 0) > 0
    is_bad = has_fault | (best == -float("inf"))
    enough = best - 2 * ERROR - 1e-6 * tl.abs(best)
    best = -float("inf")
    token = 0
    if not is_bad:
        for index in range(chunks):
            if tl.load(score_ptr + sample * chunks + index) >= enough:
                id = index * CHUNK + tl.arange(0, CHUNK)
                score = load_z(logits_ptr, stride, sample, vocab_size, id, temperature)
                if not is_greedy:
                    words = philox_words(
                        tl.load(state + SEED_LOW), tl.load(state + SEED_HIGH), tl.load(position_ptr + sample),
                        tl.load(state + SAMPLE_INDEX),
                        first_id + index * CHUNK, CHUNK,
                    )  # fmt: skip
                    if FILTER:
                        score = tl.where(score >= tl.load(lowest_ptr + sample), score, -float("inf"))
                    score += exact_noise(words)
                top = tl.max(score, 0)
                if top > best:  # chunks are in order, so ties go to the lowest id
                    best = top
                    token = first_id + index * CHUNK + tl.argmax(score, 0)
    if IS_PART:
        bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(has_fault, 0x7FFFFFFF, order)
        tl.store(key_ptr + sample, (order.to(tl.int64) << 32) | (0xFFFFFFFF - tl.cast(token, tl.int64)))
    else:
        tl.store(token_ptr + sample, token)
        tl.store(status_ptr + sample, is_bad.to(tl.int32))
        tl.store(state + LAST_TOKEN, token)


@triton.jit
def read_keys_kernel(
    key_ptr, state_ptr, state_stride, row_ptr, token_ptr, status_ptr, num_samples, BLOCK: tl.constexpr
):
    """Stores tokens and statuses from the keys, as `pick_kernel` does when it has the whole vocabulary."""
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + sample, mask=sample < num_samples, other=-1)
    is_row = row >= 0
    key = tl.load(key_ptr + sample, mask=is_row, other=0)
    order = key >> 32
    is_bad = (order == 0x7FFFFFFF) | (order == -0x7F800001)  # the second is -inf: no id passed
    token = tl.where(is_bad, 0, 0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)
    tl.store(token_ptr + sample, token, mask=is_row)
    tl.store(status_ptr + sample, is_bad.to(tl.int32), mask=is_row)
    tl.store(state_ptr + row.to(tl.int64) * state_stride + LAST_TOKEN, token, mask=is_row)


def whole_vocabulary(logits: torch.Tensor, group: Group) -> torch.Tensor:
    """The logits [S, vocab] of all ranks. Only the last parts may be shorter."""
    if group.size == 1:
        return logits
    width = group.all_reduce_max(torch.tensor([logits.shape[1]], device=logits.device))
    padded = F.pad(logits, (0, int(width) - logits.shape[1]), value=-torch.inf)
    return group.all_gather(padded).movedim(0, 1).flatten(1)


def torch_sample(logits, state, rows, positions, lowest, scratch, out, first_id=0, group=ALONE):
    whole = whole_vocabulary(logits, group).float().cpu().numpy()
    for line, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if row < 0:
            continue
        (params, index), of_row, token = read_record(state[row]), whole[line], 0
        is_good = has_token(of_row)
        if is_good and params.temperature < np.float32(GREEDY_BELOW):
            token = int(of_row.argmax())
        elif is_good:
            bound = np.float32(-np.inf if lowest is None else lowest[line].item())
            token = pick_token(of_row / np.float32(params.temperature), bound, params.seed, index, position)
        out[0][line], out[1][line] = token, not is_good
        state[row, WORDS["last_token"]] = token


@kernel("sample", torch_sample, writes="state out")
def sample(
    logits: torch.Tensor,
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    lowest: torch.Tensor | None,
    scratch: tuple[torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor],
    first_id: int = 0,
    group: Group = ALONE,
) -> None:
    """Writes tokens and statuses (1: the logits hold NaN, +inf or no finite number), int32 [S], to `out`.

    `logits` [S, vocab] belong to the records `rows` of `state`; -1 is padding. `positions` are output positions,
    `lowest` the thresholds if any row has filters, `scratch` float32 and int32 [S, chunks]. The token is also stored as
    the last token of its record.

    With several ranks, each passes its part of the vocabulary, which starts at `first_id`, and all get the same tokens.
    """
    num_samples, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    is_filtered = lowest is not None
    source = (
        logits, logits.stride(0), vocab_size, state, state.stride(0), rows, positions,
        logits if lowest is None else lowest, *scratch, chunks, first_id,
    )  # fmt: skip
    is_part = group.size > 1
    keys = torch.empty(num_samples, dtype=torch.int64, device=logits.device) if is_part else out[0]
    chunk_scores_kernel[(num_samples, chunks)](*source, FILTER=is_filtered, CHUNK=CHUNK, num_warps=4, **dependent())
    pick_kernel[(num_samples,)](
        *source, *out, keys, ERROR=APPROXIMATION_ERROR, FILTER=is_filtered, CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks), IS_PART=is_part, num_warps=4, **dependent(),
    )  # fmt: skip
    if is_part:
        read_keys_kernel[(triton.cdiv(num_samples, KEYS),)](
            group.all_reduce_max(keys), state, state.stride(0), rows, *out, num_samples, BLOCK=KEYS, num_warps=4
        )


def scratch_for(num_samples: int, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the best score of each chunk and its NaN flag."""
    chunks = triton.cdiv(vocab_size, CHUNK)
    return torch.zeros(num_samples, chunks, device=device), torch.zeros(
        num_samples, chunks, dtype=torch.int32, device=device
    )
