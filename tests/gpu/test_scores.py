"""Log probabilities of the GPU engine: against transformers and against the CPU engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from step_protocol.types import RowErrorCode
from tests.gpu.builders import DEVICE
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.ranks import Meeting, Rank
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import seeded
from tests.unit.engine.models import load_reference, make_model
from tests.unit.engine.test_engine_logprobs import check_scores
from worker_svc.engine.backend import TopLogprobs
from worker_svc.engine.gpu.collectives.group import ALONE
from worker_svc.engine.gpu.messages import step_from_bytes, step_to_bytes
from worker_svc.engine.gpu.step.logprobs import HostScores, Scorer
from worker_svc.engine.kernels import exact_ops
from worker_svc.engine.rows.logprobs import LogprobRows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", **SMALL, **HEADS_4_2)


def test_scores_match_transformers(qwen3):
    driver, reference = DeviceDriver(load(qwen3)), load_reference(qwen3)
    first, second, third = small_prompts([30, 9, 1])
    driver.open(0, first, logprobs=3, prompt_logprobs=2)
    driver.open(1, second, seeded(5), logprobs=0)
    driver.open(2, third)
    driver.step({0: 17, 1: 5})
    driver.step({2: 1, 0: 1, 1: 4})
    driver.step({0: 12, 1: 1, 2: 1})
    driver.decode([2, 0, 1], 2)
    assert driver.errors == []
    check_scores(driver, reference, 0, range(1, 30), 2)
    check_scores(driver, reference, 0, range(30, len(driver.rows[0].tokens)), 3)
    check_scores(driver, reference, 1, range(9, len(driver.rows[1].tokens)), 0)
    assert not [row for row, _ in driver.scores if row == 2]
    for position in range(30, len(driver.rows[0].tokens)):
        score = driver.scores[0, position]
        assert (score.rank, score.values[0]) == (1, score.values[1])


def test_scores_do_not_depend_on_batch_and_chunks(qwen3):
    prompt, other = small_prompts([20, 11])
    alone = DeviceDriver(load(qwen3, determinism="exact"))
    alone.open(0, prompt, logprobs=4, prompt_logprobs=4)
    alone.prefill(0)
    alone.decode([0], 2)
    crowded = DeviceDriver(load(qwen3, determinism="exact"))
    crowded.open(2, other, seeded(3), logprobs=1, prompt_logprobs=2)
    crowded.open(0, prompt, logprobs=4, prompt_logprobs=4)
    crowded.step({2: 6, 0: 7})
    crowded.step({0: 1, 2: 5})
    crowded.step({2: 1, 0: 12})
    crowded.decode([2, 0], 2)
    assert {key: value for key, value in crowded.scores.items() if key[0] == 0} == alone.scores


def test_bans_do_not_change_scores(qwen3):
    prompt = small_prompts([8])[0]
    free, bound = DeviceDriver(load(qwen3)), DeviceDriver(load(qwen3))
    free.open(0, prompt, logprobs=2)
    free.prefill(0)
    greedy = free.rows[0].output[0]
    bound.open(0, prompt, logprobs=2, banned=(greedy,), banned_before=3)
    bound.prefill(0)
    score, raw = bound.scores[0, 8], free.scores[0, 8]
    assert (score.rank, score.token_ids[1:]) == (2, raw.token_ids[1:])
    assert np.allclose(score.values[1:], raw.values[1:], atol=1e-6)


def test_a_row_with_nan_fails_alone(qwen3):
    driver = DeviceDriver(load(qwen3))
    good, bad = small_prompts([8, 8])
    with torch.inference_mode():
        driver.runner._compute._model.parts.embedding[bad[3]] = torch.nan
    good = [token if token != bad[3] else 5 for token in good]
    driver.open(0, good, logprobs=1, prompt_logprobs=1)
    driver.open(1, bad, logprobs=1, prompt_logprobs=1)
    output = driver.step({0: 8, 1: 8})
    assert [(error.row, error.code) for error in driver.errors] == [(1, RowErrorCode.NAN)]
    assert output.rows.tolist() == [0]
    assert {row for row, _ in driver.scores} == {0}


def asked_rows(count: int, num_top: int) -> LogprobRows:
    is_none = np.zeros(count, np.bool_)
    return LogprobRows(np.arange(count), np.full(count, num_top), is_none, is_none)


def scored(logits: torch.Tensor, chosen: list[int], num_top: int):
    scorer = Scorer(range(logits.shape[1]), ALONE, DEVICE)
    asked = asked_rows(len(logits), num_top)
    found: HostScores = scorer.sampled(logits.to(DEVICE), asked, torch.tensor(chosen, dtype=torch.int32, device=DEVICE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return found.read()


def scored_in_parts(size: int, logits: torch.Tensor, chosen: list[int], num_top: int) -> list[TopLogprobs]:
    """The scores of each rank, which has only its part of the vocabulary."""
    meeting = Meeting(size)
    asked = asked_rows(len(logits), num_top)

    def run_one(number: int) -> TopLogprobs:
        rank = Rank(number, meeting)
        part = rank.vocab_part(logits.shape[1])
        mine = logits[:, part.start : part.stop].contiguous().to(DEVICE)
        with meeting.turn:
            found = Scorer(part, rank, DEVICE).sampled(mine, asked, torch.tensor(chosen, device=DEVICE).int())
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            return found.read()

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run_one, range(size)))


def test_ranks_find_the_scores_of_the_whole_vocabulary():
    """Chosen and most likely ids in both parts, ties across the boundary, NaN in one part, fewer ids than num_top."""
    logits = torch.randn(20, 38, generator=torch.Generator().manual_seed(3)) * 4
    logits[1] = logits[1].round()
    logits[2], logits[3, 37], logits[4] = 7.5, torch.nan, -torch.inf
    chosen = [i % 38 for i in range(20, 40)]
    whole = scored(logits, chosen, 20)
    assert whole.is_bad.nonzero()[0].tolist() == [3, 4]
    for found in scored_in_parts(2, logits, chosen, 20):
        for name in ("values", "token_ids", "ranks", "is_bad"):
            is_good = ~whole.is_bad
            np.testing.assert_array_equal(getattr(found, name)[is_good], getattr(whole, name)[is_good])
        assert found.is_bad.tolist() == whole.is_bad.tolist()


@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_scores_equal_the_specification(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(20, vocab, generator=generator) * 4
    logits[1] = logits[1].round()  # many equal logits, and -0.0
    logits[2] = -torch.inf
    logits[2, vocab // 2] = 3.0
    logits[3] = 7.5
    chosen = [vocab // 2] * 20
    found, num_top = scored(logits, chosen, min(20, vocab)), min(20, vocab)
    assert not found.is_bad.any()
    for i, line in enumerate(logits):
        values, ids, rank = exact_ops.top_logprobs(line, chosen[i], num_top)
        assert (found.token_ids[i].tolist(), found.ranks[i]) == (ids.tolist(), rank)
        np.testing.assert_allclose(found.values[i], values, atol=2e-6)


def test_logits_that_are_not_finite_are_reported():
    logits = torch.zeros(4, 40)
    logits[1, 39], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    assert scored(logits, [0] * 4, 2).is_bad.tolist() == [False, True, True, True]


def test_all_ranks_get_the_logprobs_fields_of_rows(qwen3):
    driver = DeviceDriver(load(qwen3))
    driver.open(0, [5, 6], logprobs=0, prompt_logprobs=7)
    driver.open(1, [5])
    batch = step_from_bytes(step_to_bytes(driver._batch({0: 2, 1: 1})))
    assert [(item.logprobs, item.prompt_logprobs) for item in batch.opens] == [(0, 7), (None, None)]
