"""Grammars of rows: what the engine samples under a grammar, and that a row's state follows from its output."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from quire_client.demo import demo_model_dir
from tokenizers import Tokenizer

from request_fields.parameters import Grammar, GrammarKind, regex_of_choice
from step_protocol.features import ThinkingBudget
from step_protocol.messages import RowOpen, TokenRules
from step_protocol.types import RowErrorCode
from tests.unit.engine.driver import Driver, Row, seeded, u32
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner
from worker_svc.engine.sampling.grammars import RowGrammars, RowMasks, compiled_grammars
from worker_svc.engine.sampling.masking import apply_masks

EOS = (2, 0)
VOCAB = 2048
MAX_STEPS = 60
PROMPT = [300, 301, 302]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["é", "\n", "a b"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": -5, "maximum": 20},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Grammar(GrammarKind.REGEX, r"[a-f]{2,6}-\d+(é|ü)"),
    "lark": Grammar(GrammarKind.LARK, 'start: item ("," item){2}\nitem: /[a-z]+/ | "[" item "]"'),
    "choice": Grammar(GrammarKind.REGEX, regex_of_choice(["yes", "no", "maybe so", "no!"])),
}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(EngineConfig(demo_model_dir(), num_blocks=256, max_num_seqs=8, threads=1, dtype="float32"))


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    runner.reset_rows()
    return Driver(runner)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))


def run(driver: Driver, row: int, steps: int = MAX_STEPS) -> Row:
    """Decodes a row until it samples an end-of-sequence id."""
    driver.prefill(row)
    state = driver.rows[row]
    while state.output and state.output[-1] not in EOS and len(state.output) < steps:
        driver.step({row: 1})
    return state


class Histories:
    """Rows of a grammar table whose tokens are set by the test."""

    def __init__(self) -> None:
        compiled = compiled_grammars(demo_model_dir(), VOCAB, EOS)
        assert compiled is not None
        self.tokens = np.zeros((4, 400), np.uint32)
        self.table = RowGrammars(compiled, self.tokens, VOCAB)

    def open(
        self, row: int, grammar: Grammar | None, output: list[int], thinking: ThinkingBudget | None = None
    ) -> None:
        self.extend(row, output)
        none = u32()
        self.table.open(RowOpen(row, none, len(PROMPT), none, 0, seeded(0), 0, grammar=grammar, thinking=thinking))

    def extend(self, row: int, output: list[int]) -> None:
        self.tokens[row, : len(PROMPT) + len(output)] = PROMPT + output

    def masks(self, lens: dict[int, int]) -> RowMasks:
        """Masks for the tokens after the first `lens[row]` output tokens."""
        rows, positions = np.array([*lens]), np.array([len(PROMPT) + n for n in lens.values()])
        pending = self.table.start(rows, positions)
        assert pending is not None
        return pending.result()


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_state_after_each_token_equals_the_state_after_a_replay(name: str) -> None:
    rng = np.random.default_rng(7)
    histories = Histories()
    histories.open(0, GRAMMARS[name], [])
    output: list[int] = []
    for _ in range(MAX_STEPS):
        step = histories.masks({0: len(output)})
        histories.open(1, GRAMMARS[name], output)
        replayed = histories.masks({1: len(output)})
        assert not step.failures
        assert not replayed.failures
        np.testing.assert_array_equal(step.is_banned[0], replayed.is_banned[0])
        output.append(int(rng.choice(np.flatnonzero(~step.is_banned[0]))))
        histories.extend(0, output)
        if output[-1] in EOS:
            return
    assert name != "choice", "the output did not end"


def test_a_budget_forces_its_end_where_a_grammar_allows_it() -> None:
    first, allowed, other = [ord(char) - 33 + 3 for char in "abx"]
    histories, grammar = Histories(), Grammar(GrammarKind.REGEX, "ab*")
    rules = [ThinkingBudget(1, u32(), u32(end), u32(), repeats=False) for end in (allowed, other)]
    for row, (one, rule) in enumerate(((grammar, rules[0]), (grammar, rules[1]), (None, rules[1]))):
        histories.open(row, one, [first, first], rule)
    assert histories.table.start(np.array([2]), np.array([len(PROMPT)])) is None
    found = histories.masks({0: 1, 1: 1, 2: 1})
    assert (found.lines.tolist(), found.failures) == ([0, 1], {})
    assert found.forced == {0: allowed, 2: other}
    logits = torch.zeros(3, VOCAB)
    logits[2, other] = -torch.inf
    apply_masks(logits, found, EOS, has_rules=True)
    kept = [set(np.flatnonzero(row > -np.inf).tolist()) for row in logits.numpy()]
    assert (kept[0], kept[2]) == ({allowed}, {other})
    assert allowed in kept[1]
    assert other not in kept[1]


def test_a_budget_with_an_unknown_id_is_refused() -> None:
    rule = ThinkingBudget(1, u32(), u32(VOCAB), u32(), repeats=False)
    item = RowOpen(0, u32(), 1, u32(), 0, seeded(0), 0, thinking=rule)
    assert Histories().table.refusal(item) == f"a thinking budget has id {VOCAB}; ids must be below {VOCAB}"


def test_a_row_whose_history_was_replaced_is_replayed() -> None:
    histories = Histories()
    first, other = [ord(char) - 33 + 3 for char in "ab"]  # ids of the demo model's printable ASCII characters
    grammar = Grammar(GrammarKind.REGEX, "a[x]|b[y]")
    histories.open(0, grammar, [])
    histories.masks({0: 0})
    histories.extend(0, [first])
    after_a = histories.masks({0: 1}).is_banned
    histories.extend(0, [other])
    assert (histories.masks({0: 1}).is_banned != after_a).any()


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(4))
def test_the_output_matches_its_grammar(driver: Driver, tokenizer: Tokenizer, name: str, seed: int) -> None:
    driver.open(0, PROMPT, seeded(seed, 1.5), grammar=GRAMMARS[name])
    state = run(driver, 0)
    assert driver.errors == []
    if state.output[-1] not in EOS:
        return
    text = tokenizer.decode(state.output[:-1])
    if name == "schema":
        value = json.loads(text)
        assert [*value] == ["name", "tags", "size"]
        assert -5 <= value["size"] <= 20
    elif name == "lark":
        assert re.fullmatch(r"(\[*[a-z]+\]*)(,\[*[a-z]+\]*){2}", text)
    else:
        assert re.fullmatch(GRAMMARS[name].text, text)


def test_the_end_is_sampled_if_min_tokens_leaves_nothing_else(driver: Driver, tokenizer: Tokenizer) -> None:
    grammar = Grammar(GrammarKind.REGEX, "ab")
    driver.open(0, PROMPT, seeded(2), banned=EOS, banned_before=50, grammar=grammar)
    state = run(driver, 0)
    assert tokenizer.decode(state.output[:-1]) == "ab"
    assert state.output[-1] in EOS


def test_a_grammar_that_cannot_be_compiled_fails_its_row_only(driver: Driver) -> None:
    driver.open(0, PROMPT, seeded(1), grammar=Grammar(GrammarKind.REGEX, "("))
    driver.open(1, PROMPT, seeded(1), grammar=GRAMMARS["choice"])
    driver.open(2, PROMPT, seeded(1))
    output = driver.step({row: len(PROMPT) for row in range(3)})
    assert output.rows.tolist() == [1, 2]
    (error,) = output.errors
    assert (error.row, error.code) == (0, RowErrorCode.GRAMMAR)
    assert "unclosed group" in error.message


def test_an_output_that_does_not_match_fails_its_row(driver: Driver) -> None:
    driver.open(0, PROMPT, seeded(1), output=[500, 501], grammar=GRAMMARS["choice"])
    driver.step({0: len(PROMPT) + 2})
    assert "does not match the grammar" in driver.errors[0].message


def test_rules_that_exclude_all_tokens_of_the_grammar_fail_the_row(driver: Driver) -> None:
    driver.open(0, PROMPT, seeded(1), grammar=Grammar(GrammarKind.REGEX, "[ab]+"))
    (item,) = driver._opens
    rules = TokenRules(allowed_ids=u32(700, 701))
    driver._opens[0] = RowOpen(**{name: getattr(item, name) for name in RowOpen.__slots__} | {"rules": rules})
    driver.step({0: len(PROMPT)})
    assert "do not exclude all token ids" in driver.errors[0].message
