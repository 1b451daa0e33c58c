"""Speculation: the output with drafts, right or wrong, is the output without them, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from quire_client.demo import demo_model_dir

from request_fields.fields import StopCondition
from tests.speculating import Answer, GivenDrafts, NoTimes, System, speculate
from tests.unit.engine.models import make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.speculation.drafts import RowDrafts
from worker_svc.engine.step_runner import StepRunner
from worker_svc.simulator.model import SimConfig
from worker_svc.simulator.runner import SimRunner

REQUESTS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"seed": 11}, {"seed": 12, "top_p": 0.8, "top_k": 20},
    {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 0.0, "frequency_penalty": 1.5}, {"temperature": 0.0, "logit_bias": {7: 9.0, 9: 8.5}},
    {"seed": 3, "allowed_token_ids": [5, 6, 7, 8]}, {"temperature": 0.0, "options": {"logprobs": 3}},
    {"seed": 4, "options": {"banned_ids": np.array([2, 5], np.uint32).tobytes(), "banned_before": 9}},
    {"seed": 6, "n": 3},
]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("speculating"), "qwen3")


def make_runner(model_dir, dtype="float32", **settings):
    sizes = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 64, "max_model_len": 96}
    return ModelRunner(EngineConfig(model_dir, dtype, threads=1, **sizes | settings))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    words = [rng.integers(10, 200, 6).tolist() for _ in range(4)]
    return [[*rng.integers(10, 200, i % 5).tolist(), *(words[i % 4] * 3), *words[(i + 1) % 4][:3]] for i in range(11)]


def answers_of(runner: StepRunner, depth: int = 2, max_tokens: int = 30, **config: Any) -> list[Answer]:
    system = System(runner, depth, **config)
    for i, (prompt, fields) in enumerate(zip(prompts(), REQUESTS, strict=True)):
        stop_ids = frozenset((20, 21, 22, 23, 24, 25)) if i == 2 else frozenset()
        system.add(prompt, StopCondition(max_tokens - i, stop_ids, ignore_eos=i % 3 == 0), **fields)
    return list(system.run().values())


def expected_of(answers: list[Answer]) -> dict[bytes, list[int]]:
    """Proposals of `GivenDrafts`: the output of each request's first sample."""
    firsts = range(len(REQUESTS))
    given = zip(prompts(), firsts, strict=True)
    return {np.array(prompt, np.uint32).tobytes(): answers[i].token_ids + [3] * 8 for prompt, i in given}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_every_draft_gives_the_same_answers(model_dir, dtype):
    runner = make_runner(model_dir, dtype)
    plain = answers_of(runner)
    assert {answer.reason for answer in plain} == {"LENGTH", "EOS", "STOP"}
    steps = {}
    for right, most, depth in ((1.0, 4, 2), (0.7, 3, 2), (0.5, 8, 3), (0.0, 4, 2), (0.8, 5, 1)):
        drafts = speculate(runner, expected_of(plain), right, most)
        assert answers_of(runner, depth) == plain
        assert drafts.counts.drafted.sum() > 0
        steps[right] = drafts.counts.accepted[0] / drafts.counts.drafted[0]
    assert steps[1.0] > steps[0.7] > steps[0.0] == 0


def test_suffixes_chunks_and_preemption_give_the_same_answers(model_dir):
    plain = answers_of(make_runner(model_dir))
    runner = make_runner(model_dir, speculate="suffix", num_blocks=40, max_num_batched_tokens=24)
    runner._drafts._times = NoTimes()
    system_answers = answers_of(runner, burst_s=0.02)
    assert system_answers == plain
    assert runner.draft_counts.accepted.sum() > 0


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_recurrent_layers_give_the_same_answers(tmp_path, family, backend):
    folder = make_model(tmp_path, family)
    plain = answers_of(make_runner(folder, backend=backend))
    runner = make_runner(folder, backend=backend, speculate="suffix", max_drafts=5, max_num_batched_tokens=24)
    runner._drafts._proposer = GivenDrafts(runner._rows, expected_of(plain), 0.7)
    runner._drafts._times = NoTimes()
    assert answers_of(runner, 3) == plain
    assert runner.draft_counts.accepted.sum() > 10  # few, because each keeps a state


@pytest.mark.parametrize(("right", "depth"), [(0.7, 2), pytest.param(0.0, 2, marks=pytest.mark.deep)])
def test_cache_groups_give_the_same_answers(tmp_path, right, depth):
    """Rows free blocks behind windows that they have left for sure, and preempt."""
    folder = make_model(tmp_path, "gpt_oss", sliding_window=6)
    plain = answers_of(make_runner(folder))
    settings = {"speculate": "suffix", "max_drafts": 5, "has_groups": True, "num_blocks": 90, "max_num_seqs": 4}
    runner = make_runner(folder, max_num_batched_tokens=24, **settings)
    assert [group.attention_window for group in runner.info.groups] == [6]
    runner._drafts._proposer = GivenDrafts(runner._rows, expected_of(plain), right)
    runner._drafts._times = NoTimes()
    assert answers_of(runner, depth) == plain
    assert runner.draft_counts.drafted.sum() > 50


def test_a_row_that_refuses_speculation_has_no_drafts(model_dir):
    runner = make_runner(model_dir, speculate="suffix")
    runner._drafts._times = NoTimes()
    answers = []
    for speculative, has_drafts in ((False, False), (True, True)):
        system = System(runner)
        fields = {"seed": 3, "allowed_token_ids": [5, 6], "logit_bias": {5: 9.0}, "speculative": speculative}
        system.add(prompts()[0], StopCondition(40, ignore_eos=True), **fields)
        answers += system.run().values()
        assert bool(runner.draft_counts.drafted.sum()) == has_drafts
    assert answers[0] == answers[1]


def test_a_wrong_draft_that_is_accepted_is_noticed(model_dir, monkeypatch):
    runner = make_runner(model_dir)
    plain = answers_of(runner)
    monkeypatch.setattr(RowDrafts, "accept", lambda self, plan, num_after, token_ids, is_bad: ~is_bad)
    speculate(runner, expected_of(plain), 0.7)
    assert answers_of(runner) != plain


def test_a_simulated_worker_with_drafts_gives_the_same_answers():
    config = EngineConfig(
        demo_model_dir(), block_size=4, num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=96
    )
    sim = SimConfig(step_ms=0.0, prefill_tokens_per_s=1e9, eos_probability=0.02)
    plain = answers_of(SimRunner(config, sim))
    runner = SimRunner(config, sim)
    drafts = speculate(runner, expected_of(plain), 0.8)
    assert answers_of(runner) == plain
    assert drafts.counts.accepted.sum() > 20
    assert answers_of(SimRunner(replace(config, speculate="suffix"), sim)) == plain
