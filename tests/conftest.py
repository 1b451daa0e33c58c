"""Options of the whole suite."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples each time, and no verdict that depends on how busy the machine is.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# Dozens of processes import torch, and compiling its sources takes longer than the rest of the import. The first
# process keeps the bytecode for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, and something else may import it first.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden transcripts anew; then read the diff")
    parser.addoption("--sim-seed", type=int, help="run only this seed of the simulation (tests/sim)")
