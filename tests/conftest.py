"""Settings, options and fixtures of the whole test suite."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.processes.redis_server import RedisServer
    from tests.processes.stack import Stack

# The same examples in every run, and no deadline: results must not depend on the load of the machine.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# Dozens of processes import torch, and compiling its sources takes longer than the rest of the import. The first
# process keeps the bytecode for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads that spin take the cores of others, and most of the processor time of small tensors. OpenMP reads both
# variables when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if not Path("/dev/nvidiactl").exists():
    # Triton reads this when it is imported, which another package may do first.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # It multiplies with numpy. With AVX-512, OpenBLAS chooses kernels by the number of rows, and tests of exact mode
    # compare the bits of a row alone with those in a batch.
    if " avx512f " in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Collect what a failed test has left open, so that no later test fails because of its warnings."""
    failures = item.session.testsfailed
    log = item.config.getoption("--cpu-log")
    if log is None:
        is_handled = yield
    else:
        before_s = _cpu_s()
        is_handled = yield
        with open(log, "a") as file:
            file.write(f"{_cpu_s() - before_s:.3f} {item.nodeid}\n")
    if item.session.testsfailed > failures:
        _discard_leftovers()
    return is_handled


def _cpu_s() -> float:
    """Processor time of this process and of the processes that it has waited for."""
    usages = (resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _discard_leftovers() -> None:
    # pytest keeps the last traceback, and with it the variables of the failed test, for a debugger.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    report, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = report


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """An empty stack, whose services end with the test."""
    from tests.processes.stack import Stack

    with Stack(tmp_path) as stack:
        yield stack


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    from tests.processes.redis_server import RedisServer

    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite golden transcripts; read the diff afterwards")
    parser.addoption("--sim-seed", type=int, help="run only this seed of the simulations (tests/sim)")
    parser.addoption("--cpu-log", metavar="FILE", help="append each test's processor time, with its child processes")


def pytest_collection_finish(session: pytest.Session) -> None:
    if (log := session.config.getoption("--cpu-log")) and session.items:
        with open(log, "a") as file:
            file.write(f"{_cpu_s():.3f} collection\n")
