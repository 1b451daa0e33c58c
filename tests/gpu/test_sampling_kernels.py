"""The sampling kernels against their specification, `worker_svc/engine/sampling/noise.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from bench.gpu.checks.references import threshold_of, token_of
from request_fields.fields import MAX_BANNED_IDS, SamplingParams
from tests.gpu.builders import DEVICE, ints
from tests.gpu.ranks import Meeting, Rank
from worker_svc.engine.gpu.collectives.group import Group
from worker_svc.engine.gpu.kernels import record
from worker_svc.engine.gpu.kernels.forms import TORCH, TRITON, using
from worker_svc.engine.gpu.kernels.sampler import banned, candidates, filters, sample
from worker_svc.engine.gpu.kernels.sampler.candidates import Thresholds
from worker_svc.engine.gpu.step.device_rows import HEAD_WORDS, sampling_words
from worker_svc.engine.sampling.noise import gumbel_noise

VOCAB = 4500  # two chunks of the thresholds, three of the scores
GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, 0)


def state_of(params, sample_indices):
    """Row records in reverse order, after an unused record."""
    state = np.full((len(params) + 1, HEAD_WORDS + 2), 7, np.int32)
    for i, (row, index) in enumerate(zip(params, sample_indices, strict=True)):
        state[len(params) - i, :HEAD_WORDS] = sampling_words(row, index)
    return torch.from_numpy(state).to(DEVICE), torch.arange(len(params), 0, -1, dtype=torch.int32, device=DEVICE)


def run(logits, params, positions, *, sample_indices=None, has_filters=True):
    state, rows = state_of(params, sample_indices or [0] * len(params))
    count = len(params)
    lowest = Thresholds(count, logits.shape[1], DEVICE).find(logits, state, rows) if has_filters else None
    out = (ints(*[-5] * count), ints(*[-5] * count))
    scratch = sample.scratch_for(count, logits.shape[1], DEVICE)
    sample.sample(logits, state, rows, ints(*positions), lowest, scratch, out)
    return out[0].tolist(), out[1].tolist(), state[rows.long(), 0].tolist()


def expected(logits, params, positions, sample_indices=None):
    indices = sample_indices or [0] * len(params)
    rows = zip(logits.cpu(), params, indices, positions, strict=True)
    return [token_of(row, p, index, position) for row, p, index, position in rows]


def randn(rows, vocab=VOCAB, seed=0, dtype=torch.float32):
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)


FILTERS = [
    {}, {"top_k": 1}, {"top_k": 50}, {"top_k": VOCAB + 1}, {"top_p": 0.9}, {"top_p": 1e-6}, {"min_p": 0.05},
    {"min_p": 1.0}, {"top_a": 0.2}, {"top_a": 0.2, "top_p": 0.9}, {"top_k": 20, "top_p": 0.95},
    {"top_k": 100, "top_p": 0.5, "min_p": 0.01}, {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "top_a": 0.1},
]  # fmt: skip


def params_of(seed, temperature=0.8, **filters):
    fields = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    return SamplingParams(temperature=temperature, seed=seed, **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_match_the_specification(dtype):
    chosen = [FILTERS[0], FILTERS[2], FILTERS[4], FILTERS[-1]]
    params = [params_of(2**63 + 5 + i, **filters) for i, filters in enumerate(chosen)] + [GREEDY]
    positions = [(17 * i) % 40 for i in range(len(params))]
    indices = [i % 3 for i in range(len(params))]
    logits = randn(len(params), dtype=dtype)
    tokens, statuses, left = run(logits, params, positions, sample_indices=indices)
    assert tokens == left == expected(logits, params, positions, indices)
    assert not any(statuses)


def found_thresholds(logits, state, rows):
    return Thresholds(len(logits), logits.shape[1], DEVICE).find(logits, state, rows)


@pytest.mark.parametrize("kind", ["candidates", "too many candidates"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_thresholds(kind, filters, monkeypatch):
    if kind == "too many candidates":
        monkeypatch.setattr(candidates, "MAX_CANDIDATES", 1024)  # the ids of a row that are read at once
        monkeypatch.setattr(candidates, "collect_kernel", count_as_too_many(candidates.collect_kernel))
    params = [params_of(1, temperature, **filters) for temperature in (0.7, 1.3)]
    logits = randn(2, seed=3)
    logits[1] = (logits[1] * 2).round() / 2  # many equal values
    state, rows = state_of(params, [0, 0])
    found = found_thresholds(logits, state, rows).tolist()
    assert found == [float(threshold_of(row, p)) for row, p in zip(logits.cpu(), params, strict=True)]


class count_as_too_many:
    """Launches the kernel that collects candidates, and reports more than a row can hold."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.kernel[grid](*args, **options)
            args[8].fill_(candidates.MAX_CANDIDATES + 1)

        return launch


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_k": 5}, {"top_k": 3, "top_p": 0.4}, {"min_p": 0.1}, {"top_a": 1.0}], ids=str
)
def test_few_ids_are_candidates(filters):
    """Chunks of a real vocabulary: the k-th largest maximum is a close bound."""
    logits = randn(2, vocab=16 * candidates.CHUNK)
    state, rows = state_of([params_of(1, **filters)] * 2, [0, 0])
    thresholds = Thresholds(2, logits.shape[1], DEVICE)
    thresholds.find(logits, state, rows)
    assert (thresholds.limits.count > 0).all()
    assert (thresholds.limits.count < 30).all()


def test_tokens_without_filters_match_the_specification():
    params = [params_of(seed, 1.0) for seed in range(6)] + [GREEDY]
    logits = randn(7, seed=1)
    tokens, *_ = run(logits, params, range(7), has_filters=False)
    assert tokens == expected(logits, params, range(7))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_with_bad_logits_are_reported_and_do_not_affect_others():
    params = [params_of(3), GREEDY, params_of(4), params_of(5), GREEDY, params_of(6, top_p=0.5)]
    logits = randn(6)
    logits[0, 9], logits[1, 4400], logits[2] = float("nan"), float("inf"), -float("inf")
    logits[5, 17] = float("nan")
    logits[3, :4000] = -float("inf")
    tokens, statuses, _ = run(logits, params, [1] * 6)
    wanted = expected(logits, params, [1] * 6)
    assert statuses == [int(token is None) for token in wanted] == [1, 1, 1, 0, 0, 1]
    assert [token for token, bad in zip(tokens, statuses, strict=True) if not bad] == [
        t for t in wanted if t is not None
    ]


def test_banned_ids_are_masked_before_their_position_only():
    head = np.zeros((3, HEAD_WORDS), np.int32)
    ids = [[0, 70, 4499, *range(200, 290)], [5, 6], [7]]
    for row, banned_ids in enumerate(ids):
        head[row, record.WORDS["num_banned"]], head[row, record.WORDS["banned_before"]] = len(banned_ids), 4
    stored = np.full((3, MAX_BANNED_IDS), 99, np.int32)
    for row, banned_ids in enumerate(ids):
        stored[row, : len(banned_ids)] = banned_ids
    state = torch.from_numpy(np.concatenate((head, np.full((3, 2), 8, np.int32), stored), axis=1)).to(DEVICE)
    logits, wanted = randn(4), randn(4)
    wanted[0, ids[0]], wanted[3, ids[2]] = -float("inf"), -float("inf")
    lines, positions = ints(0, 1, -1, 2), ints(3, 4, 0, 0)
    parts = [logits[:, :3000].clone(), logits[:, 3000:].clone()]
    banned.mask_banned(logits, state, lines, positions)
    assert torch.equal(logits, wanted)
    for first_id, part in zip((0, 3000), parts, strict=True):
        banned.mask_banned(part, state, lines, positions, first_id)
    assert torch.equal(torch.cat(parts, 1), wanted)


def test_ties_go_to_the_lowest_id():
    logits = randn(1)
    logits[0, [3000, 700, 4400, 701]] = 99.0
    assert run(logits, [GREEDY], [0])[0] == [700]


def test_padding_is_not_written():
    logits = randn(2)
    state, rows = state_of([GREEDY, GREEDY], [0, 0])
    rows[0] = -1
    before = state.clone()
    out = (ints(-5, -5), ints(-5, -5))
    lowest = Thresholds(2, VOCAB, DEVICE).find(logits, state, rows)
    sample.sample(logits, state, rows, ints(0, 0), lowest, sample.scratch_for(2, VOCAB, DEVICE), out)
    assert out[0].tolist() == [-5, int(logits[1].argmax())]
    assert torch.equal(state[2], before[2])


def on_each_rank(size, logits, work):
    """The result of `work(group, logits)` on each rank, which has only its part of the vocabulary."""
    meeting = Meeting(size)

    def run_one(rank):
        group = Rank(rank, meeting)
        part = group.vocab_part(logits.shape[1])
        with meeting.turn:
            return work(group, logits[:, part.start : part.stop].contiguous())

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run_one, range(size)))


def run_in_parts(size, logits, params, positions):
    def run_one(group, mine):
        count, vocab_size = mine.shape
        state, rows = state_of(params, [0] * count)
        lowest = Thresholds(count, logits.shape[1], DEVICE, group).find(mine, state, rows)
        out, scratch = (ints(*[-5] * count), ints(*[-5] * count)), sample.scratch_for(count, vocab_size, DEVICE)
        first_id = group.vocab_part(logits.shape[1]).start
        sample.sample(mine, state, rows, ints(*positions), lowest, scratch, out, first_id, group)
        return out[0].tolist(), out[1].tolist(), state[rows.long(), 0].tolist()

    return on_each_rank(size, logits, run_one)


@pytest.mark.parametrize("forms", [TRITON, TORCH], ids=["triton", "torch"])
def test_ranks_find_the_thresholds_of_the_whole_vocabulary(forms):
    """Three ranks, the last with fewer ids, rows that are no multiple of ranks, and a row of padding."""
    params = [params_of(1, temperature, **filters) for filters in FILTERS for temperature in (0.7, 1.3)] + [GREEDY] * 2
    logits = randn(len(params), vocab=1030, seed=4, dtype=torch.bfloat16)
    logits[::2, 700:] += 5  # all ids that are kept are in the last part
    state, rows = state_of(params, [0] * len(params))
    rows[-1] = -1
    wanted = [float(threshold_of(row, p)) for row, p in zip(logits.cpu(), params[:-2], strict=False)]

    def find(group, mine):
        with using(forms):
            return Thresholds(len(params) + 5, 1030, DEVICE, group).find(mine, state, rows).tolist()

    for found in on_each_rank(3, logits, find):
        assert found[:-2] == wanted


def test_ranks_find_the_tokens_of_the_whole_vocabulary():
    """Sampled ids in both parts, ties across the boundary, thresholds that one part does not reach, NaN in one part."""
    params = [params_of(40), params_of(41, top_k=50), params_of(42, top_p=0.5, min_p=0.01)] + [GREEDY] * 5
    logits = randn(len(params), seed=8)
    logits[1, 2400:] += 9  # all kept ids are in the second part
    logits[3, [4400, 2252, 2251]] = 99.0
    logits[4] = -0.0
    logits[4, 4000] = 0.0  # equal to the others
    logits[5] = -float("inf")
    logits[6, 4400] = float("nan")
    logits[7, :4000] = -float("inf")
    whole = run(logits, params, range(len(params)))
    assert whole[0][3:5] == [2251, 0]
    assert whole[1] == [0] * 5 + [1, 1, 0]
    for found in run_in_parts(2, logits, params, range(len(params))):
        assert found == whole


def test_parts_cover_the_vocabulary():
    for vocab_size, size in ((151_936, 8), (98, 2), (97, 3), (13, 4)):
        parts = [Group(rank, size).vocab_part(vocab_size) for rank in range(size)]
        assert [token for part in parts for token in part] == list(range(vocab_size))
        assert all(part.start % 4 == 0 for part in parts)


@triton.jit
def noise_kernel(seed_ptr, position, index, exact_ptr, rough_ptr, first, BLOCK: tl.constexpr):
    position = tl.full([], position, tl.int32)
    words = sample.philox_words(
        tl.load(seed_ptr),
        tl.load(seed_ptr + 1),
        position,
        tl.full([], index, tl.int32),
        tl.full([], first, tl.int32),
        BLOCK,
    )
    id = tl.arange(0, BLOCK)
    tl.store(exact_ptr + id, sample.exact_noise(words))
    tl.store(rough_ptr + id, sample.approximate_noise(words))


@pytest.mark.parametrize(("seed", "position", "index"), [(0, 0, 0), (2**64 - 1, 2**20, 3), (0x123456789ABCDEF, 17, 1)])
def test_noise_matches_the_specification(seed, position, index):
    exact, rough = torch.empty(512, device=DEVICE), torch.empty(512, device=DEVICE)
    words = torch.from_numpy(np.array([seed], np.uint64).view(np.int32)).to(DEVICE)
    noise_kernel[(1,)](words, position, index, exact, rough, 1024, BLOCK=512)
    wanted = torch.from_numpy(gumbel_noise(seed, position, index, np.arange(1024, 1536, dtype=np.uint32)))
    assert torch.equal(exact.cpu(), wanted)
    assert (rough.cpu() - wanted).abs().max() < sample.APPROXIMATION_ERROR / 4


@triton.jit
def word_kernel(word_ptr, exact_ptr, rough_ptr, BLOCK: tl.constexpr):
    id = tl.arange(0, BLOCK)
    word = tl.load(word_ptr + id).to(tl.uint32, bitcast=True)
    tl.store(exact_ptr + id, sample.exact_noise(word))
    tl.store(rough_ptr + id, sample.approximate_noise(word))


def test_the_error_bound_of_the_approximation_holds_at_the_ends():
    words = np.concatenate(
        [np.arange(256), 2**32 - 1 - np.arange(256), 2**27 - 128 + np.arange(256), 2**31 - 128 + np.arange(256)]
    )
    exact, rough = torch.empty(1024, device=DEVICE), torch.empty(1024, device=DEVICE)
    word_kernel[(1,)](torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(DEVICE), exact, rough, BLOCK=1024)
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    assert np.array_equal(exact.cpu().numpy(), (-np.log(-np.log1p(-u))).astype(np.float32))
    assert (rough - exact).abs().max() < sample.APPROXIMATION_ERROR / 4


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_the_error_bound_holds_with_the_largest_error_of_the_instruction(signs):
    """The interpreter lacks the fast logarithm, so this adds its error, as PTX bounds it, to both logarithms."""

    def fast_log(x, sign):
        exact = np.log2(x)
        return (exact + sign * 2.0**-22 * np.where((x > 0.5) & (x < 2), 1.0, np.abs(exact))) * np.log(2)

    words = np.random.default_rng(0).integers(0, 2**32, 100_000)
    words = np.concatenate((words, np.arange(256), 2**32 - 1 - np.arange(256), 2**27 + np.arange(256)))
    u = (words + 0.5) * 2.0**-32
    rest = np.float32((2**32 - 1 - words) + 0.5) * np.float32(2.0**-32)
    series = np.where(u < 0.03125, -np.log1p(-u), -fast_log(rest.astype(np.float64), signs[0]))
    assert np.abs(-fast_log(series, signs[1]) + np.log(-np.log1p(-u))).max() < sample.APPROXIMATION_ERROR / 4


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (sample, "if top > best:", "if top < best:"),
        (sample, "tl.load(score_ptr + sample * chunks + index) >= enough", "index == 0"),
        (candidates, "tl.where(order_of(z) >= tried, weight", "tl.where(order_of(z) > tried, weight"),
        (filters, ".to(tl.int32), 0) >= k:", ".to(tl.int32), 0) < k:"),
        (filters, "is_kept = (id < vocab_size) &", "is_kept = (id < vocab_size // 2) &"),
        (filters, "bound = tl.maximum(bound, largest(", "bound = tl.maximum(bound, 9 + largest("),
    ],
)  # fmt: skip
def test_mutants_are_caught(plant_mutant, module, old, new):
    params = [params_of(0), params_of(1, top_k=3), params_of(2, top_p=0.9)]
    logits = randn(3, seed=5)
    logits[:, 2048:] += 4  # the sampled ids are not in the first chunk
    wanted = expected(logits, params, [3] * 3)
    thresholds = [float(threshold_of(row, p)) for row, p in zip(logits.cpu(), params, strict=True)]
    plant_mutant(module, old, new)
    state, rows = state_of(params, [0] * 3)
    lowest = found_thresholds(logits, state, rows)
    out, scratch = (ints(*[-5] * 3), ints(*[-5] * 3)), sample.scratch_for(3, VOCAB, DEVICE)
    sample.sample(logits, state, rows, ints(3, 3, 3), lowest, scratch, out)
    assert lowest.tolist() != thresholds or out[0].tolist() != wanted
