"""Drafts on the device: with them, right or wrong, the answers are those without, also with several steps in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from request_fields.fields import StopCondition, sampling_params
from step_protocol.messages import NO_RULES, RowOpen, StepBatch
from tests.gpu.driver import load
from tests.gpu.test_runner import SMALL
from tests.speculating import Answer, NoTimes, System
from tests.unit.engine.models import make_model
from worker_svc.engine.gpu import compute
from worker_svc.engine.gpu.check import Comparison
from worker_svc.engine.gpu.kernels import drafts as kernels
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.record import WORDS, apply_deltas
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.gpu.step.device_rows import changed_words, make_state
from worker_svc.engine.gpu.step.pending_step import PendingStep
from worker_svc.engine.gpu.step.processing import DeviceProcessing
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.positions import RowPositions
from worker_svc.engine.step import RowErrors

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 11},
    {"seed": 12, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"seed": 5, "frequency_penalty": 1.5, "logit_bias": {7: 4.0}},
    {"seed": 3, "allowed_token_ids": [5, 6, 7, 8]},
    {"temperature": 0.0, "options": {"logprobs": 3}},
    {"seed": 4, "options": {"banned_ids": np.array([2, 5], np.uint32).tobytes(), "banned_before": 9}},
    {"seed": 6, "n": 3, "options": {"logprobs": 0}},
    {"seed": 8, "speculative": False},
]
ROOM = {
    "num_blocks": 128, "block_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 64, "max_model_len": 96,
    "determinism": "exact",
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("speculating"), "qwen3", **SMALL)


@pytest.fixture(autouse=True)
def _steps_end_when_they_are_read(monkeypatch):
    """Simulates a device: there the host does not know the tokens of steps in flight."""
    monkeypatch.setattr(PendingStep, "is_done", lambda self: self._output is not None)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    words = [rng.integers(10, 97, 6).tolist() for _ in range(4)]
    return [
        [*rng.integers(10, 97, i % 5).tolist(), *(words[i % 4] * 3), *words[(i + 1) % 4][:3]]
        for i in range(len(REQUESTS))
    ]


def answers_of(runner: DeviceRunner, depth: int = 2, max_tokens: int = 24, count: int = len(REQUESTS)) -> list[Answer]:
    system = System(runner, depth)
    for i, (prompt, fields) in enumerate(zip(prompts()[:count], REQUESTS, strict=False)):
        stop_ids = frozenset(range(20, 40)) if i == 1 else frozenset()
        system.add(prompt, StopCondition(max_tokens - i, stop_ids, ignore_eos=i % 3 == 0), **fields)
    return list(system.run().values())


def speculating(model_dir, **settings: Any) -> DeviceRunner:
    runner = load(model_dir, **(ROOM | {"speculate": "suffix", "max_drafts": 4} | settings))
    runner._drafts._times = NoTimes()
    return runner


def propose(monkeypatch, answers: list[Answer], right: float) -> None:
    """Let the device propose the first samples of these answers, some of them changed."""
    known = {tuple(prompt): answer.token_ids for prompt, answer in zip(prompts(), answers, strict=False)}
    rng = np.random.default_rng(1)

    def suffix(lines: Any, state: torch.Tensor, tables: Any) -> None:
        history, drafts = tables
        for row in lines.rows[(lines.rows >= 0) & (lines.nth == 0)].tolist():
            end, prompt_len = (int(state[row, WORDS[name]]) for name in ("num_tokens", "prompt_len"))
            output = known.get(tuple(history[row, :prompt_len].tolist()), [])[end - prompt_len :]
            found = (output + [3] * drafts.shape[1])[: drafts.shape[1]]
            drafts[row] = torch.tensor([t if rng.random() < right else int(rng.integers(0, 97)) for t in found])

    monkeypatch.setattr(compute, "suffix", suffix)


@pytest.fixture(scope="module")
def plain(model_dir) -> list[Answer]:
    return answers_of(load(model_dir, kernels="torch", **ROOM), 1)


@pytest.mark.parametrize(("right", "depth"), [
    (1.0, 2), (0.7, 3), pytest.param(0.0, 2, marks=pytest.mark.deep), pytest.param(0.8, 1, marks=pytest.mark.deep),
])  # fmt: skip
def test_every_draft_gives_the_same_answers(model_dir, plain, monkeypatch, right, depth):
    propose(monkeypatch, plain, right)
    runner = speculating(model_dir, kernels="torch")
    assert answers_of(runner, depth) == plain
    counts = runner.draft_counts
    assert counts.drafted.sum() > 30
    assert (counts.accepted.sum() > 20) == (right > 0.5)


def test_suffixes_and_preemption_give_the_same_answers(model_dir, plain):
    runner = speculating(model_dir, kernels="torch", num_blocks=44, max_num_batched_tokens=24)
    assert answers_of(runner, 3) == plain
    assert runner.draft_counts.accepted.sum() > 0


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.deep)])
def test_states_within_drafts_give_the_same_answers(tmp_path, monkeypatch, name):
    folder = make_model(tmp_path, name, vocab_size=97)
    plain = answers_of(load(folder, kernels="torch", **ROOM), 1, count=4)
    propose(monkeypatch, plain, 0.7)
    runner = speculating(folder, kernels="torch")
    assert answers_of(runner, 2, count=4) == plain
    assert runner.draft_counts.accepted.sum() > 5
    assert runner.info.degradations[-1].startswith("no step is launched ahead")


@pytest.mark.parametrize("plant", ["accept all", "rows are not taken back"])
def test_planted_bugs_are_found(model_dir, plain, monkeypatch, plant):
    propose(monkeypatch, plain, 0.6)
    runner = speculating(model_dir, kernels="torch")
    if plant == "accept all":
        monkeypatch.setattr(compute, "accept", lambda lines, state, sampled, tables, kept: kept.copy_(0))
    else:
        monkeypatch.setattr(runner._rows, "take_back", lambda rows, counts: None)
    with pytest.raises(AssertionError):
        assert answers_of(runner) == plain


@pytest.mark.parametrize("determinism", ["exact", pytest.param("best_effort", marks=pytest.mark.deep)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding holds any numbers
def test_kernels_of_triton_give_the_same_answers(model_dir, determinism):
    """Also the same as their torch forms, where they run for the first time with arguments of a shape."""
    fields = {"allowed_token_ids": [5, 6], "frequency_penalty": 0.2, "logit_bias": {5: 3.0}}
    requests = [({"seed": 3} | fields, 9), ({"seed": 9, "top_k": 1, "logit_bias": {5: 50.0}}, 8)]

    def run(runner: DeviceRunner) -> list[list[int]]:
        system = System(runner)
        for sampling, max_tokens in requests:
            system.add([5, 5, 5, 6, 5, 5, 5], StopCondition(max_tokens, ignore_eos=True), **sampling)
        return [answer.token_ids for answer in system.run().values()]

    settings = {"determinism": determinism, "max_num_seqs": 2, "max_drafts": 3}
    plain = run(load(model_dir, kernels="torch", **(ROOM | settings)))
    runner = speculating(model_dir, **settings)
    runner._forms = compared = Comparison(forms.TRITON)
    assert run(runner) == plain
    assert runner.draft_counts.accepted.sum() > 0
    assert {name for name, fault in compared.faults.items() if fault} <= {"process"}  # it does not write padding
    assert {"accept", "suffix", "output_positions", "prepare"} <= set(compared.faults)


def test_drafts_count_as_output_before_the_tokens_behind_them():
    """Penalties and bad words of samples behind 0, 1 and 3 drafts are those of a row that has these tokens."""
    rng, vocab, device = np.random.default_rng(1), 40, torch.device("cpu")
    output = [3, 8, 3]
    drafts = [8, 8, 5]
    fields = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4}
    row = RowOpen(
        1, np.array([9, 3, *output], np.uint32), 2, np.arange(2, dtype=np.uint32), 0, sampling_params(fields), 0,
        rules=replace(NO_RULES, bad_words=tuple(np.array(w, np.uint32) for w in ([3, 8, 11], [3, 8, 12], [8, 5, 13]))),
    )  # fmt: skip
    logits = torch.from_numpy(rng.standard_normal((4, vocab)).astype(np.float32))
    nth, sampled_from, ids = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2, 3], [2, 3, 4, 5], [0, 0, 3, *drafts])
    )
    found = {}
    for name in ("torch", "triton", "alone"):
        rows = OpenRows(3, 64, 16, 8, vocab)
        state = make_state(3, 4, device)
        processing = DeviceProcessing(state, range(vocab))
        rows.add_parts(processing.serve(rows))
        rows.open([row], RowErrors())
        step = StepBatch(0, *[np.empty(0, np.uint32)] * 5, opens=[row])
        apply_deltas(state, torch.from_numpy(changed_words(step, rows, RowPositions(3), state.shape[1])))
        of_row, positions = torch.ones(4, dtype=torch.int32), torch.arange(3, 7, dtype=torch.int32)
        if name != "alone":
            with forms.using(forms.TORCH if name == "torch" else forms.TRITON):
                found[name] = processing.processed(logits, of_row, positions, (nth, sampled_from, ids))
            continue
        alone = []
        for line in range(4):
            alone.append(processing.processed(logits[line : line + 1], of_row[:1], positions[line : line + 1]))
            if line < 3:
                processing.note(ids[3 + line : 4 + line], of_row[:1], positions[line : line + 1])
        found[name] = torch.cat(alone)
    assert torch.equal(found["torch"], found["alone"])
    assert torch.equal(found["triton"], found["alone"])
    assert found["alone"][:, [11, 12, 13]].isinf().tolist() == [
        [False] * 3,
        [True, True, False],
        [False] * 3,
        [False, False, True],
    ]


def test_the_continuation_of_the_longest_match_is_proposed():
    """Also where the history is a ring, and where what follows the match ends."""
    rng, size = np.random.default_rng(3), kernels.HISTORY
    state = make_state(3, 1, torch.device("cpu"))
    tables = kernels.empty_tables(3, 5, torch.device("cpu"))
    tokens = rng.integers(0, 9, (3, size + 300))
    tokens[1, :40], tokens[2, 30:] = 7, np.arange(size + 270)
    for row, length in enumerate((size + 300, 40, 200)):
        state[row, WORDS["num_tokens"]] = length
        for position in range(max(0, length - size), length):
            tables[0][row, position % size] = int(tokens[row, position])
    none = torch.zeros(4, dtype=torch.int32)
    lines = kernels.SampleLines(torch.tensor([2, 0, 1, -1], dtype=torch.int32), none, none, none, none)
    found = {}
    for name, chosen in (("torch", forms.TORCH), ("triton", forms.TRITON)):
        tables[1].fill_(-5)
        with forms.using(chosen):
            kernels.suffix(lines, state, tables)
        found[name] = tables[1].tolist()
    assert found["torch"] == found["triton"]
    assert found["torch"][1:] == [[7] * 5, [-1] * 5]
    tail = tokens[0, -8:].tolist()
    text, best = tokens[0].tolist(), tuple(found["torch"][0])
    longest = max(range(3, 9), key=lambda n: (_occurs(text, tail[-n:]), n))
    assert any(tuple(text[i + longest : i + longest + 5]) == best for i in _places(text, tail[-longest:]))


def _places(text: list[int], part: list[int]) -> list[int]:
    return [i for i in range(400, len(text) - len(part) - 5) if text[i : i + len(part)] == part]


def _occurs(text: list[int], part: list[int]) -> bool:
    return bool(_places(text, part))
