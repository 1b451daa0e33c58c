"""Inputs besides tokens: the same bits as tokens with these embeddings, and refusals that name the input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.carried import embeddings, random_embeddings, rows_of, with_content_ids
from tests.unit.engine.driver import GREEDY, Driver
from tests.unit.engine.models import ARCHITECTURES, load_reference, make_model
from tests.unit.engine.test_engine_models import prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner

HIDDEN = 64
# One architecture each with scaled embeddings, learned positions and neither; the others differ in later layers only.
KINDS = ("qwen3", "gemma2", "gpt2")
WITHOUT = ("gemma3n", "gemma4")  # they need the token of each position
CASES = [(name, backend) for name in ARCHITECTURES if name not in WITHOUT for backend in ("cpu", "reference")]


@pytest.mark.parametrize("architecture", WITHOUT)
def test_models_with_embeddings_per_layer_accept_no_inputs(tmp_path, architecture):
    assert load(make_model(tmp_path, architecture)).info.hidden_size == 0


def load(folder, dtype="float32", backend="cpu"):
    return ModelRunner(EngineConfig(folder, dtype, backend=backend, num_blocks=64, max_num_seqs=8, threads=1))


def logits_at(driver: Driver, row: int) -> list[torch.Tensor]:
    return [value for (of, _), value in sorted(driver.logits.items(), key=lambda item: item[0]) if of == row]


def check_against(reference, driver, row, inputs_embeds):
    """Logits and greedy tokens of a row against one pass of transformers over embeddings."""
    state = driver.rows[row]
    output = reference.get_input_embeddings()(torch.tensor(state.output, dtype=torch.long))
    with torch.no_grad():
        expected = reference(inputs_embeds=torch.cat((inputs_embeds, output)).unsqueeze(0)).logits[0]
    for position in range(state.prompt_len, len(state.tokens)):
        assert (driver.logits[row, position] - expected[position - 1]).abs().max() < 1e-4
        assert state.tokens[position] == int(expected[position - 1].argmax())


def check_mixed_inputs(reference, driver, whole, mixed, parts, plain, chunks):
    """Row 0 is an input as a whole, row 1 has tokens and inputs, row 2 tokens. `chunks`: tokens of each step."""
    driver.open(0, with_content_ids([0] * whole.length, whole), inputs=(whole,))
    driver.open(1, with_content_ids(mixed, *parts), inputs=tuple(parts))
    driver.open(2, plain)
    for chunk in chunks:
        driver.step(chunk)
    driver.decode([2, 0, 1], 4)
    assert driver.errors == []
    table = reference.get_input_embeddings()
    expected = table(torch.tensor(mixed)).detach()
    for part in parts:
        expected[part.start : part.start + part.length] = rows_of(part)
    check_against(reference, driver, 0, rows_of(whole))
    check_against(reference, driver, 1, expected)
    check_against(reference, driver, 2, table(torch.tensor(plain)).detach())


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [pytest.param(*case, marks=() if case[0] in KINDS and case[1] == "cpu" else pytest.mark.deep) for case in CASES],
)
def test_inputs_in_mixed_batches_match_transformers(tmp_path, architecture, backend):
    folder = make_model(tmp_path, architecture)
    reference = load_reference(folder)
    driver = Driver(load(folder, backend=backend))
    hidden = driver.runner.info.hidden_size
    whole = random_embeddings(45, hidden, seed=1)
    parts = [random_embeddings(7, hidden, seed=2, start=3), random_embeddings(20, hidden, seed=3, start=10)]
    mixed, plain = prompts([40, 21])
    chunks = ({0: 16, 1: 5}, {1: 14, 2: 10, 0: 20}, {0: 9, 2: 11, 1: 21})
    check_mixed_inputs(reference, driver, whole, mixed, parts, plain, chunks)


@pytest.mark.parametrize(("dtype", "backend"), [("float32", "cpu"), ("bfloat16", "cpu"), ("bfloat16", "reference")])
def test_embeddings_of_tokens_give_the_bits_of_the_tokens(tmp_path, dtype, backend):
    folder = make_model(tmp_path, dtype=getattr(torch, dtype))
    table = load_reference(folder, getattr(torch, dtype)).get_input_embeddings().weight.detach()
    (prompt,) = prompts([50])
    driver = Driver(load(folder, dtype=dtype, backend=backend))
    item = embeddings(table[torch.tensor(prompt[5:30])], 5)
    as_float32 = embeddings(table[torch.tensor(prompt)].float())
    driver.open(0, prompt)
    driver.open(1, with_content_ids(prompt, item), inputs=(item,))
    driver.open(2, with_content_ids(prompt, as_float32), inputs=(as_float32,))
    driver.step({0: 50, 1: 17, 2: 50})
    driver.prefill(1, 9)
    driver.decode([0, 1, 2], 3)
    assert driver.errors == []
    expected = logits_at(driver, 0)
    for row in (1, 2):
        assert all(map(torch.equal, logits_at(driver, row), expected))
        assert driver.rows[row].output == driver.rows[0].output


def test_a_row_needs_no_input_for_computed_positions(tmp_path):
    """A prefix hit, a preemption after the prompt, and a fork."""
    folder = make_model(tmp_path)
    driver = Driver(load(folder))
    (prompt,) = prompts([40])
    item, late = random_embeddings(32, HIDDEN, seed=1), random_embeddings(3, HIDDEN, seed=2, start=35)
    ids = with_content_ids(prompt, item, late)
    driver.open(0, ids, inputs=(item, late))
    driver.prefill(0)
    driver.decode([0], 4)
    driver.open(1, ids, shared=driver.rows[0].blocks[:2], inputs=(late,))
    driver.prefill(1, 5)
    driver.decode([1], 4)
    assert driver.errors == []
    assert driver.rows[1].tokens == driver.rows[0].tokens
    assert all(map(torch.equal, logits_at(driver, 1), logits_at(driver, 0)))


def test_prompt_positions_without_a_token_have_no_penalty(tmp_path):
    """Repetition penalty counts the tokens of the prompt only. Both backends agree."""
    folder = make_model(tmp_path)
    penalized = replace(GREEDY, repetition_penalty=1.7, frequency_penalty=0.3)
    (prompt,) = prompts([30])
    item = random_embeddings(10, HIDDEN, start=4)
    outputs = []
    for backend in ("cpu", "reference"):
        driver = Driver(load(folder, backend=backend))
        driver.open(0, with_content_ids(prompt, item), penalized, inputs=(item,))
        driver.prefill(0)
        driver.decode([0], 12)
        assert driver.errors == []
        outputs.append(driver.rows[0].output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "audio"}, "inputs[0] has kind 'audio', expected 'embeddings'"),
        ({"kind": "image"}, "inputs[0] is an image of float32; this worker's model takes none"),
        ({"dtype": "int8"}, "inputs[0] has dtype 'int8', expected one of float32, bfloat16, float16"),
        ({"shape": (8, 63)}, "inputs[0] has shape (8, 63), expected (8, 64)"),
        ({"data": b"\0" * 2044}, "inputs[0] has 2044 bytes of data, expected 2048"),
        ({"start": 13}, "inputs[0] has positions 13 to 20, expected some from 0 to the prompt's last"),
        ({"length": 0}, "inputs[0] has positions 4 to 3"),
        ({"start": 5}, "the token ids at the positions of inputs[0] are not the content ids of its digest"),
        ({"digest": b"short"}, "are not the content ids of its digest"),
    ],
)
def test_a_bad_input_fails_its_row_only(tmp_path, change, words):
    driver = Driver(load(make_model(tmp_path)))
    (prompt,) = prompts([20])
    item = random_embeddings(8, HIDDEN, start=4)
    driver.open(0, with_content_ids(prompt, item), inputs=(replace(item, **change),))
    driver.open(1, prompt)
    driver.step({0: 20, 1: 20})
    assert [error.row for error in driver.errors] == [0]
    assert words in driver.errors[0].message
    assert len(driver.rows[1].output) == 1


def test_ids_beyond_the_vocabulary_need_an_input(tmp_path):
    driver = Driver(load(make_model(tmp_path)))
    (prompt,) = prompts([20])
    first, second = random_embeddings(4, HIDDEN, start=2), random_embeddings(4, HIDDEN, seed=1, start=5)
    ids = with_content_ids(prompt, first)
    driver.open(0, ids)
    driver.open(1, [*prompt[:3], 211, *prompt[4:]])
    driver.open(2, with_content_ids(prompt, second, first), inputs=(first, second))
    driver.open(3, ids, inputs=(first,), prompt_logprobs=0)
    driver.open(4, prompt, output=ids[2:4])
    driver.step(dict.fromkeys(range(5), 20))
    messages = {error.row: error.message for error in driver.errors}
    assert f"token id {ids[2]} at position 2 is not below the vocabulary size 211" in messages[0]
    assert "token id 211 at position 3 is not below the vocabulary size 211" in messages[1]
    assert "inputs[1] has positions 5 to 8, expected some from 6" in messages[2]
    assert "prompt_logprobs cannot be combined with inputs" in messages[3]
    assert f"token id {ids[2]} at position 20" in messages[4]
