"""Attacks on every port of a running system: it stays alive, its memory returns, and other streams are unchanged."""

from __future__ import annotations

import asyncio
import math
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import quire
from google.protobuf.descriptor import ServiceDescriptor
from quire_client import AsyncClient, QuireError

from tests.hostile import attacks, examples
from tests.hostile.costly import COSTLY_CALLS, COSTLY_REQUESTS
from tests.hostile.examples import calls_of, methods_of
from tests.hostile.streams_apart import StreamsApart
from tests.hostile.suite import Suite, all_attacks, as_stranger, good_streams, one_of_each_code, takes_messages
from tests.hostile.target import Target
from tests.hostile.watch import Watch

SIZE = attacks.Size(frames=1_000, connections=100, open_calls=200, slow_s=1.0, bomb_bytes=4 << 20, unfinished_s=2.0)
COUNT = 60
PROTOS = Path(next(iter(quire.__path__)))
# Without credentials, these end before the code that they are for. Other attacks alternate between both callers.
FOR_INSIDERS = (
    attacks.http_bombs, attacks.bombs, attacks.stream_bombs, attacks.framing_lies, attacks.unread_answers,
    *COSTLY_CALLS, *COSTLY_REQUESTS,
)  # fmt: skip
# Other attacks meet their limits too: `http_empty_lists_eight_times`, `strings_of_a_text`.
ONLY_FULL = ("http_unknown_keys", "http_biases", "http_strings_of_a_short_text")
KEPT_MIB = 64.0
PEAK_MIB = 450.0  # eight bodies of 15 MB at once, each twice while it is received
PAUSE_S = 20.0  # beside other tests; `make hostile` has 0.5
NUM_LIED_TO = 80


def quire_services() -> list[ServiceDescriptor]:
    """All services of the proto files."""
    names = (path.relative_to(PROTOS).with_suffix("").parts for path in sorted(PROTOS.rglob("*_pb2.py")))
    modules = [import_module(".".join(("quire", *parts))) for parts in names]
    return [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]


def test_every_method_has_an_example() -> None:
    """An RPC without a row in the table would not be attacked."""
    methods = methods_of(*quire_services(), examples.HEALTH, examples.REFLECTION)
    assert sorted(map(examples.name_of, methods)) == sorted(examples.CALLS)
    for method in methods:
        assert {message.DESCRIPTOR for call in calls_of(method) for message in call} == {method.input_type}, method.name


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    with Target(tmp_path) as target:
        yield target


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "size"),
    [(COUNT, SIZE), pytest.param(10_000, attacks.FULL, marks=pytest.mark.deep)],
    ids=["short", "full"],
)
async def test_attacks_harm_neither_processes_nor_other_streams(target: Target, count: int, size: attacks.Size) -> None:
    client = await target.connect()
    ports = one_of_each_code(target)
    assert {service for port in ports for service in port.services} >= set(quire_services())
    is_short = size is SIZE
    bounds = {"kept_mib": KEPT_MIB, "peak_mib": PEAK_MIB} if is_short else {"kept_mib": 256.0, "peak_mib": 800.0}
    async with client, good_streams(target.model_dir, client) as streams:
        suite = Suite(target, streams, pause_s=PAUSE_S, **bounds)
        floods = Suite(target, streams, pause_s=math.inf, **bounds)
        spoken = [port for port in ports if takes_messages(port)]
        await suite.mutate(spoken, count=count, seed=0, is_insider=False)
        await suite.mutate(spoken, count=count, seed=0, is_insider=True)
        for number, (attack, places) in enumerate(all_attacks(ports).items()):
            if is_short and attack.__name__ in ONLY_FULL:
                continue
            is_stranger = number % 2 and attack not in FOR_INSIDERS
            used = floods if attack in attacks.FLOODS else suite
            await used.launch(attack, [as_stranger(port) for port in places] if is_stranger else places, size)
    findings = suite.findings + floods.findings
    assert not findings, "\n".join(map(str, findings))
    assert streams.wrong() == []
    assert streams.num_ended >= 8


@pytest.mark.timeout(120)
async def test_a_worker_that_lies_ends_no_scheduler(tmp_path: Path) -> None:
    """It answers a tenth of all calls with mutated messages, and registers again whenever its lease is taken away."""
    with Target(tmp_path, gateways=1, schedulers=1, workers=1) as target:
        async with await target.connect() as client:
            (worker,) = target.workers
            worker.kill()
            async with Watch("a worker that lies", [*target.schedulers, *target.gateways], []) as watch:
                module = "tests.hostile.hostile_worker"
                liar = target.start_worker(module, "1", "0.1")
                results = await asyncio.gather(*(_ended(client, number) for number in range(NUM_LIED_TO)))
                liar.kill()
            worker.start()
            await target.wait_leased()
            answer = await client.generate(token_ids=[5, 6, 7], max_tokens=20, ignore_eos=True)
    assert len(answer.token_ids) == 20
    assert True in results
    assert not watch.findings, "\n".join(map(str, watch.findings))


async def _ended(client: AsyncClient, number: int) -> bool:
    """Whether a request got an answer. With a worker that lies it may fail, and its tokens may be wrong."""
    options: list[dict[str, Any]] = [{}, {"beam_width": 3, "n": 2}, {"n": 3, "temperature": 1.0, "logprobs": 2}]
    try:
        async with asyncio.timeout(10.0):
            await client.generate(token_ids=[5 + number, 6, 7], max_tokens=20, **options[number % 3])
    except (QuireError, TimeoutError):
        return False
    return True


async def test_streams_in_another_process_end_with_their_input() -> None:
    program = 'import sys; sys.stdin.read(); print(\'{"wrong": [], "ended": 3}\')'
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE, stdout=PIPE)
    streams = StreamsApart(child)
    async with asyncio.timeout(60.0):
        await streams.end()
    assert (streams.num_ended, streams.wrong()) == (3, [])
