"""Settings and options of the whole test suite."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no deadline: results must not depend on the load of the machine.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# Dozens of processes import torch, and compiling its sources takes longer than the rest of the import. The first
# process keeps the bytecode for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is imported, which another package may do first.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite golden transcripts; read the diff afterwards")
    parser.addoption("--sim-seed", type=int, help="run only this seed of the simulations (tests/sim)")
