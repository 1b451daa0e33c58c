"""Modules that a plain request enters in real processes, compared with budget.toml.

A trace lasts for several heartbeats, so that their modules are always counted.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from quire_client import AsyncClient

from tests.processes.stack import ROOT
from tests.processes.test_up import quire_up

BUDGET = tomllib.loads((ROOT / "budget.toml").read_text())
FEATURE = re.compile("|".join(BUDGET["features"].values()))
TRACER = Path(__file__).with_name("call_tracer")
NOT_THE_PRODUCT = (f"{ROOT}/tests/", f"{ROOT}/.venv/")
DEADLINE_S = 60.0
HEARTBEATS_S = 2.5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TRACER))
        patch.setenv("QUIRE_TRACED", str(ROOT))
        patch.setenv("QUIRE_TRACE_OUT", str(folder))
        with quire_up(folder, "--model", "demo", "--threads", "1") as (_, ready):
            yield folder, ready


def until(paths: list[Path]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.02)


@contextmanager
def traced(folder: Path, ready: dict[str, Any], entered: set[str]) -> Iterator[None]:
    """Add the modules that all services and this process's SDK enter in the block."""
    pids = [service["pid"] for service in ready["services"]]
    own = f"{ROOT}/"

    def record(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(own) and not name.startswith(NOT_THE_PRODUCT):
            entered.add(name.removeprefix(own))

    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    until([folder / f"{pid}.on" for pid in pids])
    sys.setprofile(record)
    yield
    sys.setprofile(None)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    until([folder / f"{pid}.txt" for pid in pids])
    for pid in pids:
        entered |= set((folder / f"{pid}.txt").read_text().split())
        (folder / f"{pid}.txt").unlink()
        (folder / f"{pid}.on").unlink()


async def modules_of(stack: tuple[Path, dict[str, Any]], **options: Any) -> set[str]:
    folder, ready = stack
    entered: set[str] = set()
    async with await AsyncClient.connect(ready["target"], timeout_s=DEADLINE_S) as client:
        for _ in range(2):  # a first request enters modules that no later one enters
            await client.generate("Hello", max_tokens=4, **options)
        with traced(folder, ready, entered):
            await client.generate("What is it about", max_tokens=4, **options)
            await asyncio.sleep(HEARTBEATS_S)
    return entered


def features_in(modules: set[str]) -> set[str]:
    return {name for name in modules if FEATURE.search(name)}


async def test_a_plain_request_enters_no_feature(stack: tuple[Path, dict[str, Any]]) -> None:
    # A search for batches every 30 s, and one for expired files every 60 s, are each in at most one of three traces.
    traces = [await modules_of(stack, temperature=0.7, top_p=0.9, seed=7) for _ in range(3)]
    entered = set.intersection(*traces)
    assert features_in(entered) == set()
    assert len(entered) <= BUDGET["plain_request"]["modules"], (len(entered), sorted(entered))


async def test_a_request_that_uses_a_feature_is_noticed(stack: tuple[Path, dict[str, Any]]) -> None:
    entered = await modules_of(stack, beam_width=2)
    assert "scheduler_svc/core/features/beams.py" in features_in(entered)
    assert len(entered) > BUDGET["plain_request"]["modules"]
