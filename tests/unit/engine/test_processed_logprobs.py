"""Processed log probabilities against their definition in numpy, and scores of forced tokens against those of the same
tokens when they were sampled: the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xxhash
from quire_client.demo import demo_model_dir

from request_fields.fields import SamplingParams
from step_protocol.types import RowErrorCode
from tests.unit.engine.adapters import make_adapter, targets_of
from tests.unit.engine.driver import GREEDY, Driver, seeded
from tests.unit.engine.models import make_model
from tests.unit.engine.processor_cases import CASES
from tests.unit.engine.test_engine_adapters import place
from tests.unit.engine.test_engine_models import load, prompts
from tests.unit.engine.test_grammars import GRAMMARS
from worker_svc.engine.backend import SamplingColumns
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.cpu.backend import CpuBackend
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.sampling.noise import keep_threshold

FILTERS = (
    {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.3, "top_k": 20}, {"temperature": 2.0, "top_p": 0.99},
)  # fmt: skip


def definition(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Log probabilities [vocab] of the distribution from which a token is drawn, in float64."""
    z = logits.float().numpy()
    if params.temperature == 0:
        return np.where(np.arange(len(z)) == z.argmax(), 0.0, -np.inf)
    z = z / np.float32(params.temperature)
    kept = np.where(z >= keep_threshold(z, params), z.astype(np.float64), -np.inf)
    return kept - kept.max() - np.log(np.exp(kept - kept.max()).sum())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_processed_logprobs_equal_their_definition(tmp_path, backend):
    driver = Driver(load(make_model(tmp_path), backend=backend))
    params = [GREEDY, *(seeded(7, **given) for given in FILTERS)]
    for row, (prompt, sampling) in enumerate(zip(prompts([5, 18, 9, 31, 7, 12, 3, 8]), params, strict=True)):
        driver.open(row, prompt, sampling, logprobs=128, processed=row != 2)
    driver.step({row: len(driver.rows[row].tokens) for row in range(8)})
    driver.decode([*range(8)], 3)
    for (row, position), score in driver.scores.items():
        logits, (raw, num_kept) = driver.logits[row, position], score.extras
        token = driver.rows[row].tokens[position]
        assert abs(raw - float(logits.double().log_softmax(-1)[token])) < 1e-5
        if row == 2:
            assert num_kept == 0
            assert raw == score.values[0], "the row asks for raw values"
            continue
        expected = definition(logits, params[row])
        np.testing.assert_allclose(np.exp(score.values), np.exp(expected[score.token_ids]), atol=1e-6)
        finite = np.isfinite(score.values)
        np.testing.assert_allclose(
            np.array(score.values)[finite], expected[score.token_ids][finite], rtol=1e-6, atol=2e-6
        )
        assert num_kept == np.isfinite(expected).sum()
        if num_kept <= 128:
            assert abs(np.exp(np.array(score.values[1:], np.float64)).sum() - 1) < 1e-6
        assert score.rank == 1 + (expected > expected[token]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 4099])
def test_the_kernel_keeps_the_ids_of_the_specification(kernel_build, dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(9, vocab, generator=generator) * 4).to(dtype)
    logits[1] = logits[1].round()
    logits[2, ::2] = -torch.inf if vocab > 1 else 0.0
    logits[8, vocab // 2] = torch.nan
    params = [GREEDY, *(seeded(1, **given) for given in FILTERS), seeded(1)]
    columns = SamplingColumns(
        {name: np.array([getattr(one, name) for one in params], OpenRows(1, 16, 16, 1, vocab)._sampling[name].dtype)
         for name in ("temperature", "top_k", "top_p", "min_p", "top_a", "seed", "repetition_penalty",
                      "frequency_penalty", "presence_penalty")}
        | {"sample_index": np.zeros(9, np.uint32)},
        np.arange(9),
        np.zeros(9, np.uint32),
    )  # fmt: skip
    lines = np.array([0, 1, 2, 3, 4, 5, 6, 2, 8])
    found = [backend.filter_logits(logits, lines, columns) for backend in (CpuBackend(2), ReferenceBackend("exact"))]
    np.testing.assert_array_equal(found[0][0].numpy(), found[1][0].numpy())
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert found[0][1][8] == 0
    assert found[0][0][8].isnan().all()


# -- Score equals Generate -----------------------------------------------------------------------------------------


def score_forced(driver: Driver, row: int, prompt: Sequence[int], output: Sequence[int], **given: object) -> list:
    """The scores of forced tokens: they are part of the prompt that the scheduler sends."""
    driver.open(row, list(prompt), output=list(output), prompt_logprobs=4, num_forced=len(output), **given)  # type: ignore[arg-type]
    driver.prefill(row, chunk=7)
    assert driver.errors == []
    driver.close(row)
    found = {position: driver.scores.pop((row, position)) for row_, position in [*driver.scores] if row_ == row}
    return [found[position] for position in range(len(prompt), len(prompt) + len(output))]


def generated(driver: Driver, row: int, steps: int) -> list:
    state = driver.rows[row]
    driver.decode([row], steps - 1)
    return [driver.scores[row, position] for position in range(state.prompt_len, state.prompt_len + steps)]


@pytest.mark.parametrize(
    ("backend", "settings"),
    [("cpu", {}), ("reference", {}), ("cpu", {"dtype": "bfloat16"}), ("cpu", {"quantize": "int8"})],
    ids=["cpu", "reference", "bf16", "int8"],
)
def test_forced_tokens_have_the_bits_of_sampled_ones(tmp_path, backend, settings):
    folder = make_model(tmp_path)
    first, second = (Driver(load_as(folder, backend, settings)) for _ in range(2))
    asked = CASES["all"]
    sampling = seeded(3, 0.8, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2)
    options = {"banned": asked.banned, "banned_before": 3, "rules": asked.rules, "processed": True, "digests": True}
    prompt, other = prompts([21, 40])
    first.open(5, other, seeded(1), logprobs=0)
    first.open(2, prompt, sampling, logprobs=4, sample_index=3, **options)
    first.step({5: 40, 2: 13})
    first.step({5: 1, 2: 8})
    for _ in range(4):
        first.step({2: 1, 5: 1})
    expected = [first.scores[2, position] for position in range(21, 26)]
    output = first.rows[2].output
    assert score_forced(second, 0, prompt, output, sampling=sampling, sample_index=3, **options) == expected
    assert len({score.extras[2] for score in expected}) == len(expected), "each position has its own digest"


def load_as(folder, backend, settings):
    fields = {"dtype": "float32", "num_blocks": 64, "max_num_seqs": 8, "threads": 2, "block_size": 16} | settings
    return ModelRunner(EngineConfig(folder, backend=backend, **fields))


def test_digests_are_those_of_the_logits(tmp_path):
    driver = Driver(load(make_model(tmp_path)))
    prompt = prompts([9])[0]
    driver.open(0, prompt, logprobs=0, digests=True)
    driver.open(1, prompt, logprobs=0)
    driver.step({0: 9, 1: 9})
    logits = driver.logits[0, 9]
    assert driver.scores[0, 9].extras == (xxhash.xxh3_64_intdigest(logits.numpy().tobytes()),)
    assert driver.scores[1, 9].extras == (0,)


def test_forced_tokens_with_an_adapter_and_after_a_prefix_hit(tmp_path):
    folder = make_model(tmp_path)
    adapter = make_adapter(folder, tmp_path / "adapter", r=4, target_modules=targets_of("qwen3"))
    runner = load(folder, max_adapters=2)
    digest = place(runner, "one", adapter)
    driver = Driver(runner)
    prompt = prompts([40])[0]
    driver.open(0, prompt, seeded(2), adapter=digest)
    driver.prefill(0)
    shared = driver.rows[0].blocks[:2]
    driver.open(1, prompt, seeded(2, top_k=8), shared=shared, logprobs=4, processed=True, adapter=digest)
    driver.prefill(1)
    expected = generated(driver, 1, 6)
    output = driver.rows[1].output
    assert (
        score_forced(driver, 2, prompt, output, sampling=seeded(2, top_k=8), processed=True, adapter=digest) == expected
    )
    other = score_forced(driver, 2, prompt, output, sampling=seeded(2, top_k=8), processed=True)
    assert other != expected, "without the adapter"


def test_sampling_continues_after_forced_tokens(tmp_path):
    driver = Driver(load(make_model(tmp_path)))
    prompt = prompts([10])[0]
    driver.open(0, prompt, seeded(9, 1.5))
    driver.prefill(0)
    driver.decode([0], 7)
    output = driver.rows[0].output
    driver.open(1, prompt, seeded(9, 1.5), output=output[:3], num_forced=3, prompt_logprobs=0)
    driver.prefill(1)
    driver.decode([1], 4)
    assert driver.rows[1].output == output
    assert sorted(p for row, p in driver.scores if row == 1) == [*range(1, 13)]


@pytest.mark.parametrize("kind", ["schema", "regex"])
def test_forced_tokens_of_a_grammar(kind):
    runner = load_as(demo_model_dir(), "cpu", {})
    driver, grammar = Driver(runner), GRAMMARS[kind]
    sampling = seeded(4, top_p=0.9, presence_penalty=0.5)
    driver.open(0, [300, 301, 302], sampling, grammar=grammar, logprobs=4, processed=True)
    driver.prefill(0)
    expected = generated(driver, 0, 12)
    output = driver.rows[0].output[:12]
    assert (
        score_forced(driver, 1, [300, 301, 302], output, sampling=sampling, grammar=grammar, processed=True) == expected
    )


def test_a_token_that_cannot_be_drawn_scores_minus_infinity(tmp_path):
    driver = Driver(load(make_model(tmp_path)))
    prompt = prompts([10])[0]
    scores = score_forced(driver, 0, prompt, [5, 6], sampling=GREEDY, processed=True)
    assert [score.values[0] for score in scores] == [-np.inf, -np.inf]
    assert [score.values[1] for score in scores] == [0.0, 0.0]


def test_more_forced_tokens_than_known_are_refused(tmp_path):
    driver = Driver(load(make_model(tmp_path)))
    driver.open(0, prompts([10])[0], num_forced=3, prompt_logprobs=0)
    driver.step({0: 10})
    assert [error.code for error in driver.errors] == [RowErrorCode.BAD_INPUT]
    assert "num_forced_tokens is 3" in driver.errors[0].message
