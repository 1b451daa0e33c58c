"""Log probabilities of the CPU engine: against transformers, against the specification, alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from step_protocol.types import RowErrorCode
from tests.unit.engine.driver import Driver, seeded
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_models import MODELS, load, prompts
from worker_svc.engine.cpu.backend import CpuBackend
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.kernels import exact_ops

NAMES = ("qwen3-gqa2", "qwen2-tied", "llama-odd-sizes", "mistral-gqa4")


def check_scores(driver: Driver, reference, row: int, positions: range, num_top: int) -> None:
    tokens = driver.rows[row].tokens
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    expected = logits.log_softmax(-1)
    assert [p for r, p in sorted(driver.scores) if r == row and p in positions] == list(positions)
    for position in positions:
        score, line = driver.scores[row, position], expected[position - 1]
        assert score.token_ids[0] == tokens[position]
        assert score.token_ids[1:] == line.topk(num_top).indices.tolist()
        assert np.abs(np.array(score.values) - line[score.token_ids].numpy()).max() < 1e-4
        assert score.rank == 1 + int((logits[position - 1] > logits[position - 1][tokens[position]]).sum())


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_match_transformers(tmp_path, name):
    architecture, block_size, overrides = MODELS[name]
    folder = make_model(tmp_path, architecture, **overrides)
    driver, reference = Driver(load(folder, block_size)), load_reference(folder)
    first, second, third = prompts([150, 33, 1])
    driver.open(0, first, logprobs=3, prompt_logprobs=2)
    driver.open(1, second, seeded(5), logprobs=0)
    driver.open(2, third)
    driver.step({0: 90, 1: 20})
    driver.step({2: 1, 0: 1, 1: 13})
    driver.step({0: 59, 1: 1, 2: 1})
    driver.decode([2, 0, 1], 3)
    check_scores(driver, reference, 0, range(1, 150), 2)
    check_scores(driver, reference, 0, range(150, len(driver.rows[0].tokens)), 3)
    check_scores(driver, reference, 1, range(33, len(driver.rows[1].tokens)), 0)
    assert not [row for row, _ in driver.scores if row == 2], "a row that does not ask"
    assert len([row for row, _ in driver.scores if row == 1]) == len(driver.rows[1].output)


def test_the_greedy_token_has_rank_1_and_equals_the_most_likely_one(tmp_path):
    driver = Driver(load(make_model(tmp_path)))
    driver.open(0, prompts([9])[0], logprobs=1)
    driver.prefill(0)
    driver.decode([0], 20)
    for position in range(9, 30):
        score = driver.scores[0, position]
        assert (score.rank, score.token_ids[0]) == (1, score.token_ids[1])
        assert score.values[0] == score.values[1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_values_do_not_depend_on_chunks_batch_mates_or_cached_blocks(tmp_path, backend):
    folder = make_model(tmp_path)
    prompt, other, *_ = prompts([70, 40])
    runner = load(folder, backend=backend)
    alone = Driver(runner)
    alone.open(0, prompt, logprobs=5, prompt_logprobs=5)
    alone.prefill(0)
    alone.decode([0], 4)

    crowded = Driver(load(folder, backend=backend))
    crowded.open(3, other, prompt_logprobs=1)
    crowded.open(0, prompt, logprobs=5, prompt_logprobs=5)
    crowded.open(1, other, seeded(1), logprobs=2)
    crowded.step({3: 7, 0: 33, 1: 40})
    crowded.step({1: 1, 0: 1, 3: 33})
    crowded.step({1: 1, 0: 36})
    crowded.decode([3, 0, 1], 4)
    assert {key: value for key, value in crowded.scores.items() if key[0] == 0} == alone.scores

    resumed = Driver(load(folder, backend=backend))
    resumed.open(0, prompt, output=alone.rows[0].output[:3], logprobs=5, prompt_logprobs=5)
    resumed.prefill(0, chunk=11)
    resumed.decode([0], 1)
    known = len(prompt) + 3
    assert resumed.scores == {key: value for key, value in alone.scores.items() if key[1] < 70 or key[1] >= known}


def test_bans_and_penalties_do_not_change_log_probabilities(tmp_path):
    folder = make_model(tmp_path)
    prompt = prompts([12])[0]
    free, bound = Driver(load(folder)), Driver(load(folder))
    free.open(0, prompt, logprobs=4)
    free.prefill(0)
    greedy = free.rows[0].output[0]
    bound.open(0, prompt, logprobs=4, banned=(greedy,), banned_before=5)
    bound.open(1, prompt, logprobs=1)
    bound.step({0: 12, 1: 12})
    score, raw = bound.scores[0, 12], free.scores[0, 12]
    assert score.rank == 2
    assert score.token_ids == [raw.token_ids[2], *raw.token_ids[1:]]
    assert score.values == [raw.values[2], *raw.values[1:]]
    assert bound.scores[1, 12].rank == 1


def test_a_slice_of_logits_may_hold_several_rows_and_a_row_several_slices(tmp_path, monkeypatch):
    folder = make_model(tmp_path)
    lengths = [30, 5, 1, 17]
    expected, found = Driver(load(folder)), Driver(load(folder))
    for driver in (expected, found):
        for row, prompt in enumerate(prompts(lengths)):
            driver.open(row, prompt, logprobs=row, prompt_logprobs=3 - row if row != 3 else None)
    expected.step(dict(enumerate(lengths)))
    monkeypatch.setattr("worker_svc.engine.model_runner.LOGITS_AT_ONCE", 7)
    found.step(dict(enumerate(lengths)))
    assert found.scores == expected.scores
    assert {key for key in found.scores if key[0] < 3} == {(r, p) for r in range(3) for p in range(1, lengths[r] + 1)}


def test_a_row_with_nan_fails_alone(tmp_path):
    folder = make_model(tmp_path)
    driver = Driver(load(folder))
    good, bad = prompts([20, 20])
    driver.runner._model.parts.embedding[bad[3]] = torch.nan
    good = [token if token != bad[3] else 5 for token in good]
    driver.open(0, good, logprobs=1, prompt_logprobs=1)
    driver.open(1, bad, logprobs=1, prompt_logprobs=1)
    output = driver.step({0: 20, 1: 20})
    assert [(error.row, error.code) for error in driver.errors] == [(1, RowErrorCode.NAN)]
    assert output.rows.tolist() == [0]
    assert {row for row, _ in driver.scores} == {0}


# -- the kernel against the specification --------------------------------------------------------------------------


@pytest.fixture
def backends(kernel_build):
    return CpuBackend(2), ReferenceBackend("exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 1024, 4099])
def test_kernel_equals_the_specification(backends, dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(6, vocab, generator=generator) * 4).to(dtype)
    logits[1] = logits[1].round()  # many equal logits
    logits[2] = -torch.inf
    logits[2, vocab // 2] = 3.0
    logits[3] = 7.5  # all equal
    logits[4, ::2] = -torch.inf if vocab > 1 else 0.0
    lines = np.array([5, 0, 1, 2, 3, 4])
    chosen = np.array([0, vocab - 1, vocab // 2, vocab // 2, vocab - 1, min(1, vocab - 1)], np.uint32)
    num_top = min(20, vocab)
    kernel, reference = (backend.logprobs(logits, lines, chosen, num_top) for backend in backends)
    assert not kernel.is_bad.any()
    assert not reference.is_bad.any()
    np.testing.assert_array_equal(kernel.token_ids, reference.token_ids)
    np.testing.assert_array_equal(kernel.ranks, reference.ranks)
    np.testing.assert_allclose(kernel.values, reference.values, rtol=1e-6, atol=2e-6)
    expected = logits.double().log_softmax(-1)
    for i, line in enumerate(lines):
        np.testing.assert_allclose(kernel.values[i], expected[line][kernel.token_ids[i].astype(int)], atol=1e-5)


def test_ranks_and_order_of_equal_logits():
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0])
    values, ids, rank = exact_ops.top_logprobs(logits, 4, 4)
    assert (ids.tolist(), rank) == ([4, 1, 2, 4, 3], 1)
    assert values[0] == values[1] == values[3]
    assert exact_ops.top_logprobs(logits, 3, 0)[2] == 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_reported(backends, value):
    logits = torch.zeros(3, 40)
    logits[1, 39] = value
    logits[2] = -torch.inf
    for backend in backends:
        found = backend.logprobs(logits, np.arange(3), np.zeros(3, np.uint32), 2)
        assert found.is_bad.tolist() == [False, True, True]
