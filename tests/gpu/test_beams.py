"""Beams of the GPU engine: a hand-driven search against transformers, candidates against those of the CPU engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from step_protocol.features import BeamCandidates, BeamMoves
from step_protocol.messages import NO_RULES, RowOpen, StepBatch, TokenRules
from step_protocol.types import RowErrorCode
from tests.gpu.builders import DEVICE
from tests.gpu.driver import DeviceDriver, load
from tests.gpu.fake_graphs import FakeRecorder
from tests.gpu.ranks import Meeting, Rank
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import GREEDY, seeded, u32
from tests.unit.engine.models import load_reference, make_model
from worker_svc.engine.gpu import loading
from worker_svc.engine.gpu.collectives.group import ALONE
from worker_svc.engine.gpu.step.logprobs import Scorer
from worker_svc.engine.rows.beams import BeamLines, best_candidates, take_log_softmax
from worker_svc.engine.rows.open_rows import OpenRows
from worker_svc.engine.rows.tables import add_tables
from worker_svc.engine.step import RowErrors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIDTH, NUM_TOKENS = 3, 4
BEAMS = range(WIDTH)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), "qwen3", **SMALL | HEADS_4_2 | {"num_hidden_layers": 1})


def open_beams(driver, prompt, **fields):
    """Beams with blocks of their own for the whole search."""
    for row in BEAMS:
        state = driver.open(row, prompt, num_candidates=WIDTH, **fields)
        driver._grow(state, len(prompt) + NUM_TOKENS)
        driver._opens[-1] = replace(driver._opens[-1], block_table=u32(*state.blocks))


def move(driver, moves):
    """Beam i continues beam `parent` with a token. Its blocks are copies of the parent's."""
    former = {row: list(driver.rows[row].blocks) for row in BEAMS}
    tokens = {row: driver.rows[row].tokens[: driver.rows[row].computed] for row in BEAMS}
    copies, changes = [], []
    for row, (parent, token) in enumerate(moves):
        state = driver.rows[row]
        state.tokens = [*tokens[parent], token]
        if parent == row:
            continue
        state.blocks = [driver.free.pop(0) for _ in former[parent]]
        copies += zip(former[parent], state.blocks, strict=True)
        changes += [(row, index, block) for index, block in enumerate(state.blocks)]
    columns = (u32(*column) for column in (*zip(*copies, strict=True), *zip(*changes, strict=True)))
    names = ("copy_src", "copy_dst", "table_rows", "table_indices", "table_blocks")
    parents, ids = zip(*moves, strict=True)
    driver.add(parts=(BeamMoves(u32(*BEAMS), u32(*parents), u32(*ids)),))
    driver.add(**dict(zip(names, columns, strict=False)))


def search(driver, prompt, others=(), **fields):
    """Output tokens and sum of log probabilities of each beam, the best first. Other rows run beside the beams."""
    open_beams(driver, prompt, **fields)
    output = driver.step(dict.fromkeys(BEAMS, len(prompt)))
    totals = [0.0] * WIDTH
    for length in range(1, NUM_TOKENS + 1):
        assert driver.errors == []
        of_beams = output.part(BeamCandidates)
        assert len(of_beams.rows) == WIDTH * WIDTH
        found = zip(of_beams.rows.tolist(), of_beams.token_ids.tolist(), of_beams.logprobs.tolist(), strict=True)
        is_first = length == 1  # all beams are the same
        ranked = [(totals[row] + value, row, token) for row, token, value in found if not (is_first and row)]
        best = sorted(ranked, reverse=True)[:WIDTH]
        totals = [total for total, _, _ in best]
        move(driver, [(row, token) for _, row, token in best])
        if length < NUM_TOKENS:
            output = driver.step(dict.fromkeys([*others, *BEAMS], 1))
    driver._extra.clear()
    return [driver.rows[row].output for row in BEAMS], totals


def searched(folder, prompt, **settings):
    model, ids = load_reference(folder), torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, num_beams=WIDTH, do_sample=False,
            num_return_sequences=WIDTH, eos_token_id=None, pad_token_id=0, length_penalty=0.0, output_scores=True,
            return_dict_in_generate=True, **settings,
        )  # fmt: skip
    return [sequence[len(prompt) :].tolist() for sequence in found.sequences], found.sequences_scores.tolist()


def test_a_search_equals_that_of_transformers(qwen3, monkeypatch):
    """With graphs, beside a row that samples, whose tokens do not change."""
    recorder = FakeRecorder()
    monkeypatch.setattr(loading, "make_recorder", lambda device: recorder)
    driver = DeviceDriver(load(qwen3, num_blocks=256))
    prompt, other = small_prompts([21, 7])
    driver.open(4, other, seeded(8))
    driver.step({4: 7})
    tokens, totals = search(driver, prompt, others=[4])
    expected, scores = searched(qwen3, prompt)
    assert tokens == expected
    assert totals == pytest.approx(scores, abs=1e-4)
    alone = DeviceDriver(load(qwen3, cuda_graphs="off"))
    alone.open(4, other, seeded(8))
    alone.prefill(4)
    alone.decode([4], NUM_TOKENS - 1)
    assert driver.rows[4].tokens == alone.rows[4].tokens
    assert driver.runner.work_when_idle(), "the graph of beams, which are rare, is recorded when the worker is idle"


def test_penalties_and_rules_count_the_tokens_of_the_parent(qwen3):
    """Tokens that a beam sampled, or had before it continued another beam, must not count."""
    prompt = small_prompts([19])[0]
    plain, _ = searched(qwen3, prompt)
    word = plain[0][1:3]
    settings = {"repetition_penalty": 1.3, "bad_words_ids": [word], "min_new_tokens": 0}
    expected, scores = searched(qwen3, prompt, **settings)
    assert expected != plain
    driver = DeviceDriver(load(qwen3, num_blocks=256))
    rules = TokenRules(bad_words=(u32(*word),))
    tokens, totals = search(driver, prompt, sampling=replace(GREEDY, repetition_penalty=1.3), rules=rules)
    assert tokens == expected
    assert totals == pytest.approx(scores, abs=1e-4)


def test_a_beam_with_nan_fails_alone(qwen3):
    driver = DeviceDriver(load(qwen3))
    good, bad = small_prompts([8, 8])
    with torch.inference_mode():
        driver.runner._compute._model.parts.embedding[bad[3]] = torch.nan
    good = [token if token != bad[3] else 5 for token in good]
    driver.open(0, good, num_candidates=4)
    driver.open(1, bad, num_candidates=5)
    output = driver.step({0: 8, 1: 8})
    assert [(error.row, error.code) for error in driver.errors] == [(1, RowErrorCode.NAN)]
    assert output.part(BeamCandidates).rows.tolist() == [0] * 4


def candidates(logits, beams, group=ALONE):
    part = group.vocab_part(logits.shape[1])
    scorer = Scorer(part, group, DEVICE)
    processed = scorer.take_log_softmax(logits[:, part.start : part.stop].contiguous().to(DEVICE), beams.lines)
    found = scorer.candidates(processed, beams)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return found.read(), processed.cpu()


def test_candidates_of_all_ranks_equal_the_specification():
    """More beams than are computed at once, ties, excluded ids, candidates of both parts of the vocabulary."""
    logits = torch.randn(20, 38, generator=torch.Generator().manual_seed(3)) * 4
    logits[1], logits[2, 3:] = logits[1].round(), -torch.inf
    counts = np.array([5, 38, 7] + [1] * 15)
    beams = BeamLines(np.arange(1, 19), np.arange(18) + 7, counts)
    expected = logits.clone()
    take_log_softmax(expected, beams)
    wanted = best_candidates(expected, beams)
    whole, processed = candidates(logits, beams)
    assert torch.equal(processed[[0, 19]], logits[[0, 19]])
    torch.testing.assert_close(processed, expected, atol=2e-6, rtol=0)
    meeting = Meeting(2)

    def run_one(number):
        rank = Rank(number, meeting)
        with meeting.turn:
            return candidates(logits, beams, rank)[0]

    with ThreadPoolExecutor(2) as ranks:
        for found in (whole, *ranks.map(run_one, range(2))):
            np.testing.assert_array_equal(found.rows, wanted.rows)
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-6)
            np.testing.assert_array_equal(found.token_ids, wanted.token_ids)


def test_a_token_that_arrives_late_does_not_replace_that_of_a_moved_beam():
    rows, errors = OpenRows(2, 32, 16, 4, 50), RowErrors()
    beams = add_tables(rows).beams
    opens = [RowOpen(row, u32(1, 2), 2, u32(row), 0, GREEDY, 0, rules=NO_RULES, num_candidates=2) for row in (0, 1)]
    rows.open(opens, errors)
    both, ends = np.array([0, 1]), np.array([2, 2])
    rows.mark_computed(both, ends)
    rows.append(both, ends, u32(9, 9))
    generations = rows.generations(both).copy()
    none = u32()
    step = StepBatch(1, none, none, none, np.empty(0, np.bool_), none)
    step.add(BeamMoves(u32(1), u32(0), u32(7)))
    beams.apply(step, errors)
    rows.fill(both, generations, ends, u32(11, 12))
    assert not errors
    assert [rows.history(row)[1].tolist() for row in (0, 1)] == [[11], [7]]
