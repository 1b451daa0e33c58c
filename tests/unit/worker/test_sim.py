"""The simulated runner: its tokens follow the specification, and every wrong block is detected."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire_client.demo import demo_model_dir
from tokenizers import Tokenizer

from prefix_index.hashing import input_digest
from request_fields.fields import SamplingParams
from request_fields.parameters import Grammar, GrammarKind
from step_protocol.columns import EMPTY
from step_protocol.messages import NO_RULES, ImageSpan, RowOpen, StepBatch, StepOutput, TokenRules
from step_protocol.types import CarriedInput, RowErrorCode
from tests.carried import random_embeddings, with_content_ids
from tests.simulated_tokens import context_digest, extend_digest, sim_output, sim_token
from tests.simulated_tokens import mix as mix_one
from worker_svc.engine.config import EngineConfig
from worker_svc.simulator.model import SimConfig
from worker_svc.simulator.pool import digest_terms, mix
from worker_svc.simulator.runner import SimRunner
from worker_svc.simulator.tokens import SimVocabulary, read_vocabulary

SIZE = 4
VOCABULARY = read_vocabulary(demo_model_dir())


def u32(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint32)


def make_runner(model_dir: Path | None = None, **sim: Any) -> SimRunner:
    config = EngineConfig(
        model_dir=model_dir or demo_model_dir(),
        block_size=SIZE,
        num_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=96,
    )
    return SimRunner(config, SimConfig(**{"step_ms": 0.0, "prefill_tokens_per_s": 1e9} | sim))


@dataclass
class Row:
    row: int
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    seed: int = 7
    sample_index: int = 0
    temperature: float = 1.0
    prompt_len: int = 0
    banned: tuple[int, ...] = ()
    banned_before: int = 0
    rules: TokenRules = NO_RULES
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    grammar: Grammar | None = None
    inputs: tuple[CarriedInput, ...] = ()
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    def open(self) -> RowOpen:
        sampling = SamplingParams(self.temperature, 0, 1.0, 0.0, self.seed, *self.penalties)
        blocks = u32(self.blocks)
        return RowOpen(
            self.row, u32(self.tokens), self.prompt_len, blocks, self.computed, sampling, self.sample_index,
            banned_ids=u32(list(self.banned)), banned_before=self.banned_before, rules=self.rules,
            grammar=self.grammar, inputs=self.inputs, images=self.images,
        )  # fmt: skip


@dataclass
class Driver:
    """Sends steps to a runner and gives rows their tokens."""

    runner: SimRunner = field(default_factory=make_runner)
    step_id: int = 0

    def step(self, rows: list[tuple[Row, int]], opens: list[RowOpen] | None = None, **columns: Any) -> StepOutput:
        """Each row computes the given number of tokens, and samples if nothing is left to compute."""
        self.step_id += 1
        positions = [(row, range(row.computed, row.computed + count)) for row, count in rows]
        slots = [row.blocks[p // SIZE] * SIZE + p % SIZE for row, span in positions for p in span]
        batch = StepBatch(
            step_id=self.step_id,
            rows=u32([row.row for row, _ in rows]),
            query_lens=u32([count for _, count in rows]),
            context_lens=u32([row.computed for row, _ in rows]),
            sample_mask=np.array([row.computed + count == len(row.tokens) for row, count in rows], np.bool_),
            slot_mapping=u32(slots),
            opens=opens or [],
            **columns,
        )
        output = self.runner.execute(batch)
        tokens = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
        for row, count in rows:
            row.computed += count
            row.tokens += [tokens[row.row]] if row.row in tokens else []
        return output

    def generate(self, row: Row, num_tokens: int) -> list[int]:
        """Opens the row, prefills the rest, decodes. Returns its output."""
        self.check(self.step([(row, len(row.tokens) - row.computed)], [row.open()]))
        while len(row.tokens) - row.prompt_len < num_tokens:
            self.check(self.step([(row, 1)]))
        return row.tokens[row.prompt_len :]

    def check(self, output: StepOutput) -> None:
        assert not output.errors


def window_runner(folder: Path, window: int) -> SimRunner:
    """A runner of the demo model's folder with a window in all layers."""
    shutil.copytree(demo_model_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config | sizes | mistral))
    settings = EngineConfig(model_dir=folder, block_size=SIZE, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64)
    return SimRunner(settings, SimConfig(step_ms=0.0))


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 2000), k=length)


def test_blocks_behind_the_window_may_have_other_content(tmp_path: Path) -> None:
    runner = window_runner(tmp_path / "model", window=6)  # two blocks before that of a token
    assert runner.info.attention_window == 6
    assert runner.info.max_model_len > 8 * SIZE  # more than the pool holds
    driver = Driver(runner)
    row = Row(0, make_prompt(13), [0, 1, 2, 3])
    driver.check(driver.step([(row, 13)], [row.open()]))
    other = Row(1, make_prompt(6, seed=1), [0, 1])
    driver.check(driver.step([(other, 6), (row, 1)], [other.open()]))  # position 13 attends to 8 and later
    spoilt = Row(1, make_prompt(2, seed=2), [2])
    output = driver.step([(spoilt, 2), (row, 1)], [replace(spoilt.open(), row=1)], close_rows=u32([1]))
    assert [error.row for error in output.errors] == [0]
    assert "block 2 differs from this row's prefix at position 8" in output.errors[0].message


# -- the specification -------------------------------------------------------------------------------------------------


def test_numpy_draws_the_bits_of_the_specification() -> None:
    rng = random.Random(1)
    values = [0, 1, 2**64 - 1, *(rng.getrandbits(64) for _ in range(100))]
    assert mix(np.array(values, np.uint64)).tolist() == [mix_one(value) for value in values]
    tokens = make_prompt(50)
    total = int(np.cumsum(digest_terms(np.arange(50), np.array(tokens)))[-1])
    assert total == context_digest(tokens)
    assert extend_digest(context_digest(tokens), 50, 9) == context_digest([*tokens, 9])


def test_golden_tokens_of_the_specification() -> None:
    vocabulary = SimVocabulary(tuple(range(1000)))
    assert context_digest([]) == 0
    assert (mix_one(0), mix_one(1)) == (0xE220A8397B1DCDAF, 0x910A2DEC89025CC1)
    assert sim_output([1, 2, 3], 6, vocabulary, seed=42) == PINNED


PINNED = [94, 368, 953, 482, 115, 96]


def test_tokens_depend_on_every_part_of_the_context() -> None:
    base = {"digest": context_digest([1, 2, 3]), "seed": 5, "sample_index": 0, "output_position": 0}
    changes = [{"digest": context_digest([1, 3, 2])}, {"seed": 6}, {"sample_index": 1}, {"output_position": 1}]
    wide = SimVocabulary(tuple(range(2**32)[:1_000_000]))
    tokens = {sim_token(**base | change, vocabulary=wide) for change in [{}, *changes]}
    assert len(tokens) == 5


# -- the runner --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_tokens_do_not_depend_on_how_a_prompt_is_computed(chunk: int) -> None:
    driver, prompt = Driver(), make_prompt(21)
    row = Row(2, list(prompt), list(range(5, 20)), sample_index=3)
    opens = [row.open()]
    while row.computed < len(prompt):
        driver.check(driver.step([(row, min(chunk, len(prompt) - row.computed))], opens))
        opens = []
    while len(row.tokens) < 60:
        driver.check(driver.step([(row, 1)]))
    assert row.tokens[21:] == sim_output(prompt, 39, VOCABULARY, seed=7, sample_index=3)


@pytest.mark.parametrize(
    ("blocks", "position"),
    [([1, 0, 20], 0), ([0, 9, 20], 4), ([0, 0, 20], 4)],
    ids=["exchanged", "never written", "twice"],
)
def test_a_wrong_block_is_an_error_that_names_it(
    blocks: list[int], position: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver, prompt = Driver(), make_prompt(10)
    driver.generate(Row(0, list(prompt), [0, 1, 2, 3]), 1)
    bad, good = Row(1, list(prompt), blocks, computed=8), Row(2, make_prompt(5, 1), [30, 31])
    output = driver.step([(bad, 2), (good, 5)], [bad.open(), good.open()])
    assert [(error.row, error.code) for error in output.errors] == [(1, RowErrorCode.INTERNAL)]
    assert f"at position {position} (offset 0)" in output.errors[0].message
    assert output.errors[0].message in caplog.text
    assert output.rows.tolist() == [2]
    assert driver.runner.rows_used() == 3


def test_an_overwritten_block_is_detected_by_the_next_decode() -> None:
    driver = Driver()
    victim = Row(0, make_prompt(9), [0, 1, 2, 3])
    driver.generate(victim, 3)
    thief = Row(1, make_prompt(2, 1), [1])
    driver.generate(thief, 1)
    output = driver.step([(victim, 1)])
    assert "block 1 differs from this row's prefix at position 4" in output.errors[0].message
    assert not len(output.rows)


def test_samples_fork_from_a_prompt_and_copy_its_last_block() -> None:
    driver, prompt = Driver(), make_prompt(6)
    parent = Row(0, list(prompt), [0, 1, 2, 3])
    child = Row(1, list(prompt), [0, 1, 8, 9], computed=6, sample_index=1)
    sampling = child.open().sampling
    forked = RowOpen(1, EMPTY, 6, u32([0, 1]), 6, sampling, 1, fork_of_row=0)
    output = driver.step([(parent, 6)], [parent.open(), forked], fork_rows=u32([1]), fork_parents=u32([0]))
    driver.check(output)
    child.tokens.append(dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))[1])
    child.blocks = [0, 5, 8, 9]
    changes = {"table_rows": u32([1, 1, 1]), "table_indices": u32([1, 2, 3]), "table_blocks": u32([5, 8, 9])}
    driver.check(driver.step([(parent, 1), (child, 1)], copy_src=u32([1]), copy_dst=u32([5]), **changes))
    for _ in range(5):
        driver.check(driver.step([(parent, 1), (child, 1)]))
    assert parent.tokens[6:] == sim_output(prompt, 7, VOCABULARY, seed=7)
    assert child.tokens[6:] == sim_output(prompt, 7, VOCABULARY, seed=7, sample_index=1)


def test_banned_ids_are_not_drawn_before_their_position() -> None:
    def generate(banned: tuple[int, ...], before: int, output: tuple[int, ...] = ()) -> list[int]:
        driver = Driver(make_runner(eos_probability=0.5))
        row = Row(0, [5, 6, 7, *output], [0, 1, 2, 3], prompt_len=3, banned=banned, banned_before=before)
        driver.generate(row, 8)
        return row.tokens[3:]

    free = generate((), 0)
    eos = VOCABULARY.eos_token_id
    assert eos is not None
    assert eos in free
    tokens = generate(tuple(set(free)), 6)
    assert not set(tokens[:6]) & set(free)
    assert generate(tuple(set(free)), 6, output=tuple(tokens[:2])) == tokens
    runner = make_runner()
    logits = np.zeros(runner.info.vocab_size, np.float32)
    logits[list(VOCABULARY.printable_ids)] = -np.inf
    assert runner._draw_highest(5, logits) not in VOCABULARY.printable_ids


def test_a_grammar_constrains_only_its_row() -> None:
    words = Grammar(GrammarKind.REGEX, "[a-c]{3}-(yes|no)")
    alone = Driver().generate(Row(0, [5, 6, 7], list(range(8)), seed=3), 10)
    driver = Driver()
    free, bound = Row(0, [5, 6, 7], list(range(8)), seed=3), Row(1, [5, 6, 7], list(range(8, 16)), grammar=words)
    failed = Row(2, [5, 6, 7], list(range(16, 24)), grammar=Grammar(GrammarKind.REGEX, "("))
    output = driver.step([(row, 3) for row in (failed, free, bound)], [row.open() for row in (free, bound, failed)])
    assert output.rows.tolist() == [0, 1]
    assert [error.row for error in output.errors] == [2]
    for _ in range(9):
        driver.check(driver.step([(free, 1), (bound, 1)]))
    assert free.tokens[3:] == alone
    ids = bound.tokens[3:]
    end = next(i for i, token_id in enumerate(ids) if token_id in driver.runner.info.eos_token_ids)
    text = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json")).decode(ids[:end])
    assert re.fullmatch(words.text, text)
    again = Driver()
    moved = Row(1, [5, 6, 7, *ids[:2]], list(range(8)), prompt_len=3, grammar=words)
    assert again.generate(moved, len(ids)) == ids


# -- inputs besides tokens ---------------------------------------------------------------------------------------------


def test_a_prefix_with_an_input_is_shared_by_rows_with_the_same_input() -> None:
    driver = Driver()
    hidden = driver.runner.info.hidden_size
    item = random_embeddings(9, hidden, start=2)
    prompt = with_content_ids(make_prompt(18), item)
    first = Row(0, list(prompt), list(range(8)), inputs=(item,))
    expected = sim_output(prompt, 6, VOCABULARY, seed=7)
    assert driver.generate(first, 6) == expected
    hit = Row(1, list(prompt), [0, 1, 2, 20, 21, 22], computed=12)
    partial = Row(2, list(prompt), [0, 30, 31, 32, 33, 34], computed=4, inputs=(item,))
    assert driver.generate(hit, 6) == driver.generate(partial, 6) == expected


def test_a_hit_on_the_blocks_of_another_input_is_detected() -> None:
    """Content ids that do not depend on the content: another input has the ids of the first one."""
    driver = Driver()
    hidden = driver.runner.info.hidden_size
    item, other = (random_embeddings(9, hidden, seed=seed, start=2) for seed in (0, 1))
    prompt = with_content_ids(make_prompt(18), item)
    driver.generate(Row(0, list(prompt), list(range(8)), inputs=(replace(other, digest=item.digest),)), 2)
    row = Row(1, list(prompt), [0, 1, 2, 20, 21, 22], computed=12)
    (error,) = driver.step([(row, 6)], [row.open()]).errors
    assert (error.row, error.code) == (1, RowErrorCode.INTERNAL)
    assert "differs from this row's prefix at position 2" in error.message


def test_a_row_whose_input_is_lost_fails() -> None:
    """A preempted row is opened again without its inputs."""
    driver = Driver()
    prompt = with_content_ids(make_prompt(18), random_embeddings(9, driver.runner.info.hidden_size, start=2))
    row = Row(1, list(prompt), [0, 1, 2, 20, 21], computed=8)
    (error,) = driver.step([(row, 10)], [row.open()]).errors
    assert (error.row, error.code) == (1, RowErrorCode.BAD_INPUT)
    assert "no input has this position" in error.message


# -- images ------------------------------------------------------------------------------------------------------------


def image_runner(folder: Path) -> SimRunner:
    """A runner of the demo model's folder whose model takes images of patches with 12 numbers."""
    shutil.copytree(demo_model_dir(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    vision = {"patch_size": 2, "in_channels": 3, "spatial_merge_size": 2}
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": 9, "vision_config": vision}))
    return make_runner(model_dir=folder)


def image_at(start: int) -> tuple[CarriedInput, ImageSpan]:
    """An image of 3 x 4 positions, which takes 4 positions of the rotation."""
    shape, data = (6, 8, 12), bytes(6 * 8 * 12 + 4 * 256 * 3)
    digest = input_digest("image", "uint8", shape, data)
    return CarriedInput("image", digest, start, 12, "uint8", shape, data), ImageSpan(start, 3, 4)


def test_a_row_with_an_image_returns_with_its_positions(tmp_path: Path) -> None:
    driver = Driver(image_runner(tmp_path / "model"))
    item, span = image_at(2)
    prompt = with_content_ids(make_prompt(18), item)
    output = driver.generate(Row(0, list(prompt), list(range(8)), inputs=(item,), images=(span,)), 8)
    known = [*prompt, *output[:3]]
    hit = Row(1, list(known), [0, 1, 2, 3, 20, 21, 22], computed=16, prompt_len=18, images=(span,))
    again = Row(2, list(known), list(range(30, 38)), prompt_len=18, inputs=(item,), images=(span,))
    assert driver.generate(hit, 8) == driver.generate(again, 8) == output


def test_a_lost_delta_is_detected(tmp_path: Path) -> None:
    """A row whose image is computed is opened again without the place of the image."""
    driver = Driver(image_runner(tmp_path / "model"))
    item, span = image_at(2)
    prompt = with_content_ids(make_prompt(18), item)
    output = driver.generate(Row(0, list(prompt), list(range(8)), inputs=(item,), images=(span,)), 8)
    lost = Row(1, [*prompt, *output[:3]], [0, 1, 2, 3, 20, 21, 22], computed=16, prompt_len=18)
    (error,) = driver.step([(lost, 5)], [lost.open()]).errors
    assert (error.row, error.code) == (1, RowErrorCode.INTERNAL)
