"""Cases of the sampler on the whole vocabulary: banned ids, processing, greedy rows, noise and filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from bench.gpu.checks.case import Case, Outputs, Setup
from bench.gpu.checks.references import threshold_of, token_of
from request_fields.fields import MAX_BANNED_IDS, SamplingParams, sampling_params
from step_protocol.messages import RowOpen, TokenRules
from worker_svc.engine.gpu.kernels.record import WORDS
from worker_svc.engine.gpu.kernels.sampler import sample
from worker_svc.engine.gpu.kernels.sampler.banned import mask_banned
from worker_svc.engine.gpu.kernels.sampler.candidates import Thresholds
from worker_svc.engine.gpu.step.device_rows import HEAD_WORDS, sampling_words
from worker_svc.engine.gpu.step.processing import DeviceProcessing
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.sampling.processors import RowProcessing, process_logits
from worker_svc.engine.step import RowErrors

GREEDY = sampling_params({"temperature": 0.0})
NOISE = [
    sampling_params({"temperature": 0.8, "seed": 2**63 + 5}),
    sampling_params({"temperature": 1.3, "seed": 7}),
    GREEDY,
]
FILTERED = [
    sampling_params({"temperature": 0.8, "seed": 1, "top_k": 20}),
    sampling_params({"temperature": 0.8, "seed": 2, "top_p": 0.9}),
    sampling_params({"temperature": 1.2, "seed": 3, "top_k": 50, "top_p": 0.8, "min_p": 0.01}),
    sampling_params({"temperature": 1.0, "seed": 4}),
]
BANNED_BEFORE = 4  # output position
SPREAD = 3.0  # standard deviation of the logits


def greedy_cases(setup: Setup) -> Iterator[Case]:
    """A plain row, a tie between the first and the last ids, and a row with NaN."""
    logits = _logits(setup, 3)
    logits[1, [1, -1]] = 99.0
    logits[2, setup.vocab_size // 2] = torch.nan
    yield _case("sample (greedy)", setup, logits, [GREEDY] * 3)


def noise_cases(setup: Setup) -> Iterator[Case]:
    for logits in _both_dtypes(setup, len(NOISE)):
        yield _case("sample (noise)", setup, logits, NOISE)


def filtered_cases(setup: Setup) -> Iterator[Case]:
    for logits in _both_dtypes(setup, len(FILTERED)):
        yield _case("sample (filtered)", setup, logits, FILTERED, is_filtered=True)


def banned_cases(setup: Setup) -> Iterator[Case]:
    """Two rows that ban the first, a middle and the last id: one row before the end of its ban, one at it."""
    logits, part = _logits(setup, 2), setup.group.vocab_part(setup.vocab_size)
    own, expected = logits[:, part.start : part.stop].contiguous().to(setup.device), logits.clone()
    ids = [0, setup.vocab_size // 2, setup.vocab_size - 1]
    expected[0, ids] = -torch.inf
    head = torch.zeros(HEAD_WORDS, dtype=torch.int32)
    head[WORDS["num_banned"]], head[WORDS["banned_before"]] = len(ids), BANNED_BEFORE

    def run(first: int, last: int) -> Outputs:
        state, masked = setup.records(last - first), own[first:last].clone()
        state[:, :HEAD_WORDS] = head.to(setup.device)
        state[:, -MAX_BANNED_IDS:][:, : len(ids)] = setup.ints(*ids)
        rows = torch.arange(last - first, dtype=torch.int32, device=setup.device)
        mask_banned(masked, state, rows, rows + BANNED_BEFORE - 1 + first, part.start)
        return {"logits": masked}

    inputs = f"ids {ids}, this rank's ids {part}, {setup.dtype}"
    yield Case("mask_banned", inputs, (0, 1, 2), run, {"logits": expected[:, part.start : part.stop]})


def processed_cases(setup: Setup) -> Iterator[Case]:
    """A row with every rule and penalty whose output ends with the start of a bad word, and a row without any."""
    logits, part = _logits(setup, 2), setup.group.vocab_part(setup.vocab_size)
    own = logits[:, part.start : part.stop].contiguous().to(setup.device)
    item, expected = _processed_row(setup.vocab_size), logits.float().clone()
    asked = RowProcessing(item.sampling, item.rules, item.banned_ids, item.banned_before)
    prompt, output = item.token_ids[: item.prompt_len], item.token_ids[item.prompt_len :]
    process_logits(expected[0].numpy(), asked, prompt, output)

    def run(first: int, last: int) -> Outputs:
        processing = _processing(setup, item, part)
        rows = torch.arange(last - first, dtype=torch.int32, device=setup.device) + first
        positions = torch.full_like(rows, len(output) - 1)
        processing.note(torch.full_like(rows, int(output[-1])), rows, positions)
        return {"logits": processing.processed(own[first:last], rows, positions + 1)}

    inputs = f"{len(prompt)} + {len(output)} tokens, this rank's ids {part}, {setup.dtype}"
    yield Case("process", inputs, (0, 1, 2), run, {"logits": expected[:, part.start : part.stop]})


def _processed_row(vocab_size: int) -> RowOpen:
    ids = np.arange(0, vocab_size, max(1, vocab_size // 50), dtype=np.uint32)
    sampling = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.3)
    prompt, output = ids[[1, 5, 5, 9]], ids[[2, 2, 9, 11, 3, 4]]
    rules = TokenRules(
        allowed_ids=ids, banned_ids=ids[[7, 9]], bias_ids=ids[[2, 5, 13]], biases=np.array([3.3, -2, 50], np.float32),
        bad_words=(ids[[15]], ids[[3, 4, 16]], ids[[3, 3, 17]]),
    )  # fmt: skip
    tokens = np.concatenate((prompt, output))
    return RowOpen(0, tokens, len(prompt), tokens[:0], 0, sampling, 0, rules=rules)


def _processing(setup: Setup, item: RowOpen, part: range) -> DeviceProcessing:
    """Tables of two rows: the given one without its last token, and one that asks for nothing."""
    rows = OpenRows(2, setup.block_size * 4 + len(item.token_ids), setup.block_size, 1, setup.vocab_size)
    opens = [replace(item, token_ids=item.token_ids[:-1]), RowOpen(1, item.token_ids, 1, item.banned_ids, 0, GREEDY, 0)]
    state = setup.records(2)
    processing = DeviceProcessing(state, part)
    rows.add_parts(processing.serve(rows))
    rows.open(opens, RowErrors())
    for row in opens:
        words = sampling_words(row.sampling, 0)
        words[WORDS["is_processed"]] = rows.is_always_processed(row.row)
        state[row.row, :HEAD_WORDS] = torch.from_numpy(words)
    return processing


def _logits(setup: Setup, count: int) -> torch.Tensor:
    """Logits of the whole vocabulary, in the dtype of the output layer."""
    generator = torch.Generator().manual_seed(0)
    return (SPREAD * torch.randn(count, setup.vocab_size, generator=generator)).to(setup.dtype)


def _both_dtypes(setup: Setup, count: int) -> Iterator[torch.Tensor]:
    """The same logits as they come from the output layer, and from processing, which makes them float32."""
    logits = _logits(setup, count)
    return (logits.to(dtype) for dtype in dict.fromkeys((setup.dtype, torch.float32)))


def _case(
    name: str, setup: Setup, logits: torch.Tensor, params: Sequence[SamplingParams], *, is_filtered: bool = False
) -> Case:
    """Every rank passes its part of the vocabulary and expects the tokens of the whole vocabulary."""
    part = setup.group.vocab_part(setup.vocab_size)
    own = logits[:, part.start : part.stop].contiguous().to(setup.device)
    wanted = [token_of(row, p, i, position(i)) for i, (row, p) in enumerate(zip(logits, params, strict=True))]
    tokens = torch.tensor([0 if token is None else token for token in wanted])
    expected = {"tokens": tokens, "statuses": torch.tensor([token is None for token in wanted]), "last tokens": tokens}
    if is_filtered:
        bounds = [float(threshold_of(row, p)) for row, p in zip(logits, params, strict=True)]
        expected["thresholds"] = torch.tensor(bounds)

    def run(first: int, last: int) -> Outputs:
        return _sample(setup, own[first:last].clone(), params[first:last], first, is_filtered=is_filtered)

    inputs = f"{len(params)} rows, vocab_size {setup.vocab_size}, this rank's ids {part}, {logits.dtype}"
    return Case(name, inputs, range(len(params) + 1), run, expected)


def position(row: int) -> int:
    """The output position at which a row samples. Its sample index is its row number."""
    return 1000 * row + 3


def _sample(
    setup: Setup, logits: torch.Tensor, params: Sequence[SamplingParams], first: int, *, is_filtered: bool
) -> Outputs:
    """Samples the rows from `first` on; their `logits` are [S, this rank's ids]."""
    count, size = logits.shape
    state = _state(setup, params, first)
    rows = torch.arange(count, 0, -1, dtype=torch.int32, device=setup.device)
    positions = setup.ints(*(position(first + i) for i in range(count)))
    lowest = None
    if is_filtered:
        lowest = Thresholds(count, setup.vocab_size, setup.device, setup.group).find(logits, state, rows)
    out = setup.ints(*[-1] * count), setup.ints(*[-1] * count)
    first_id = setup.group.vocab_part(setup.vocab_size).start
    sample.sample(
        logits, state, rows, positions, lowest, sample.scratch_for(count, size, setup.device), out, first_id,
        setup.group,
    )  # fmt: skip
    outputs = {"tokens": out[0], "statuses": out[1], "last tokens": state[rows.long(), 0]}
    return outputs if lowest is None else outputs | {"thresholds": lowest}


def _state(setup: Setup, params: Sequence[SamplingParams], first: int) -> torch.Tensor:
    """The rows' records in reverse order, after an unused record."""
    state = setup.records(len(params) + 1)
    for i, row in enumerate(params):
        state[len(params) - i, :HEAD_WORDS] = torch.from_numpy(sampling_words(row, first + i))
    return state
