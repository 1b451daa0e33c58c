"""Tests of rows that need processing, with the same steps for the CPU and the GPU engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from step_protocol.messages import TokenRules
from tests.unit.engine.driver import Driver, u32
from tests.unit.engine.processor_cases import CASES, Asked, f32

PROMPT = [3, 9, 4, 9, 5, 11, 3, 3, 17, 20, 33, 2, 1, 9, 40, 3]  # a full block
NUM_OUTPUT = 10


def open_row(driver: Driver, row: int, asked: Asked, output: Sequence[int] = (), sample_index: int = 0) -> None:
    driver.open(
        row, PROMPT, asked.sampling, output=list(output), sample_index=sample_index, banned=asked.banned,
        banned_before=asked.banned_before, rules=asked.rules,
    )  # fmt: skip


def tokens_of(
    driver: Driver, asked: Asked, output: Sequence[int] = (), chunk: int = 100, sample_index: int = 0
) -> list[int]:
    """The output of a row that is opened with some output, computed in chunks, and closed."""
    open_row(driver, 0, asked, output, sample_index)
    driver.prefill(0, chunk)
    driver.decode([0], NUM_OUTPUT - 1 - len(output))
    assert driver.errors == []
    return driver.close(0).output


def seeded_case(name: str) -> Asked:
    asked = CASES[name]
    return replace(asked, sampling=replace(asked.sampling, temperature=0.8, seed=7, top_p=0.9))


def check_replay(driver: Driver, asked: Asked) -> None:
    """A row that is opened again after any number of output tokens gets the same tokens, and so it does in chunks."""
    whole = tokens_of(driver, asked)
    for position in range(1, NUM_OUTPUT):
        assert tokens_of(driver, asked, whole[:position]) == whole
    assert tokens_of(driver, asked, whole[:4], chunk=3) == whole


def check_batch(driver: Driver, cases: list[Asked]) -> None:
    """Rows with different processing get the tokens that they get alone."""
    alone = [tokens_of(driver, asked) for asked in cases]
    for row, asked in enumerate(cases):
        open_row(driver, row, asked)
    for row in range(len(cases)):
        driver.step({row: len(PROMPT)} | dict.fromkeys(range(row), 1))
    driver.decode([*range(len(cases))], NUM_OUTPUT)
    assert driver.errors == []
    assert [driver.close(row).output[:NUM_OUTPUT] for row in range(len(cases))] == alone


def check_fork(driver: Driver, name: str) -> None:
    """A fork and its parent get the tokens that each of them gets alone."""
    asked = seeded_case(name)
    alone = [tokens_of(driver, asked, sample_index=index) for index in (0, 1)]
    open_row(driver, 0, asked)
    driver.fork(1, 0, asked.sampling, sample_index=1, rules=asked.rules)
    driver.step({0: len(PROMPT)})
    driver.decode([0, 1], NUM_OUTPUT - 1)
    assert driver.errors == []
    outputs = [driver.rows[row].output for row in (0, 1)]
    driver.close(1, keep_blocks=True)
    driver.close(0)
    assert outputs == alone


def check_effects(driver: Driver) -> None:
    """Each field has its documented effect on the tokens."""
    free = tokens_of(driver, CASES["none"])
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        strong = replace(CASES["none"].sampling, **{name: 100.0 if name == "repetition_penalty" else 2.0})
        tokens = tokens_of(driver, Asked(strong))
        assert len(set(tokens)) > len(set(free)) or len(set(free)) == NUM_OUTPUT
    allowed = tokens_of(driver, Asked(rules=TokenRules(allowed_ids=u32(5, 6, 7))))
    assert set(allowed) <= {5, 6, 7}
    assert not set(tokens_of(driver, Asked(rules=TokenRules(banned_ids=u32(*set(free)))))) & set(free)
    assert tokens_of(driver, Asked(rules=TokenRules(bias_ids=u32(8), biases=f32(100)))) == [8] * NUM_OUTPUT
    word = u32(*free[:2])
    after = tokens_of(driver, Asked(rules=TokenRules(bad_words=(word,))))
    assert after[0] == free[0]
    assert after[1] != free[1]


def check_all_tokens_excluded(driver: Driver) -> None:
    """A row whose rules exclude all tokens fails, and no other row."""
    good = tokens_of(driver, CASES["all"])
    words = tuple(u32(a, b) for a in (5, 6) for b in (5, 6))
    open_row(driver, 0, CASES["all"])
    open_row(driver, 1, Asked(rules=TokenRules(allowed_ids=u32(5, 6), bad_words=words)))
    driver.step({0: len(PROMPT), 1: len(PROMPT)})
    output = driver.step({0: 1, 1: 1})
    assert [(error.row, "exclude all token ids" in error.message) for error in output.errors] == [(1, True)]
    driver.errors.clear()
    driver.close(1)
    driver.decode([0], NUM_OUTPUT - 2)
    assert driver.close(0).output == good
    assert np.isin(good, CASES["all"].rules.allowed_ids).all()
