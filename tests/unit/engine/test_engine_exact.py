"""Exact mode: a row's logits are the same bits whatever runs beside it and however its tokens are cut up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.engine.driver import Driver, seeded
from tests.unit.engine.models import make_model
from tests.unit.engine.test_engine_models import prompts
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.linear import PackedLinear, RowRules
from worker_svc.engine.model_runner import ModelRunner

VOCAB = 211


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner_factory(request, tmp_path_factory):
    """Runners of one model whose inner sizes are no powers of two."""
    folder = make_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        hidden_size=160,
        intermediate_size=352,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=40,
        num_hidden_layers=3,
    )

    def make(**settings):
        fields = {"num_blocks": 256, "max_num_seqs": 40, "threads": 1} | settings
        return ModelRunner(EngineConfig(folder, request.param, **fields))

    return make


def alone(runner, prompt, steps, sampling):
    driver = Driver(runner)
    runner.reset_rows()
    driver.open(0, prompt, sampling)
    driver.prefill(0)
    driver.decode([0], steps)
    return driver


def assert_same(expected, row, driver, other_row):
    assert driver.rows[other_row].tokens == expected.rows[row].tokens
    for (r, position), logits in expected.logits.items():
        if r == row and (other_row, position) in driver.logits:
            assert torch.equal(driver.logits[other_row, position], logits)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_chunks_change_nothing(runner_factory, backend):
    runner = runner_factory(backend=backend)
    (prompt,) = prompts([301])
    expected = alone(runner, prompt, 3, seeded(1))
    for row, chunk in enumerate((1, 7, 16, 100) if backend == "cpu" else (33, 100), start=1):
        driver = Driver(runner)
        runner.reset_rows()
        driver.open(row, prompt, seeded(1))
        driver.prefill(row, chunk)
        driver.decode([row], 3)
        assert_same(expected, 0, driver, row)


@pytest.mark.parametrize("threads", [1, 2])
def test_batch_mates_change_nothing(runner_factory, threads):
    runner = runner_factory()
    prompt, *others = prompts([37, *np.random.default_rng(3).integers(1, 60, 31).tolist()])
    expected = alone(runner, prompt, 8, seeded(7))
    crowded = runner_factory(threads=threads)
    driver = Driver(crowded)
    for row, other in enumerate(others):
        driver.open(row, other, seeded(row))
    half = list(range(16))
    driver.step({row: len(others[row]) for row in half})
    driver.open(39, prompt, seeded(7))
    driver.step({**dict.fromkeys(half, 1), 39: 30})
    driver.step({20: len(others[20]), 39: 7, **dict.fromkeys(half, 1)})
    for extra in range(8):
        row = 21 + extra
        driver.step({row: len(others[row]), 39: 1, **dict.fromkeys(half[extra:], 1)})
    assert driver.errors == []
    assert_same(expected, 0, driver, 39)


def test_prefix_hit_and_recompute_change_nothing(runner_factory):
    runner = runner_factory()
    (prompt,) = prompts([100])
    expected = alone(runner, prompt, 12, seeded(5))
    driver = Driver(runner)
    runner.reset_rows()
    driver.open(1, prompt[:80])
    driver.prefill(1, 33)
    driver.open(2, prompt, seeded(5), shared=driver.rows[1].blocks[:5])
    driver.prefill(2)
    driver.decode([2], 4)
    output = driver.close(2).output
    driver.open(3, prompt, seeded(5), output=output)
    driver.prefill(3, 50)
    driver.decode([1, 3], 7)
    assert_same(expected, 0, driver, 3)


def test_all_layers_in_one_call_are_the_operations_one_by_one(runner_factory):
    runner = runner_factory()
    (prompt,) = prompts([75])
    expected = alone(runner, prompt, 5, seeded(3))
    runner._model._fused = None
    driver = Driver(runner)
    runner.reset_rows()
    driver.open(1, prompt, seeded(3))
    driver.prefill(1, 31)  # chunks whose hidden states nobody reads
    driver.decode([1], 5)
    assert_same(expected, 0, driver, 1)


@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_block_size_changes_nothing(runner_factory, block_size):
    (prompt,) = prompts([90])
    expected = alone(runner_factory(), prompt, 3, seeded(5))
    driver = alone(runner_factory(block_size=block_size, num_blocks=4096 // block_size), prompt, 3, seeded(5))
    assert_same(expected, 0, driver, 0)


def test_blocks_left_dirty_change_nothing(runner_factory):
    """Stale values of any kind in a block are never read."""
    runner = runner_factory()
    (prompt,) = prompts([50])
    expected = alone(runner, prompt, 5, seeded(2))
    runner._pool.keys.fill_(float("nan"))
    runner._pool.values.fill_(float("nan"))
    assert_same(expected, 0, alone(runner, prompt, 5, seeded(2)), 0)


SHAPES = [(1024, 256), (256, 768), (57, 33), (96, 40), (1000, 2000), (64, 8192), (4096, 256)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_linear_rows_do_not_depend_on_their_number(out_size, in_size, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out_size, in_size, generator=generator) / in_size**0.5).to(dtype)
    linear = PackedLinear(weight, None)
    RowRules().apply(linear, weight, False)
    x = torch.randn(501, in_size, generator=generator).to(dtype)
    expected = linear(x)
    for rows in (1, 2, 3, 5, 17, 64, 131, 300, 500):
        for start in (0, 1):
            part = linear(x[start : start + rows].contiguous())
            assert torch.equal(part, expected[start : start + rows]), rows


def test_rule_falls_back_to_tiles_and_single_rows():
    """A product whose rows depend on their number is called in a shape where they cannot."""

    class Fickle(PackedLinear):
        def __init__(self, error):
            super().__init__(torch.eye(8), None)
            self.error = error

        def _multiply(self, x):
            return super()._multiply(x) + self.error(x.shape[0])

    by_count = Fickle(lambda n: 1e-3 * (n % 32 > 0))
    by_place = Fickle(lambda n: torch.arange(n)[:, None] * 1e-3)
    for linear, tile in ((by_count, 32), (by_place, 1)):
        RowRules().apply(linear, torch.eye(8), False)
        assert linear.rule.tile == tile
        x = torch.randn(70, 8)
        assert torch.equal(linear(x)[1:33], linear(x[1:33]))
