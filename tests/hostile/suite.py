"""All attacks on all ports, beside good streams whose tokens are compared with the rule of the simulated model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from quire_client import AsyncClient

from tests.chaos.reference import Catalogue, SimRule
from tests.chaos.streams import StreamLoad, StreamRecord
from tests.hostile.attacks import Attack, Size, attacks_on, launch
from tests.hostile.campaigns import Outcomes, mutated_bodies, mutated_calls, stranger_calls
from tests.hostile.costly import PREPARE, costly_attacks_on
from tests.hostile.examples import SKIPPED
from tests.hostile.target import Port, Target
from tests.hostile.watch import STALL_S, Finding, Memory, Watch

LANES = 8
NUM_REQUESTS = 24
PREPARED_S = 0.5  # good streams in this process go on


@dataclass
class Row:
    """The figures of one attack on one port."""

    attack: str
    port: str
    seconds: float
    tokens_per_s: float
    pause_s: float  # the longest one of a good stream
    slowest_probe_s: float
    memory: dict[str, Memory]
    findings: list[Finding]
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def largest_growth(self) -> tuple[str, float, float]:
        """The process whose memory was largest compared with before, and by how many MiB: afterwards, and at most."""
        name, memory = max(self.memory.items(), key=lambda one: one[1].peak - one[1].before)
        return name, memory.after - memory.before, memory.peak - memory.before


class Progress(NamedTuple):
    """The state of the good streams. `pause_s`: the longest pause of one of them since the last call."""

    num_tokens: int
    at: float
    pause_s: float

    def tokens_per_s(self, before: Progress) -> float:
        return (self.num_tokens - before.num_tokens) / max(self.at - before.at, 0.1)


class Counted(Protocol):
    """Streams whose speed and pauses are measured."""

    async def progress(self) -> Progress: ...


class GoodStreams:
    """Eight streams at a time, from start to `stop`."""

    def __init__(self, load: StreamLoad) -> None:
        self._load = load
        self._asked_at = 0.0

    async def progress(self) -> Progress:
        now, since = asyncio.get_running_loop().time(), self._asked_at
        self._asked_at = now
        active = (record for record in self._load.records if not record.ended or record.ended > since)
        pause_s = max((_longest_pause(record, since, now) for record in active), default=0.0)
        return Progress(self.num_tokens, time.monotonic(), pause_s)

    @property
    def num_tokens(self) -> int:
        return sum(record.num_tokens for record in self._load.records)

    def wrong(self) -> list[str]:
        """The streams whose tokens differ from the reference, or that failed."""
        return [f"{record.request}: {record.difference()}" for record in self._load.records if record.is_bad]

    @property
    def num_ended(self) -> int:
        return self._load.counts["streams"]


def _longest_pause(record: StreamRecord, since: float, now: float) -> float:
    """The longest time without tokens that ended after `since`."""
    times = [record.began, *record.delta_times, record.ended or now]
    return max(later - earlier for earlier, later in pairwise(times) if later > since)


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
    """Attacks the ports of a target and keeps the figures. A pause of a good stream beyond `pause_s` is a finding."""

    def __init__(
        self,
        target: Target,
        streams: Counted,
        *,
        kept_mib: float,
        peak_mib: float,
        pause_s: float,
        stall_s: float = STALL_S,
    ) -> None:
        self._target = target
        self._streams = streams
        self._pause_s = pause_s
        self._bounds = {"kept_mib": kept_mib, "peak_mib": peak_mib, "stall_s": stall_s}
        self.rows: list[Row] = []

    @property
    def findings(self) -> list[Finding]:
        return [finding for row in self.rows for finding in row.findings]

    async def rest(self, seconds: float) -> float:
        """The tokens per second of the good streams without an attack."""
        before = await self._streams.progress()
        await asyncio.sleep(seconds)
        return (await self._streams.progress()).tokens_per_s(before)

    async def launch(self, attack: Attack, ports: Sequence[Port], size: Size) -> None:
        """One attack on some ports at once, with credentials."""
        if attack in PREPARE:
            PREPARE[attack]()
            await asyncio.sleep(PREPARED_S)
        await self._run(attack.__name__, ports, [launch(attack, port, size) for port in ports])

    async def mutate(self, ports: Sequence[Port], *, count: int, seed: int, is_insider: bool) -> None:
        """`count` mutated messages to each of these ports at once."""
        name = f"{count} mutated messages, {'with' if is_insider else 'without'} credentials"
        await self._run(name, ports, [_mutate(port, count, seed, is_insider) for port in ports])

    async def _run(self, attack: str, ports: Sequence[Port], runs: Sequence[object]) -> None:
        place = ", ".join(port.name for port in ports)
        before, began = await self._streams.progress(), time.monotonic()
        async with Watch(attack, self._target.services, self._target.ports, **self._bounds) as watch:
            results = await asyncio.gather(*runs)  # type: ignore[call-overload]
            seconds = time.monotonic() - began
            after = await self._streams.progress()
        row = Row(
            attack,
            place,
            seconds,
            after.tokens_per_s(before),
            after.pause_s,
            watch.slowest_probe_s,
            watch.memory,
            watch.findings,
        )
        if row.pause_s > self._pause_s:
            row.findings.append(Finding(attack, place, f"a good stream paused for {row.pause_s:.1f} s"))
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
        for attack in (*attacks_on(port), *costly_attacks_on(port)):
            found.setdefault(attack, []).append(port)
    return found
