"""The attacks find planted weaknesses, and find none in a scheduler without one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.hostile import attacks, examples
from tests.hostile.campaigns import mutated_calls, stranger_calls
from tests.hostile.http2 import Http2
from tests.hostile.planted import PLANTS, STALL_S
from tests.hostile.target import TOKENS, Port
from tests.hostile.watch import Watch
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

COUNT = 1_500
SIZE = attacks.Size(frames=500, connections=50, open_calls=100, slow_s=0.5, bomb_bytes=16 << 20)
BOUNDS = {"kept_mib": 192.0, "peak_mib": 224.0, "stall_s": STALL_S - 1, "settle_s": 2.0}
SEEDS = range(12, 24)  # half of them find the plant `allocation`
Run = Callable[[Port, int], Awaitable[dict[str, str]]]


async def strangers(port: Port, seed: int) -> dict[str, str]:
    return (await stranger_calls(port)).faults


async def mutations(port: Port, seed: int) -> dict[str, str]:
    return (await mutated_calls(port, count=COUNT, seed=seed, is_insider=True, within_s=5.0)).faults


async def bombs(port: Port, seed: int) -> dict[str, str]:
    await attacks.launch(attacks.bombs, port, SIZE)
    return {}


# The attack that finds the plant, and words of its finding.
EXPECTED: dict[str, tuple[Run, str]] = {
    "open_method": (strangers, "without credentials was not refused"),
    "ended_task": (mutations, "no answer to a probe"),
    "no_limit": (bombs, "MiB at its peak"),
    "allocation": (mutations, "Traceback"),
    "leak": (mutations, "MiB and stayed"),
    "unhandled": (mutations, "Traceback"),
    "stall": (mutations, "a probe took"),
}


@dataclass(frozen=True)
class Planted:
    """Schedulers by plant; "none" has no plant."""

    ports: dict[str, Port]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    folder = tmp_path_factory.mktemp("planted")
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    ports: dict[str, Port] = {}
    with Stack(folder) as stack:
        for name in ("none", *PLANTS):
            address = f"127.0.0.1:{free_port()}"
            own = ["--listen", address, "--token-file", str(tokens)]
            command = [sys.executable, "-m", "tests.hostile.planted", name, *own]
            service = Service(f"scheduler-{name}", command, address, folder / f"{name}.log")
            stack.services.append(service)
            service.start()
            credentials = {"": TOKENS["gateway"], "Register": TOKENS["worker"]}
            ports[name] = Port(service.name, service, address, (examples.SCHEDULER, examples.HEALTH), credentials)
        for service in stack.services:
            service.wait_ready()
        yield Planted(ports)


async def findings_on(port: Port, *runs: Run, seed: int = SEEDS[0]) -> list[str]:
    """All findings of some attacks on a port."""
    async with Watch("attacks", [port.service], [port], **BOUNDS) as watch:
        faults = [f"{call}: {what}" for run in runs for call, what in (await run(port, seed)).items()]
    return [*faults, *(found.what for found in watch.findings)]


@pytest.mark.parametrize("name", PLANTS)
async def test_the_attacks_find_a_planted_weakness(planted: Planted, name: str) -> None:
    run, words = EXPECTED[name]
    found: list[str] = []
    for seed in SEEDS:
        found += await findings_on(planted.ports[name], run, seed=seed)
        if any(words in one for one in found):
            return
    raise AssertionError(f"no seed finds it: {found}")


async def test_the_attacks_find_nothing_in_a_sound_scheduler(planted: Planted) -> None:
    assert await findings_on(planted.ports["none"], strangers, mutations, bombs) == []


def test_every_plant_has_an_expected_finding() -> None:
    assert EXPECTED.keys() == PLANTS.keys()


async def test_closing_a_connection_does_not_lose_a_cancellation(planted: Planted) -> None:
    """A probe that was cancelled while it closed its connection went on, so the watch did not end."""
    connection = await Http2.open(planted.ports["none"].address)
    closing = asyncio.create_task(connection.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
