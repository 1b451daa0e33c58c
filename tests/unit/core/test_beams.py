"""The rules of beam search, compared with `generate` of transformers on a model with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from request_fields.fields import FinishReason, StopCondition
from request_fields.parameters import BeamParams, EarlyStopping
from scheduler_svc.core.features.beam_search import BeamSearch, Candidates
from scheduler_svc.core.sequence import Completion

VOCAB, EOS = 24, 2
EARLY = {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.35, eos_token_id=EOS, bos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def best(search: BeamSearch, logprobs: np.ndarray) -> Candidates:
    ids = np.argsort(-logprobs, kind="stable")[: min(search.num_candidates, len(logprobs))]
    return Candidates(ids.astype(np.uint32), logprobs[ids])


def run(search: BeamSearch, logprobs_of: Callable[[list[list[int]]], np.ndarray], width: int) -> list[Completion]:
    """Search to the end with a function from outputs to log probabilities [width, vocab]."""
    outputs: list[list[int]] = [[] for _ in range(width)]
    while True:
        for beam, logprobs in enumerate(logprobs_of(outputs)):
            search.put(beam, best(search, logprobs))
        assert search.is_ready
        columns = [np.array(output, dtype=np.uint32) for output in outputs]
        moves = search.advance(len(outputs[0]) + 1, columns.__getitem__)
        if moves is None:
            return search.hypotheses
        outputs = [[*outputs[move.parent], move.token_id] for move in moves]


def model_logprobs(model: LlamaForCausalLM, prompt: list[int]) -> Callable[[list[list[int]]], np.ndarray]:
    def logprobs(outputs: list[list[int]]) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output for output in outputs])).logits[:, -1].float()
        return torch.log_softmax(logits, dim=-1).numpy()

    return logprobs


PROMPTS = {"short": [1, 5, 9], "long": [1, 7, 3, 3, 11, 4]}
SEARCHES = [("short", 2, 1.0), ("long", 4, 1.0), ("short", 4, 0.0), ("long", 3, 2.0), ("short", 4, -0.5)]
OTHERS = [(prompt, width, penalty) for _, width, penalty in SEARCHES for prompt in PROMPTS]


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(
    ("prompt", "width", "penalty"),
    [*SEARCHES, *(pytest.param(*each, marks=pytest.mark.deep) for each in OTHERS if each not in SEARCHES)],
)
def test_sequences_and_scores_equal_those_of_transformers(
    model: LlamaForCausalLM, prompt: str, width: int, penalty: float, early: EarlyStopping
) -> None:
    token_ids = PROMPTS[prompt]
    expected = model.generate(
        torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids), dtype=torch.long), max_new_tokens=20,
        num_beams=width, num_return_sequences=width, length_penalty=penalty, early_stopping=EARLY[early],
        do_sample=False, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    params = BeamParams(width, width, penalty, early)
    search = BeamSearch(params, StopCondition(20), frozenset({EOS}))
    got = run(search, model_logprobs(model, token_ids), width)
    sequences = [without_padding(sequence[len(token_ids) :].tolist()) for sequence in expected.sequences]
    assert [hypothesis.token_ids.tolist() for hypothesis in got] == sequences
    assert [hypothesis.score for hypothesis in got] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def without_padding(output: list[int]) -> list[int]:
    return output[: output.index(EOS) + 1] if EOS in output else output


def test_some_searches_of_the_comparison_end_before_the_limit(model: LlamaForCausalLM) -> None:
    """Otherwise the comparison would not test early stopping."""
    lengths = {}
    for early in EARLY:
        calls = itertools.count()
        logprobs = model_logprobs(model, [1, 5, 9])
        search = BeamSearch(BeamParams(4, 4, 1.0, early), StopCondition(20), frozenset({EOS}))
        run(search, lambda outputs, calls=calls, of=logprobs: (next(calls), of(outputs))[1], 4)
        lengths[early] = next(calls)
    assert lengths[EarlyStopping.TRUE] < lengths[EarlyStopping.NEVER]


def table(*rows: list[float]) -> Callable[[list[list[int]]], np.ndarray]:
    """Log probabilities that depend on the newest token only; the first row is for an empty output."""
    columns = np.array(rows, dtype=np.float32)
    return lambda outputs: columns[[output[-1] + 1 if output else 0 for output in outputs]]


def test_an_end_ranked_below_the_beam_width_is_not_kept() -> None:
    search = BeamSearch(BeamParams(2, 2), StopCondition(8), frozenset({0}))
    logprobs = np.array([-9.0, -1.0, -2.0, -3.0], dtype=np.float32)
    for beam in range(2):
        search.put(beam, best(search, logprobs))
    assert search.advance(1, lambda beam: np.empty(0, np.uint32)) is not None
    assert search.hypotheses == []


def test_the_best_continuation_of_a_beam_stays_in_its_row() -> None:
    search = BeamSearch(BeamParams(2, 1), StopCondition(8), frozenset())
    for beam in range(2):
        search.put(beam, Candidates(np.array([3, 5], np.uint32), np.array([-1, -2], np.float32)))
    moves = search.advance(1, lambda beam: np.empty(0, np.uint32))
    assert moves == [(0, 3), (0, 5)]
    search.put(0, Candidates(np.array([1, 2], np.uint32), np.array([-9, -9.5], np.float32)))
    search.put(1, Candidates(np.array([6, 7], np.uint32), np.array([-2, -1], np.float32)[::-1]))
    assert search.advance(2, lambda beam: np.empty(0, np.uint32)) == [(1, 7), (1, 6)]


def test_reasons_are_those_of_the_last_token() -> None:
    stop = StopCondition(2, stop_token_ids=frozenset({1}))
    search = BeamSearch(BeamParams(3, 3, 0.0), stop, frozenset({0}))
    rows = [[-1.0, -1.2, -0.9, -7.0]] * 5
    found = run(search, table(*rows), 3)
    assert {(tuple(h.token_ids.tolist()), h.end) for h in found} == {
        ((0,), FinishReason.EOS), ((1,), FinishReason.STOP), ((2, 2), FinishReason.LENGTH),
    }  # fmt: skip


def test_impossible_tokens_are_never_returned() -> None:
    """Only one sequence is possible, so only one is found."""
    impossible = -np.inf
    search = BeamSearch(BeamParams(2, 2), StopCondition(3, ignore_eos=True), frozenset())
    found = run(search, table(*[[impossible, -0.1, impossible]] * 4), 2)
    assert [h.token_ids.tolist() for h in found] == [[1, 1, 1]]


def test_candidates_are_dropped_at_a_recomputation() -> None:
    search = BeamSearch(BeamParams(2, 1), StopCondition(8), frozenset())
    search.put(0, Candidates(np.array([3], np.uint32), np.array([-1], np.float32)))
    search.forget_candidates()
    search.put(1, Candidates(np.array([3], np.uint32), np.array([-1], np.float32)))
    assert not search.is_ready
