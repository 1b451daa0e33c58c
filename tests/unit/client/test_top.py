"""`quire top`: rates of intervals, and the lines of the screen at every size."""

from __future__ import annotations

import dataclasses

import pytest
from quire_cli import main
from quire_cli.commands.top_screen import (
    RateMeter,
    Rates,
    View,
    screen,
    shortened,
)
from quire_client.testing import FakeGateway
from quire_client.types import LatencyHistogram, OpenRequest, SchedulerStatus, Status, WorkerStatus

BOUNDS = (0.1, 1.0)


def scheduler(tokens: int = 0, counts: tuple[int, ...] = (0, 0, 0), **fields: object) -> SchedulerStatus:
    values = {f.name: 0 for f in dataclasses.fields(SchedulerStatus)}
    values |= {
        "address": "s:1",
        "model": "m",
        "connected": True,
        "prefix_index": "memory",
        "workers": (),
        "slowest": (),
    }
    values |= {"output_tokens": tokens, "first_token": LatencyHistogram(BOUNDS, counts), **fields}
    return SchedulerStatus(**values)


def worker(number: int = 0, used: int = 16, cached: int = 32, free: int = 16) -> WorkerStatus:
    return WorkerStatus(f"worker-{number}", "h:1", "ready", 3, 8, free, cached, used, 5, 1)


# -- rates -----------------------------------------------------------------------------------------------------------


def test_rates_are_those_of_the_last_seconds() -> None:
    meter = RateMeter()
    assert meter.add(Status((scheduler(100),), 0), 10.0) == Rates()
    assert meter.add(Status((scheduler(150),), 0), 11.0).output_tokens_per_s == 50
    meter.add(Status((scheduler(250),), 0), 12.0)
    assert meter.add(Status((scheduler(350),), 0), 13.0).output_tokens_per_s == 100, "since 11.0"


def test_a_restarted_or_new_or_lost_scheduler_adds_no_wrong_rate() -> None:
    meter = RateMeter()
    meter.add(Status((scheduler(1000),), 0), 0.0)
    restarted = scheduler(10, steps=0)
    joined = scheduler(5000, address="s:2")
    assert meter.add(Status((restarted, joined), 0), 2.0).output_tokens_per_s == 0
    assert meter.add(Status((scheduler(30, connected=False),), 0), 4.0).output_tokens_per_s == 0


def test_quantiles_are_those_of_the_interval() -> None:
    meter = RateMeter()
    meter.add(Status((scheduler(counts=(90, 9, 1)),), 0), 0.0)
    rates = meter.add(Status((scheduler(counts=(90, 11, 1)),), 0), 1.0)
    assert (rates.first_token_p50_s, rates.first_token_p95_s) == (pytest.approx(0.55), pytest.approx(0.955))
    for at in range(2, 40):
        rates = meter.add(Status((scheduler(counts=(90, 11, 1)),), 0), float(at))
    assert rates.first_token_p50_s is None, "no first token in the last 30 s"


# -- the screen ------------------------------------------------------------------------------------------------------


def view(num_workers: int = 2, num_requests: int = 2) -> View:
    requests = tuple(OpenRequest(f"request-{i}-" + 30 * "x", "worker-0", 10.0 - i, 12, 34) for i in range(num_requests))
    workers = tuple(worker(number) for number in range(num_workers))
    found = scheduler(workers=workers, slowest=requests, num_waiting=3, max_waiting=1024, prefix_query_tokens=4,
                      prefix_hit_tokens=3)  # fmt: skip
    rates = Rates(3988.0, 1.5, 60.0, 0.033, 1.25)
    return View("localhost:50051", "12:00:00", Status((found,), 1), rates, (1.0, 2.0, 4.0))


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 4, 9, 14, 24, 100])
@pytest.mark.parametrize("num_workers", [0, 1, 40])
def test_every_size_is_kept(width: int, height: int, num_workers: int) -> None:
    lines = screen(view(num_workers, 10), width, height)
    assert len(lines) <= height
    assert all(len(line.text) <= width for line in lines)


def test_ids_cannot_drive_the_terminal() -> None:
    assert shortened("a\x1b[2Jb", 30) == "a?[2Jb"


# -- the command -----------------------------------------------------------------------------------------------------


def test_without_a_terminal_it_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway({}) as gateway:
        assert main(["top", "--target", gateway.target, "--count", "2", "--interval-s", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("quire top") == 2
    assert out.count("w0 ") == 2
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
