"""Names that stand for several schedulers: their addresses are found, followed and kept while DNS fails."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from svc_common import scheduler_names
from svc_common.config import scheduler_address
from svc_common.scheduler_names import SchedulerNames, lookup
from svc_common.tasks import cancel


class Dns:
    """Names with addresses. A name without an entry does not exist."""

    def __init__(self, **names: list[str]) -> None:
        self.names = names
        self.num_lookups = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.num_lookups += 1
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [f"{address}:{port}" for address in self.names[host]]


@asynccontextmanager
async def following(schedulers: list[str], dns: Dns, interval_s: float = 0.01) -> AsyncIterator[list[Sequence[str]]]:
    seen: list[Sequence[str]] = []
    names = SchedulerNames(schedulers, seen.append, lookup=dns, interval_s=interval_s)
    names.start()
    running = asyncio.ensure_future(names.run())
    try:
        yield seen
    finally:
        await cancel(running)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_names, "MIN_LOOKUP_INTERVAL_S", 0.001)


async def test_addresses_without_a_name_need_no_lookup() -> None:
    dns = Dns()
    async with following(["a:1", "b:2"], dns) as seen:
        assert seen == [["a:1", "b:2"]]
        await asyncio.sleep(0.05)
    assert dns.num_lookups == 0


async def test_a_name_stands_for_all_its_addresses_and_follows_them() -> None:
    dns = Dns(schedulers=["10.0.0.1", "10.0.0.2"])
    async with following(["dns:///schedulers:52", "a:1"], dns) as seen:
        await until(lambda: len(seen) == 2)
        assert seen == [["a:1"], ["a:1", "10.0.0.1:52", "10.0.0.2:52"]]
        dns.names["schedulers"] = ["10.0.0.2", "10.0.0.3"]
        await until(lambda: len(seen) == 3)
        assert seen[-1] == ["a:1", "10.0.0.2:52", "10.0.0.3:52"]


async def test_a_failed_lookup_keeps_the_addresses_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dns = Dns(schedulers=["10.0.0.1"])
    caplog.set_level(logging.INFO)
    async with following(["dns:///schedulers:52"], dns) as seen:
        await until(lambda: len(seen) == 1)
        addresses = dns.names.pop("schedulers")
        before = dns.num_lookups
        await until(lambda: dns.num_lookups > before + 3)
        dns.names["schedulers"] = addresses
        await until(lambda: "is found again" in caplog.text)
    assert seen == [["10.0.0.1:52"]]
    assert caplog.text.count("cannot be looked up (Name or service not known); keeping its last addresses") == 1


async def test_a_lost_scheduler_brings_the_next_lookup_forward() -> None:
    dns = Dns(schedulers=[])
    seen: list[Sequence[str]] = []
    names = SchedulerNames(["dns:///schedulers:52"], seen.append, lookup=dns, interval_s=3600.0)
    running = asyncio.ensure_future(names.run())
    await until(lambda: dns.num_lookups == 1)
    dns.names["schedulers"] = ["10.0.0.9"]
    names.hurry()
    await until(lambda: bool(seen) and list(seen[-1]) == ["10.0.0.9:52"])
    await cancel(running)


async def test_a_host_with_two_families_is_one_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [("10.0.0.2", 52), ("fd00::1", 52, 0, 0), ("10.0.0.1", 52)]

    def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("schedulers", 52)
        return [(0, 0, 0, "", answer) for answer in answers]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert await lookup("schedulers", 52) == ["10.0.0.1:52", "10.0.0.2:52"]
    answers[:] = [("fd00::1", 52, 0, 0)]
    assert await lookup("schedulers", 52) == ["[fd00::1]:52"]


@pytest.mark.parametrize("text", ["a:1", "[::1]:1", "dns:///a.b:1"])
def test_accepted_addresses(text: str) -> None:
    assert scheduler_address(text) == text


@pytest.mark.parametrize("text", ["a", "dns:///a", "dns://8.8.8.8/a:1", "dns:a:1", "unix:///a:1", "https://a:1"])
def test_refused_addresses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="host:port"):
        scheduler_address(text)
