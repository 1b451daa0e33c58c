"""Attacks on `--node-listen`: the leader lives, its memory returns, and its node gets every message in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gpu.test_tensor_parallel_stack import START_DEADLINE_S, TINY, TWO_RANKS, Streams, start_two_nodes
from tests.hostile import attacks, node_attacks
from tests.hostile.node_attacks import NODE_ATTACKS, Attack
from tests.hostile.node_leader import PLANTS
from tests.hostile.node_target import NodeTarget
from tests.hostile.target import TOKENS, Port
from tests.hostile.watch import Watch
from tests.processes.stack import Stack
from tests.unit.engine.models import make_model

SIZE = attacks.Size(frames=0, connections=200, open_calls=0, slow_s=1.0, bomb_bytes=4 << 20)
BOUNDS = {"kept_mib": 64.0, "peak_mib": 128.0}
# The attack that finds the plant, and words of its finding.
EXPECTED: dict[str, tuple[Attack, str]] = {
    "unchecked_proof": (node_attacks.wrong_tokens, "the token '' was accepted"),
    "same_nonce": (node_attacks.replays, "recorded bytes of a node were accepted"),
    "announced_memory": (node_attacks.bad_frames, "MiB at its peak"),
    "unhandled": (node_attacks.bad_frames, "Traceback"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [SIZE, pytest.param(attacks.FULL, marks=pytest.mark.deep)], ids=["short", "full"])
async def test_attacks_harm_neither_the_leader_nor_its_node(tmp_path: Path, size: attacks.Size) -> None:
    with NodeTarget(tmp_path) as target:
        found = [str(finding) for attack in NODE_ATTACKS for finding in await target.attack(attack, size, **BOUNDS)]
    assert found == []


@pytest.mark.parametrize("plant", PLANTS)
async def test_the_attacks_find_a_planted_weakness(tmp_path: Path, plant: str) -> None:
    attack, words = EXPECTED[plant]
    with NodeTarget(tmp_path, plant) as target:
        found = [finding.what for finding in await target.attack(attack, SIZE, **BOUNDS, settle_s=1.0)]
    assert any(words in what for what in found), found


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_attacks_change_no_token_of_a_worker_on_two_hosts(tmp_path: Path) -> None:
    """Real ranks, in Triton's interpreter."""
    model = make_model(tmp_path / "model", "qwen3", **TINY)
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    trust = ("--token-file", str(tokens))
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler(*trust)
        leader, node = start_two_nodes(stack, scheduler, model, (*TWO_RANKS, *trust))
        gateway = stack.start_gateway(scheduler, flags=trust)
        leader.wait_ready(START_DEADLINE_S)
        address = leader.command[leader.command.index("--node-listen") + 1]
        port = Port("leader/nodes", leader, address, (), {"": TOKENS["worker"]})
        async with await stack.connect(gateway) as client:
            expected = await asyncio.gather(*Streams(client).tasks)
            async with Watch("attacks", [leader, node], []) as watch:
                streams = Streams(client)
                found = [what for attack in NODE_ATTACKS for what in await attack(port, SIZE)]
                assert await asyncio.gather(*streams.tasks) == expected
            assert await asyncio.gather(*Streams(client).tasks) == expected
    assert [*found, *map(str, watch.findings)] == []
