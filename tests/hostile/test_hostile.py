"""Attacks on every port of a running system: it stays alive, its memory returns, and other streams are unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.hostile import attacks
from tests.hostile.suite import Suite, all_attacks, as_stranger, good_streams, one_of_each_code, takes_messages
from tests.hostile.target import Target

SIZE = attacks.Size(frames=2_000, connections=200, open_calls=400, slow_s=1.0, bomb_bytes=4 << 20)
COUNT = 600
KEPT_MIB = 64.0
PEAK_MIB = 200.0


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    with Target(tmp_path) as target:
        yield target


@pytest.mark.timeout(240)
async def test_attacks_harm_neither_processes_nor_other_streams(target: Target) -> None:
    client = await target.connect()
    ports = one_of_each_code(target)
    async with client, good_streams(target, client) as streams:
        suite = Suite(target, streams, kept_mib=KEPT_MIB, peak_mib=PEAK_MIB)
        spoken = [port for port in ports if takes_messages(port)]
        await suite.mutate(spoken, count=COUNT, seed=0, is_insider=False)
        await suite.mutate(spoken, count=COUNT, seed=0, is_insider=True)
        for number, (attack, places) in enumerate(all_attacks(ports).items()):
            await suite.launch(attack, [as_stranger(port) for port in places] if number % 2 else places, SIZE)
    assert [str(finding) for finding in suite.findings] == []
    assert streams.wrong() == []
    assert streams.num_ended >= 8
