"""Old answers as drafts: the place in the answer, what it proposes, and the same tokens with good and foreign ones."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_client.demo import demo_model_dir

from request_fields.fields import StopCondition
from tests.speculating import Answer, NoTimes, System
from tests.unit.engine.models import make_model
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.speculation.old_answers import ALWAYS_WRONG, MANY, OldAnswer, OldAnswers, least_match
from worker_svc.engine.step_runner import StepRunner
from worker_svc.simulator.model import SimConfig
from worker_svc.simulator.runner import SimRunner

MOST = 8


def column(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def steps_of(answer: list[int], output: list[int], most: int = MOST) -> tuple[int, int]:
    """The steps that compute an output, and those among them whose first draft is wrong."""
    old, whole = OldAnswer(column(answer)), column(output)
    known, num_steps, num_wrong = 1, 1, 0
    while known < len(output):
        drafts, num_right = old.propose(whole[:known], most), 0
        assert len(drafts) <= most
        while num_right < len(drafts) and output[known + num_right : known + num_right + 1] == [drafts[num_right]]:
            num_right += 1
        num_wrong += bool(drafts) and not num_right
        known, num_steps = known + num_right + 1, num_steps + 1
    return num_steps, num_wrong


def edited(answer: list[int], share: float, length: int, seed: int) -> list[int]:
    """An answer of which this share was replaced, inserted or removed, in pieces of `length` tokens."""
    rng, output = random.Random(seed), list(answer)
    for nth in range(round(share * len(answer) / length)):
        start = rng.randrange(3, len(output) - length)
        new = [rng.randrange(1000) for _ in range(length)]
        output[start : start + length * (nth % 3 != 1)] = new * (nth % 3 != 2)
    return output


def test_the_samples_of_a_request_sort_its_old_answer_once() -> None:
    """A request of 64 samples with 65,536 tokens would stop all rows of the worker for seconds."""
    answers, tokens = OldAnswers(cast(Any, None)), column(list(range(9)))
    for row, parent in ((3, None), (4, 3), (5, 4)):
        item = SimpleNamespace(row=row, fork_of_row=parent, draft_token_ids=tokens if parent is None else column([]))
        answers.open(cast(Any, item))
    assert answers.in_use[3].propose(column([8, 3, 4, 5]), MOST) == [6, 7, 8]
    found = [answers.in_use[row].index.places for row in (3, 4, 5)]
    assert found[0] is found[1] is found[2]
    assert answers.in_use[5].propose(column([8, 2, 3, 4]), MOST) == [5, 6, 7, 8]


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(1, 40)))
def test_each_proposal_is_a_piece_of_the_answer(answer: list[int], output: list[int], chunks: list[int]) -> None:
    old, end = OldAnswer(column(answer)), 0
    for chunk in [*chunks, len(output)]:
        end = min(end + chunk, len(output))
        found = old.propose(column(output[:end]), 5)
        assert len(found) <= 5
        assert not found or any(answer[i : i + len(found)] == found for i in range(len(answer)))


@given(st.lists(st.integers(0, 9), min_size=4, max_size=200, unique=False), st.integers(1, 199), st.booleans())
def test_an_equal_answer_is_proposed_from_the_start_and_after_any_number_of_tokens(
    answer: list[int], known: int, at_once: bool
) -> None:
    known = min(known, len(answer) - 1)
    old = OldAnswer(column(answer))
    for end in [] if at_once else range(1, known):
        old.propose(column(answer[:end]), 1)
    found = old.propose(column(answer[:known]), MOST)
    assert found == answer[known : known + MOST] or (at_once and known > 16 and len(set(answer)) < 4)


@pytest.mark.parametrize(("share", "length"), [(0.01, 1), (0.05, 5), (0.1, 1), (0.1, 20)])
def test_an_edited_answer_is_found_again(share: float, length: int) -> None:
    rng = random.Random(1)
    answer = [rng.choice((rng.randrange(1000), rng.randrange(20))) for _ in range(2000)]
    for seed in range(5):
        output = edited(answer, share, length, seed)
        assert steps_of(answer, output)[0] * 3 <= len(output)


def test_a_moved_piece_and_the_second_of_two_samples_are_found() -> None:
    rng = random.Random(2)
    first, second = ([rng.randrange(500) for _ in range(400)] for _ in range(2))
    for output in (first[300:] + first[:300], second):
        assert steps_of(first + second, output)[0] <= 400 / 9 + 12


@pytest.mark.parametrize("vocabulary", [4, 8, 1000])
def test_a_foreign_answer_is_wrong_a_few_times(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    answer, output = ([rng.randrange(vocabulary) for _ in range(2000)] for _ in range(2))
    limit = {4: 60, 8: 10, 1000: 3}[vocabulary]
    assert steps_of(answer, output)[1] <= limit
    assert steps_of([7] * 65536, output)[1] <= limit


def test_wrong_proposals_need_longer_matches_until_many_tokens_are_right() -> None:
    assert [least_match(num) for num in range(8)] == [0, 0, 1, 3, 7, 15, 31, 31]
    old = OldAnswer(column(list(range(100))))
    old._num_wrong = ALWAYS_WRONG
    output = [200, *range(1, 40)]
    assert [bool(old.propose(column(output[:end]), 1)) for end in range(1, 40)] == [end > MANY for end in range(1, 40)]


# -- engines ----------------------------------------------------------------------------------------------------------

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"seed": 1}, {"seed": 2, "n": 3, "top_p": 0.9}, {"seed": 3, "frequency_penalty": 0.8},
    {"seed": 4, "options": {"logprobs": 2}}, {"seed": 5, "json_schema": SCHEMA}, {"temperature": 0.0, "num_forced": 4},
    {"seed": 6, "allowed_token_ids": [5, 6, 7]}, {"seed": 7, "speculative": False},
]  # fmt: skip
SIZES = {"block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 48, "max_model_len": 96}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(300, 900, 6 + i).tolist() for i in range(len(REQUESTS))]


def answers_of(runner: StepRunner, drafts: list[list[int]], depth: int = 2) -> list[list[Answer]]:
    """The answers of the requests, with these old answers."""
    system, found = System(runner, depth), []
    for i, (prompt, asked) in enumerate(zip(prompts(), REQUESTS, strict=True)):
        fields = {name: value for name, value in asked.items() if name not in ("options", "num_forced")}
        options = dict(asked.get("options", {})) | ({"draft_token_ids": column(drafts[i]).tobytes()} if drafts else {})
        fields |= {"num_forced_tokens": 4} if "num_forced" in asked else {}
        found.append((system.add(prompt, StopCondition(40, ignore_eos=i % 2 == 0), options=options, **fields), asked))
    answers = system.run()
    return [[answers[handle, sample] for sample in range(asked.get("n", 1))] for handle, asked in found]


def make_runner(kind: str, **settings: Any) -> StepRunner:
    if kind == "sim":
        sim = SimConfig(step_ms=0.0, prefill_tokens_per_s=1e9, eos_probability=0.02)
        return SimRunner(EngineConfig(demo_model_dir(), **SIZES | {"num_blocks": 400} | settings), sim)
    return ModelRunner(EngineConfig(demo_model_dir(), "float32", threads=1, **SIZES | {"num_blocks": 400} | settings))


@pytest.mark.parametrize("kind", ["cpu", "sim"])
@pytest.mark.parametrize("speculate", [None, "suffix"])
def test_answers_are_those_without_old_ones(kind: str, speculate: str | None) -> None:
    """Also with a pool that preempts, and forks. Rows without an old answer have drafts only with --speculate."""
    plain = answers_of(make_runner(kind), [])
    good = [[token for sample in samples for token in sample.token_ids] for samples in plain]
    for nth, drafts in enumerate((good, [[*tokens[:9], 3, *tokens[10:]] for tokens in good], good[1:] + good[:1])):
        runner = make_runner(kind, speculate=speculate, num_blocks=60, max_drafts=MOST)
        runner._drafts._times = NoTimes()
        assert answers_of(runner, drafts, 1 + nth) == plain
        counts = runner.draft_counts
        assert counts.accepted.sum() > (200, 150, -1)[nth]
        assert bool(runner._drafts.in_use) == (speculate is not None)


def test_without_old_answers_no_row_has_drafts() -> None:
    runner = make_runner("cpu")
    answers_of(runner, [])
    assert runner.draft_counts.drafted.sum() == 0


@pytest.mark.parametrize(("family", "settings"), [("qwen3_5", {}), ("gpt_oss", {"has_groups": True})])
def test_layers_with_states_have_none_and_those_with_windows_have_some(tmp_path, family, settings) -> None:
    runner = ModelRunner(EngineConfig(make_model(tmp_path, family), "float32", threads=1, num_blocks=99, **SIZES))
    system = System(runner)
    plain = system.add([5, 6, 7], StopCondition(40, ignore_eos=True), temperature=0.0)
    tokens = system.run()[plain, 0].token_ids
    runner = ModelRunner(
        EngineConfig(runner._config.model_dir, "float32", threads=1, num_blocks=99, **SIZES | settings)
    )
    system, options = System(runner), {"draft_token_ids": column(tokens).tobytes()}
    handle = system.add([5, 6, 7], StopCondition(40, ignore_eos=True), options=options, temperature=0.0)
    assert system.run()[handle, 0].token_ids == tokens
    assert (runner.draft_counts is None) == (family == "qwen3_5")
    assert family == "qwen3_5" or runner.draft_counts.accepted.sum() > 20
