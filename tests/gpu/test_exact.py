"""Exact mode: the logits of a row are the same bits alone, among 64 rows, in chunks, and after a prefix hit."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.driver import DeviceDriver, load
from tests.gpu.test_runner import HEADS_4_2, SMALL, small_prompts
from tests.unit.engine.driver import seeded
from tests.unit.engine.models import load_reference, make_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OTHERS = 63
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    overrides = SMALL | HEADS_4_2 | {"num_hidden_layers": 1}
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **overrides)


@pytest.fixture(scope="module", params=["triton", "torch bfloat16", pytest.param("torch", marks=pytest.mark.deep)])
def runner(folder, request):
    """In torch also in bfloat16, which the interpreter cannot multiply."""
    kernels, _, dtype = request.param.partition(" ")
    return load(
        folder, determinism="exact", kernels=kernels, dtype=dtype or "float32", max_num_seqs=OTHERS + 1,
        max_num_batched_tokens=512, num_blocks=160,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompt():
    return small_prompts([35])[0]


@pytest.fixture(scope="module")
def alone(runner, prompt):
    driver = start(runner)
    driver.open(0, prompt, seeded(1))
    driver.prefill(0)
    driver.decode([0], STEPS)
    return driver


def start(runner):
    runner.reset_rows()
    return DeviceDriver(runner)


def assert_same(alone, driver, row):
    assert driver.errors == []
    assert driver.rows[row].tokens == alone.rows[0].tokens
    for (_, position), logits in alone.logits.items():
        assert torch.equal(driver.logits[row, position], logits)


def test_exact_logits_match_transformers(folder, runner, alone):
    tolerance = 1e-4 if runner.info.dtype == "float32" else 3e-2
    expected = load_reference(folder)(torch.tensor([alone.rows[0].tokens])).logits[0].detach()
    for (_, position), logits in alone.logits.items():
        assert (logits - expected[position - 1]).abs().max() < tolerance


@pytest.mark.parametrize("chunk", [16, 33])
def test_chunks_do_not_change_logits(runner, prompt, alone, chunk):
    driver = start(runner)
    driver.open(3, prompt, seeded(1))
    driver.prefill(3, chunk)
    driver.decode([3], STEPS)
    assert_same(alone, driver, 3)


def test_63_other_rows_do_not_change_logits(runner, prompt, alone):
    driver = start(runner)
    for row, other in enumerate(small_prompts([1 if row % 9 else 3 for row in range(OTHERS)], seed=2)):
        driver.open(row, other)
    driver.open(OTHERS, prompt, seeded(1))
    some = dict.fromkeys(range(10), 1)
    driver.step({row: len(driver.rows[row].tokens) for row in range(OTHERS)} | {OTHERS: 20})
    driver.step(some | {OTHERS: 15})
    driver.step({OTHERS: 1} | dict.fromkeys(range(OTHERS), 1))
    driver.step(some | {OTHERS: 1})
    assert_same(alone, driver, OTHERS)


def test_prefix_hits_and_recompute_do_not_change_logits(runner, prompt, alone):
    driver = start(runner)
    driver.open(1, prompt)
    driver.prefill(1, 9)
    driver.open(2, prompt, seeded(1), shared=driver.rows[1].blocks[:2])
    driver.prefill(2)
    output = driver.close(2).output
    driver.open(4, prompt, seeded(1), output=output)
    driver.step({4: 36, 1: 1})
    driver.decode([4], STEPS - 1)
    assert driver.rows[4].tokens == alone.rows[0].tokens
    assert torch.equal(driver.logits[4, 37], alone.logits[0, 37])
