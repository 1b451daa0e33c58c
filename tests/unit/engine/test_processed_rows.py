"""Rows that need processing, through whole steps of the CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.driver import Driver
from tests.unit.engine.models import make_model
from tests.unit.engine.processed import (
    check_all_tokens_excluded,
    check_batch,
    check_effects,
    check_fork,
    check_replay,
    seeded_case,
    tokens_of,
)
from tests.unit.engine.processor_cases import CASES
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.model_runner import ModelRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


def load(folder: Path, dtype: str = "float32", backend: str = "cpu") -> Driver:
    config = EngineConfig(folder, dtype, backend=backend, num_blocks=64, max_num_seqs=16, threads=1)  # type: ignore[arg-type]
    return Driver(ModelRunner(config))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def shared_driver(request: pytest.FixtureRequest, folder: Path) -> Driver:
    return load(folder, request.param)


@pytest.fixture
def driver(shared_driver: Driver) -> Driver:
    shared_driver.runner.reset_rows()
    shared_driver.rows.clear()
    shared_driver.errors.clear()
    return shared_driver


@pytest.mark.parametrize("name", CASES)
def test_a_row_opened_again_at_any_position_gets_the_same_tokens(driver: Driver, name: str) -> None:
    check_replay(driver, CASES[name])
    check_replay(driver, seeded_case(name))


def test_rows_of_a_batch_do_not_affect_each_other(driver: Driver) -> None:
    check_batch(driver, list(CASES.values()))
    check_batch(driver, [seeded_case(name) for name in CASES])


@pytest.mark.parametrize("name", ["all", "repetition_penalty", "frequency_penalty", "bad_words"])
def test_a_fork_gets_the_tokens_of_its_sample(driver: Driver, name: str) -> None:
    check_fork(driver, name)


def test_each_field_has_its_effect(driver: Driver) -> None:
    check_effects(driver)


def test_a_row_whose_tokens_are_all_excluded_fails_alone(driver: Driver) -> None:
    check_all_tokens_excluded(driver)


@pytest.mark.parametrize("name", ["all", "repetition_penalty", "frequency_penalty"])
def test_the_reference_samples_the_same_tokens(folder: Path, name: str) -> None:
    drivers = [load(folder, backend=backend) for backend in ("cpu", "reference")]
    for asked in (CASES[name], seeded_case(name)):
        assert len({tuple(tokens_of(driver, asked)) for driver in drivers}) == 1
