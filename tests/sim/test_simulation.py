"""Thousands of seeds on the scheduler core. QUIRE_SIM_SEEDS sets how many, --sim-seed N runs one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.sim.simulation import run_seed

NUM_SEEDS = int(os.environ.get("QUIRE_SIM_SEEDS", "2000"))
NUM_CHUNKS = 20
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def regressions() -> list[int]:
    """Seeds that failed once; whatever follows the number says why."""
    lines = [line.split("#")[0].split() for line in REGRESSIONS.read_text().splitlines()]
    return [int(words[0]) for words in lines if words]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    only = metafunc.config.getoption("--sim-seed")
    chunks = [range(chunk, NUM_SEEDS, NUM_CHUNKS) for chunk in range(NUM_CHUNKS)] if only is None else [[only]]
    metafunc.parametrize("seeds", chunks, ids=lambda seeds: f"{seeds[0]}.." if len(seeds) > 1 else f"{seeds[0]}")


def test_seeds(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_seed(seed)


@pytest.mark.parametrize("seed", regressions())
def test_regression(seed: int) -> None:
    run_seed(seed)


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = run_seed(5), run_seed(5)
    assert first.transcript(1000) == second.transcript(1000)


def test_the_seeds_meet_what_they_are_for() -> None:
    """Preemption, cache hits, forks with copy-on-write, moves, failures, restarts: none may silently stop happening."""
    met = set()
    for seed in range(60):
        cluster = run_seed(seed).cluster
        met |= {event[0] for event in cluster.trace}
        met |= {"preemption"} if cluster.num_preemptions else set()
        met |= {"hit"} if cluster.num_cached_tokens else set()
        for _, batch in [event for event in cluster.trace if event[0] == "send"]:
            met |= {"copy"} if len(batch.copy_src) else set()
            met |= {"fork"} if len(batch.fork_rows) else set()
            met |= (
                {"mixed step"}
                if len(batch.rows) > 1 and 1 in batch.query_lens and batch.query_lens.max() > 1
                else set()
            )
        for _, output in [event for event in cluster.trace if event[0] == "answer"]:
            met |= {"failure"} if output.failures else set()
    wanted = {"submit", "refused", "abort", "stop", "join", "remove", "drain", "restart"}
    assert wanted | {"preemption", "hit", "copy", "fork", "mixed step", "failure"} <= met
