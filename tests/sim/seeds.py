"""The seeds that a simulation runs: in every test run, only in a deep one, and those that failed once."""

from __future__ import annotations

from pathlib import Path

import pytest

CHUNK = 50  # seeds per test


def parametrize_seeds(metafunc: pytest.Metafunc, *, first_seed: int, num_seeds: int, num_deep: int) -> None:
    """Chunks of seeds `first_seed` to `num_seeds` - 1; deep tests for those up to `num_deep` - 1.

    Another test runs the seeds before `first_seed`. --sim-seed N: only seed N.
    """
    if "seeds" not in metafunc.fixturenames:
        return
    chunks = [range(first, first + CHUNK) for first in range(first_seed, num_deep, CHUNK)]
    only = metafunc.config.getoption("--sim-seed")
    if only is not None:
        chunks = [range(only, only + 1)]
        num_seeds = only + 1
    marks = [pytest.mark.deep if chunk.start >= num_seeds else () for chunk in chunks]
    params = [pytest.param(chunk, marks=mark, id=f"{chunk.start}") for chunk, mark in zip(chunks, marks, strict=True)]
    metafunc.parametrize("seeds", params)


def read_regressions(path: Path) -> list[int]:
    """Seeds that failed once. The text after each number gives the reason."""
    lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    return [int(words[0]) for words in lines if words]
