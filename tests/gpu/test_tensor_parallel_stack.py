"""Tensor-parallel workers in the real system: a rank dies under load, a worker drains, other kinds are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from quire_client import AsyncClient

from tests.gpu.test_tensor_parallel import is_alive
from tests.processes.stack import Service, Stack, is_ready
from tests.unit.engine.models import make_model
from worker_svc.engine.gpu.local_ranks import EXIT_RANK_LOST

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
FLAGS = ("--num-blocks", "32", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "64")
TWO_RANKS = ("--backend", "cuda", "--tensor-parallel-size", "2", *FLAGS)
MAX_TOKENS = 6
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks children up in /proc")
async def test_a_rank_may_die_under_load(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", **TINY)
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, model, *TWO_RANKS) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        for worker in workers:
            worker.wait_ready(START_DEADLINE_S)
        async with await stack.connect(gateway, workers=2) as client:
            streams = Streams(client)
            other = stack.start_worker(scheduler, model, "--backend", "reference", *FLAGS)
            await streams.reach(2)
            os.kill(follower_of(workers[0]), signal.SIGKILL)
            assert workers[0].wait() == EXIT_RANK_LOST
            assert "rank-1 ended (exit code -9); this worker exits with code 70" in workers[0].log()
            found = await asyncio.gather(*streams.tasks)
            assert [len(tokens) for tokens in found] == [MAX_TOKENS] * 3
            assert await asyncio.gather(*Streams(client).tasks) == found
            check_other_kind_was_refused(scheduler, other)
            assert not is_ready((await client.status()).schedulers, other)
            follower = follower_of(workers[1])
            assert workers[1].terminate() == 0
            assert not is_alive(follower)


def check_other_kind_was_refused(scheduler: Service, other: Service) -> None:
    """A worker whose tokens might differ is refused, and its log names both kinds."""
    deadline = time.monotonic() + START_DEADLINE_S
    while "refuses this worker" not in other.log():
        assert other.is_running, other.log()
        assert time.monotonic() < deadline, other.log()
        time.sleep(0.05)
    assert "has numerics 'reference, " in other.log()
    assert "serves 'cuda/triton, interpreted, 2 ranks' (from worker worker-" in other.log()
