"""Grammars on the device: the same constraints as on the CPU, with steps in flight and with several ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from quire_client.demo import demo_model_dir
from tokenizers import Tokenizer

from request_fields.parameters import Grammar, GrammarKind
from tests.gpu.driver import DeviceDriver, load
from tests.unit.engine.driver import seeded
from tests.unit.engine.models import make_model
from worker_svc.engine.gpu.runner import DeviceRunner
from worker_svc.engine.sampling.grammars import RowMasks
from worker_svc.engine.sampling.masking import apply_masks

VOCAB = 2048
EOS = 2
PROMPT = [300, 301, 302]
GRAMMAR = Grammar(GrammarKind.REGEX, "[a-c]{2,4}-end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the tokenizer of the demo model."""
    made = make_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1)
    shutil.copy(demo_model_dir() / "tokenizer.json", made)
    return made


@pytest.fixture(scope="module")
def runner(folder: Path) -> DeviceRunner:
    return load(folder)


@pytest.fixture
def driver(runner: DeviceRunner) -> DeviceDriver:
    runner.reset_rows()
    return DeviceDriver(runner)


def text_of(output: list[int]) -> str:
    return Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json")).decode(output[: output.index(EOS)])


def test_the_output_matches_its_grammar_beside_a_free_row(driver: DeviceDriver) -> None:
    driver.open(0, PROMPT, seeded(3), grammar=GRAMMAR)
    driver.open(1, PROMPT, seeded(3))
    driver.step({0: len(PROMPT), 1: len(PROMPT)})
    driver.decode([0, 1], 11)
    together = list(driver.rows[1].output)
    assert driver.errors == []
    text = text_of(driver.rows[0].output)
    assert text.removesuffix("-end") in {"".join(part) for part in _words()}
    driver.close(0), driver.close(1)
    driver.open(1, PROMPT, seeded(3))
    driver.prefill(1)
    driver.decode([1], 11)
    assert driver.rows[1].output == together


def _words() -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = [()]
    for _ in range(4):
        words += [(*word, char) for word in words for char in "abc"]
    return [word for word in words if len(word) >= 2]


def test_a_reopened_row_continues_with_the_same_tokens(driver: DeviceDriver) -> None:
    driver.open(0, PROMPT, seeded(7), grammar=GRAMMAR)
    driver.prefill(0)
    driver.decode([0], 9)
    whole = list(driver.rows[0].output)
    driver.close(0)
    driver.open(1, PROMPT, seeded(7), output=whole[:3], grammar=GRAMMAR)
    driver.prefill(1)
    driver.decode([1], 6)
    assert driver.rows[1].output == whole


def test_a_grammar_that_cannot_be_compiled_fails_its_row_only(driver: DeviceDriver) -> None:
    driver.open(0, PROMPT, seeded(1), grammar=Grammar(GrammarKind.REGEX, "("))
    driver.open(1, PROMPT, seeded(1), grammar=GRAMMAR)
    output = driver.step({0: len(PROMPT), 1: len(PROMPT)})
    assert output.rows.tolist() == [1]
    (error,) = output.errors
    assert "unclosed group" in error.message


def test_the_end_is_sampled_if_min_tokens_leaves_nothing_else(driver: DeviceDriver) -> None:
    driver.open(0, PROMPT, seeded(2), banned=(EOS,), banned_before=50, grammar=Grammar(GrammarKind.REGEX, "ab"))
    driver.prefill(0)
    driver.decode([0], 3)
    assert text_of(driver.rows[0].output) == "ab"


def test_ranks_mask_their_parts_of_the_vocabulary() -> None:
    rng = np.random.default_rng(3)
    is_banned = rng.random((3, 40)) < 0.5
    is_banned[1] = True
    is_banned[1, 30] = False  # only the end is allowed, and another rule excludes it
    masks = RowMasks(np.array([0, 2, 3]), is_banned, {3: "failed"})
    logits = torch.from_numpy(rng.normal(size=(5, 40)).astype(np.float32))
    logits[2, 30] = -torch.inf
    whole, parts = logits.clone(), logits.clone()
    apply_masks(whole, masks, [30], has_rules=True)
    highest = torch.where(torch.from_numpy(is_banned), -torch.inf, logits[[0, 2, 3]]).amax(dim=1)
    for part in (range(16), range(16, 40)):
        cut = parts[:, part.start : part.stop].clone()
        apply_masks(cut, masks, [30], has_rules=True, first_id=part.start, max_over_ranks=lambda _: highest)
        parts[:, part.start : part.stop] = cut
    others = [0, 1, 2, 4]
    torch.testing.assert_close(parts[others], whole[others])
    assert parts[3].isnan().any()
    assert whole[2].argmax() == 30
    assert whole[2, 30] == 0
    assert whole[3].isnan().any()
    torch.testing.assert_close(whole[[1, 4]], logits[[1, 4]])
