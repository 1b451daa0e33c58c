"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden transcripts anew; then read the diff")
    parser.addoption("--sim-seed", type=int, help="run only this seed of the simulation (tests/sim)")
