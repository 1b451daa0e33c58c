"""`quire top`: rates of intervals, and the lines of the screen at every size."""

from __future__ import annotations

import dataclasses

import pytest
from quire_cli import main
from quire_cli.commands.top_screen import (
    Look,
    RateMeter,
    Rates,
    View,
    count_text,
    pool_bar,
    quantile,
    screen,
    seconds_text,
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


def test_quantile_of_the_last_bucket_and_of_nothing() -> None:
    assert quantile((0, 0, 4), BOUNDS, 0.5) == 1.0
    assert quantile((0, 0, 0), BOUNDS, 0.5) is None
    assert quantile((), (), 0.5) is None


# -- the screen ------------------------------------------------------------------------------------------------------


def view(num_workers: int = 2, num_requests: int = 2) -> View:
    requests = tuple(OpenRequest(f"request-{i}-" + 30 * "x", "worker-0", 10.0 - i, 12, 34) for i in range(num_requests))
    workers = tuple(worker(number) for number in range(num_workers))
    found = scheduler(workers=workers, slowest=requests, num_waiting=3, max_waiting=1024, prefix_query_tokens=4,
                      prefix_hit_tokens=3)  # fmt: skip
    rates = Rates(3988.0, 1.5, 60.0, 0.033, 1.25)
    return View("localhost:50051", "12:00:00", Status((found,), 1), rates, (1.0, 2.0, 4.0))


def test_a_screen_of_80_columns() -> None:
    lines = [line.text.rstrip() for line in screen(view(), 80, 24)]
    assert lines[0].startswith("quire top  localhost:50051  m")
    assert lines[0].endswith("12:00:00")
    assert lines[1] == "output     3988 tokens/s  ▃▅█"
    assert lines[2].startswith("first     33 ms p50, 1.2 s p95")
    assert lines[3] == "queue         3 waiting of 1024, 0 running, 0 prompt tokens pending"
    assert "75 % of prompt tokens; ended 1.5/s, steps 60/s" in lines[4]
    assert lines[7] == "worker-0               ready          3/8  ██████▒▒▒▒▒▒▒▒▒▒▒▒······   25%"
    assert lines[11] == "request-0-xxxx..xxxxxxxxxxxxxx   10.0 s       12       34  worker-0"


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 4, 9, 14, 24, 100])
@pytest.mark.parametrize("num_workers", [0, 1, 40])
def test_every_size_is_kept(width: int, height: int, num_workers: int) -> None:
    lines = screen(view(num_workers, 10), width, height)
    assert len(lines) <= height
    assert all(len(line.text) <= width for line in lines)


def test_with_many_workers_the_oldest_requests_stay() -> None:
    texts = [line.text for line in screen(view(40, 10), 80, 24)]
    assert any("more" in text for text in texts)
    assert sum(text.startswith("request-") for text in texts) == 3


def test_problems_are_shown() -> None:
    lost = dataclasses.replace(view(), status=Status((scheduler(connected=False),), 0), problem="connection refused")
    bad = [line.text for line in screen(lost, 80, 24) if line.look is Look.BAD]
    assert bad == ["NOT CONNECTED: scheduler s:1", "NO ANSWER: connection refused"]


def test_a_terminal_without_unicode() -> None:
    assert all(line.text.isascii() for line in screen(view(), 80, 24, is_unicode=False))


@pytest.mark.parametrize(
    ("used", "cached", "free", "bar"),
    [(1, 0, 999, "#" + 23 * "."), (999, 0, 1, 23 * "#" + "."), (500, 1, 500, 11 * "#" + "=" + 12 * "."),
     (0, 0, 0, 24 * " "), (0, 10, 0, 24 * "=")],
)  # fmt: skip
def test_every_part_of_a_pool_is_visible(used: int, cached: int, free: int, bar: str) -> None:
    assert pool_bar(worker(0, used, cached, free), is_unicode=False) == bar


def test_ids_cannot_drive_the_terminal() -> None:
    assert shortened("a\x1b[2Jb", 30) == "a?[2Jb"


def test_short_numbers() -> None:
    counts = [count_text(value) for value in (0, 9999, 12345, 10**7, 10**13)]
    assert counts == ["0", "9999", "12k", "10M", "10000G"]
    durations = [seconds_text(value) for value in (None, 0.0123, 9.99, 99.9, 600.0)]
    assert durations == ["-", "12 ms", "10.0 s", "99.9 s", "10 min"]


# -- the command -----------------------------------------------------------------------------------------------------


def test_without_a_terminal_it_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway({}) as gateway:
        assert main(["top", "--target", gateway.target, "--count", "2", "--interval-s", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("quire top") == 2
    assert out.count("w0 ") == 2
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_gateway_that_shows_a_summary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.v1 import inference_pb2 as pb

    monkeypatch.setattr(FakeGateway, "GetStatus", lambda *_: pb.GetStatusResponse(is_summary=True))
    with FakeGateway({}) as gateway:
        assert main(["top", "--target", gateway.target, "--count", "1"]) == 1
    assert "for operators" in capsys.readouterr().err


def test_status_with_watch_has_rates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quire_cli.commands.status.time.sleep", stop)
    with FakeGateway({}) as gateway:
        assert main(["status", "--watch", "--target", gateway.target]) == 130
    assert "rates: 0 tokens/s, 0.0 sequences/s, first token after - p50, - p95 (30 s)" in capsys.readouterr().out
