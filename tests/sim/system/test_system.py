"""Seeds of the whole system. QUIRE_SYSTEM_SEEDS sets how many, --sim-seed N runs one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sim.system.simulation import FAULTS, Simulation, run_seed

NUM_SEEDS = int(os.environ.get("QUIRE_SYSTEM_SEEDS", "1000"))
NUM_CHUNKS = 20
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def regressions() -> list[int]:
    """Seeds that failed once; whatever follows the number says why."""
    lines = [line.split("#")[0].split() for line in REGRESSIONS.read_text().splitlines()]
    return [int(words[0]) for words in lines if words]


@pytest.fixture(autouse=True)
def _collect_between_runs() -> Iterator[None]:
    """What a run leaves behind is collected when no run is under way, so that a seed is the same run every time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    only = metafunc.config.getoption("--sim-seed")
    chunks = [range(chunk, NUM_SEEDS, NUM_CHUNKS) for chunk in range(NUM_CHUNKS)] if only is None else [[only]]
    metafunc.parametrize("seeds", chunks, ids=lambda seeds: f"{seeds[0]}.." if len(seeds) > 1 else f"{seeds[0]}")


def test_seeds(seeds: Iterable[int]) -> None:
    for number, seed in enumerate(seeds):
        run_seed(seed)
        if number % 20 == 19:
            gc.collect()


@pytest.mark.parametrize("seed", regressions())
def test_regression(seed: int) -> None:
    run_seed(seed)


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in (3, 7, 13):
        assert run_seed(seed).transcript(10**6) == run_seed(seed).transcript(10**6)


def test_the_seeds_meet_what_they_are_for() -> None:
    """Every fault, streams that are resumed by clients and moved by gateways, leases that are taken over."""
    met: set[str] = set()
    words = ""
    for seed in range(80):
        simulation = run_seed(seed)
        met |= _met(simulation)
        words += simulation.transcript(10**6)
    assert set(FAULTS) | {"resumed", "complete", "left", "recomputed"} <= met
    for sign in ("requests go elsewhere", "cached blocks adopted", "goes back to another scheduler", "is cut off"):
        assert sign in words, f"no seed has '{sign}' in its trace"


def _met(simulation: Simulation) -> set[str]:
    requests = simulation.world.requests.values()
    met = set(simulation.met) | {request.outcome for request in requests}
    met |= {"resumed" for request in requests if request.num_resumes}
    return met | {"recomputed" for request in requests if request.num_recomputed}
