"""All attacks on all ports, beside good streams whose tokens are compared with the rule of the simulated model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from quire_client import AsyncClient

from tests.chaos.reference import Catalogue, SimRule
from tests.chaos.streams import StreamLoad
from tests.hostile.attacks import Attack, Size, attacks_on, launch
from tests.hostile.campaigns import Outcomes, mutated_bodies, mutated_calls, stranger_calls
from tests.hostile.target import Port, Target
from tests.hostile.watch import Finding, Memory, Watch

LANES = 8
NUM_REQUESTS = 24
# Valid calls of an insider that change the system: a drained worker does not return by itself.
SKIPPED = ("Drain",)


@dataclass
class Row:
    """The figures of one attack on one port."""

    attack: str
    port: str
    seconds: float
    tokens_per_s: float
    slowest_probe_s: float
    memory: dict[str, Memory]
    findings: list[Finding]
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def largest_growth(self) -> tuple[str, float]:
        """The process whose memory has grown most, and by how many MiB."""
        growth = {name: memory.after - memory.before for name, memory in self.memory.items()}
        name = max(growth, key=growth.__getitem__)
        return name, growth[name]


class Counted(Protocol):
    """Streams whose speed is measured."""

    async def count(self) -> tuple[int, float]:
        """The number of tokens so far, and the time in seconds."""
        ...


def _speed(before: tuple[int, float], after: tuple[int, float]) -> float:
    """Tokens per second."""
    return (after[0] - before[0]) / max(after[1] - before[1], 0.1)


class GoodStreams:
    """Eight streams at a time, from start to `stop`."""

    def __init__(self, load: StreamLoad) -> None:
        self._load = load

    async def count(self) -> tuple[int, float]:
        """The number of tokens so far, and the time in seconds."""
        return self.num_tokens, time.monotonic()

    @property
    def num_tokens(self) -> int:
        return sum(record.num_tokens for record in self._load.records)

    def wrong(self) -> list[str]:
        """The streams whose tokens differ from the reference, or that failed."""
        return [f"{record.request}: {record.difference()}" for record in self._load.records if record.is_bad]

    @property
    def num_ended(self) -> int:
        return self._load.counts["streams"]


@contextlib.asynccontextmanager
async def good_streams(model_dir: Path, client: AsyncClient) -> AsyncIterator[GoodStreams]:
    """Run good streams. When the block ends, wait for the running ones."""
    source = SimRule(client, model_dir)
    catalogue = await Catalogue.build(source, seed=1, count=NUM_REQUESTS, vocab_size=(await client.model()).vocab_size)
    load = StreamLoad(client, catalogue, seed=1, lanes=LANES, at_least=LANES)
    running = asyncio.create_task(load.run(asyncio.get_running_loop().time() + 86_400))
    try:
        yield GoodStreams(load)
    finally:
        load.stop()
        await running
    await load.verify_unseeded(source)


class Suite:
    """Attacks the ports of a target and keeps the figures."""

    def __init__(self, target: Target, streams: Counted, *, kept_mib: float, peak_mib: float) -> None:
        self._target = target
        self._streams = streams
        self._bounds = {"kept_mib": kept_mib, "peak_mib": peak_mib}
        self.rows: list[Row] = []

    @property
    def findings(self) -> list[Finding]:
        return [finding for row in self.rows for finding in row.findings]

    async def rest(self, seconds: float) -> float:
        """The tokens per second of the good streams without an attack."""
        before = await self._streams.count()
        await asyncio.sleep(seconds)
        return _speed(before, await self._streams.count())

    async def launch(self, attack: Attack, ports: Sequence[Port], size: Size) -> None:
        """One attack on some ports at once, with credentials."""
        await self._run(attack.__name__, ports, [launch(attack, port, size) for port in ports])

    async def mutate(self, ports: Sequence[Port], *, count: int, seed: int, is_insider: bool) -> None:
        """`count` mutated messages to each of these ports at once."""
        name = f"{count} mutated messages, {'with' if is_insider else 'without'} credentials"
        await self._run(name, ports, [_mutate(port, count, seed, is_insider) for port in ports])

    async def _run(self, attack: str, ports: Sequence[Port], runs: Sequence[object]) -> None:
        place = ", ".join(port.name for port in ports)
        before, began = await self._streams.count(), time.monotonic()
        async with Watch(attack, self._target.services, self._target.ports, **self._bounds) as watch:
            results = await asyncio.gather(*runs)  # type: ignore[call-overload]
            seconds = time.monotonic() - began
            speed = _speed(before, await self._streams.count())
        row = Row(attack, place, seconds, speed, watch.slowest_probe_s, watch.memory, watch.findings)
        for port, outcomes in zip(ports, results, strict=True):
            if isinstance(outcomes, Outcomes):
                row.codes += outcomes.codes()
                row.findings += [Finding(attack, port.name, f"{c}: {what}") for c, what in outcomes.faults.items()]
        self.rows.append(row)


async def _mutate(port: Port, count: int, seed: int, is_insider: bool) -> Outcomes:
    if not port.is_grpc:
        return await mutated_bodies(port, count=count, seed=seed, is_insider=is_insider)
    outcomes = await mutated_calls(port, count=count, seed=seed, is_insider=is_insider, skip=SKIPPED)
    if not is_insider:
        outcomes.faults |= (await stranger_calls(port)).faults
    return outcomes


def one_of_each(target: Target) -> list[Port]:
    """A port of each kind: those of the first process of each service."""
    return [port for port in target.ports if "-0/" in port.name]


def one_of_each_code(target: Target) -> list[Port]:
    """A port of each kind. All services share the code of the ports for metrics and probes."""
    shared = ("/metrics", "/health")
    return [port for port in one_of_each(target) if "scheduler" in port.name or not port.name.endswith(shared)]


def takes_messages(port: Port) -> bool:
    return port.is_grpc or port.name.endswith("/http")


def as_stranger(port: Port) -> Port:
    """The port without credentials."""
    return replace(port, credentials={})


def all_attacks(ports: Sequence[Port]) -> dict[Attack, list[Port]]:
    """Each attack with the ports that it fits."""
    found: dict[Attack, list[Port]] = {}
    for port in ports:
        for attack in attacks_on(port):
            found.setdefault(attack, []).append(port)
    return found
