"""Seeds of the simulated system: hundreds, thousands with `-m deep`, one with --sim-seed N."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sim.seeds import parametrize_seeds, read_regressions
from tests.sim.system.simulation import FAULTS, Simulation, run_seed

NUM_COVERING = 80  # seeds of test_the_seeds_cover_all_faults
NUM_SEEDS, NUM_DEEP_SEEDS = 130, 10_000
REGRESSIONS = Path(__file__).with_name("regressions.txt")


@pytest.fixture(autouse=True)
def _collect_between_runs() -> Iterator[None]:
    """Collects garbage between runs only, so that a seed gives the same run every time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_seeds(metafunc, first_seed=NUM_COVERING, num_seeds=NUM_SEEDS, num_deep=NUM_DEEP_SEEDS)


def test_seeds(seeds: Iterable[int]) -> None:
    for number, seed in enumerate(seeds):
        run_seed(seed)
        if number % 20 == 19:
            gc.collect()


@pytest.mark.parametrize("seed", read_regressions(REGRESSIONS))
def test_regression(seed: int) -> None:
    run_seed(seed)


def test_a_seed_gives_the_same_run_every_time() -> None:
    for seed in (3, 7, 13):
        assert run_seed(seed).transcript(10**6) == run_seed(seed).transcript(10**6)


def test_the_seeds_cover_all_faults() -> None:
    """Every fault, streams that are resumed by clients and moved by gateways, leases that are taken over, Redis."""
    met: set[str] = set()
    words = ""
    for seed in range(NUM_COVERING):
        simulation = run_seed(seed)
        met |= _met(simulation)
        words += simulation.transcript(10**6)
    assert set(FAULTS) | {"resumed", "complete", "left", "recomputed", "redis"} <= met
    for sign in ("; moving ", "cached blocks adopted", "has fewer workers; leaving", "disconnecting gateway"):
        assert sign in words, f"no seed has '{sign}' in its trace"


def _met(simulation: Simulation) -> set[str]:
    requests = simulation.world.requests.values()
    met = set(simulation.met) | {request.outcome for request in requests}
    met |= {"redis"} if simulation.world.redis.num_commands else set()
    met |= {"resumed" for request in requests if request.num_resumes}
    return met | {"recomputed" for request in requests if request.num_recomputed}
