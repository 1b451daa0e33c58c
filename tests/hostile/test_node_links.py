"""Attacks on `--node-listen`: the leader lives, its memory returns, and its node gets every message in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import attacks, node_attacks
from tests.hostile.node_attacks import NODE_ATTACKS, Attack
from tests.hostile.node_leader import PLANTS
from tests.hostile.node_target import NodeTarget

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
