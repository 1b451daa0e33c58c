"""Tensor-parallel workers on one and two hosts in the real system: ranks die under load, a worker drains, other kinds
are refused."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import pytest
from quire_client import AsyncClient

from tests.hostile import attacks
from tests.hostile.node_attacks import NODE_ATTACKS
from tests.hostile.target import TOKENS, Port
from tests.hostile.watch import Watch
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, is_ready
from tests.processes.test_trust import Certificates
from tests.unit.engine.models import make_model
from worker_svc.engine.gpu.ranks.local import EXIT_RANK_LOST

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
FLAGS = ("--num-blocks", "32", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "64")
TWO_RANKS = ("--backend", "cuda", "--tensor-parallel-size", "2", *FLAGS)
MAX_TOKENS = 6
ATTACK_SIZE = attacks.Size(frames=0, connections=200, open_calls=0, slow_s=1.0, bomb_bytes=4 << 20)
START_DEADLINE_S = 240.0  # five processes import torch at once


class Streams:
    """Seeded streams and the number of tokens received."""

    def __init__(self, client: AsyncClient) -> None:
        self.num_tokens = 0
        self._client = client
        self.tasks = [asyncio.create_task(self._run(seed)) for seed in range(3)]

    async def _run(self, seed: int) -> list[int]:
        tokens: list[int] = []
        prompt = [seed + 1, 7, 9, 11]
        async with self._client.stream(token_ids=prompt, max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                self.num_tokens += len(delta.token_ids)
        return tokens

    async def reach(self, count: int) -> None:
        while self.num_tokens < count:
            assert not any(task.done() for task in self.tasks), "a stream ended before it could be disturbed"
            await asyncio.sleep(0.005)


def follower_of(worker: Service) -> int:
    """Process id of rank 1: the child process that runs multiprocessing's main."""
    assert worker.process is not None
    children = Path(f"/proc/{worker.process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    (follower,) = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return follower


@pytest.mark.deep  # test_tensor_parallel.py and test_nodes.py kill ranks; streams of lost workers are tests/processes'
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks children up in /proc")
async def test_ranks_may_die_under_load(tmp_path: Path) -> None:
    """A worker with both ranks on this host, and one whose second rank is a node of its own: each loses a rank while
    the other takes its streams over. All tokens are equal, and the two nodes come back when they are started again."""
    model = make_model(tmp_path / "model", "qwen3", **TINY)
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        on_one_host = stack.start_worker(scheduler, model, *TWO_RANKS)
        leader, node = start_two_nodes(stack, scheduler, model)
        gateway = stack.start_gateway(scheduler)
        for worker in (on_one_host, leader):
            worker.wait_ready(START_DEADLINE_S)
        async with await stack.connect(gateway, workers=2) as client:
            streams = Streams(client)
            other = stack.start_worker(scheduler, model, "--backend", "reference", *FLAGS)
            await streams.reach(2)
            node.kill()
            assert leader.wait() == EXIT_RANK_LOST
            assert re.search(r"node 1 \(127\.\S+\) is lost: .*; this worker exits with code 70", leader.log())
            found = await asyncio.gather(*streams.tasks)
            assert [len(tokens) for tokens in found] == [MAX_TOKENS] * 3
            node.start()  # waits for its leader
            leader.start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, leader), START_DEADLINE_S)

            streams = Streams(client)
            await streams.reach(2)
            os.kill(follower_of(on_one_host), signal.SIGKILL)
            assert on_one_host.wait() == EXIT_RANK_LOST
            assert "rank-1 ended (exit code -9); this worker exits with code 70" in on_one_host.log()
            assert await asyncio.gather(*streams.tasks) == found
            assert await asyncio.gather(*Streams(client).tasks) == found  # on two hosts alone
            check_other_kind_was_refused(scheduler, other)
            assert not is_ready((await client.status()).schedulers, other)
            assert node.terminate() == 0  # the leader drains first
            assert leader.wait() == 0
            assert "has to stop, so this worker drains" in leader.log()


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks children up in /proc")
async def test_a_child_process_of_the_other_node_may_die(tmp_path: Path) -> None:
    """Four ranks on two nodes, with certificates between them, give the tokens of one rank."""
    model = make_model(tmp_path / "model", "qwen3", **TINY | {"num_attention_heads": 4, "num_key_value_heads": 2})
    certificates = Certificates(tmp_path / "certificates")
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, model, "--backend", "cuda", *FLAGS)
        async with await stack.connect(stack.start_gateway(scheduler)) as client:
            expected = await asyncio.gather(*Streams(client).tasks)
        scheduler = stack.start_scheduler(*certificates.flags("scheduler"))
        four_ranks = ("--backend", "cuda", "--tensor-parallel-size", "4", *FLAGS, *certificates.flags("worker"))
        leader, node = start_two_nodes(stack, scheduler, model, four_ranks)
        gateway = stack.start_gateway(scheduler, flags=certificates.flags("gateway"))
        async with await stack.connect(gateway) as client:
            assert await asyncio.gather(*Streams(client).tasks) == expected
        os.kill(follower_of(node), signal.SIGKILL)
        assert leader.wait() == node.wait() == EXIT_RANK_LOST
        assert re.search(r"node 1 \(127\.\S+\): rank-3 ended \(exit code -9\); this worker exits", leader.log())
        assert "rank-3 ended (exit code -9); this node exits with code 70" in node.log()


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_attacks_change_no_token_of_a_worker_on_two_hosts(tmp_path: Path) -> None:
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
                found = [what for attack in NODE_ATTACKS for what in await attack(port, ATTACK_SIZE)]
                assert await asyncio.gather(*streams.tasks) == expected
            assert await asyncio.gather(*Streams(client).tasks) == expected
    assert [*found, *map(str, watch.findings)] == []


def start_two_nodes(
    stack: Stack, scheduler: Service, model: Path, ranks: tuple[str, ...] = TWO_RANKS
) -> tuple[Service, Service]:
    """The leader, which listens at an address of its own, and the other node. The node starts first."""
    address = f"127.0.0.2:{free_port()}"
    flags = (*ranks, "--nnodes", "2")
    node = stack.start_worker(scheduler, model, *flags, "--node-rank", "1", "--leader-address", address)
    return stack.start_worker(scheduler, model, *flags, "--node-listen", address), node


def check_other_kind_was_refused(scheduler: Service, other: Service) -> None:
    """A worker whose tokens might differ is refused, and its log names both kinds."""
    deadline = time.monotonic() + START_DEADLINE_S
    while "refuses this worker" not in other.log():
        assert other.is_running, other.log()
        assert time.monotonic() < deadline, other.log()
        time.sleep(0.05)
    assert "has numerics 'reference, " in other.log()
    assert "serves 'cuda/triton, interpreted, 2 ranks' (from worker worker-" in other.log()
