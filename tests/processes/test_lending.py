"""Two schedulers of one model: each uses the prefixes that the other one's worker holds, and needs neither of them."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, is_ready, read_page, wait_idle
from tests.unit.engine.models import make_model

REAL = ("--dtype", "bfloat16", "--num-blocks", "128", "--max-num-seqs", "6", "--max-num-batched-tokens", "48")
SIM = ("--executor", "sim", "--sim-step-ms", "20", "--block-size", "16", "--num-blocks", "512")
PROMPT = [3 + i * 7 % 90 for i in range(450)]
NUM_BLOCKS = len(PROMPT) // 16


async def answer(client: AsyncClient, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """The tokens of an answer and the prompt tokens that were cached."""
    result = await client.generate(token_ids=prompt, seed=5, temperature=1.0, ignore_eos=True, max_tokens=24, **options)
    return list(result.token_ids), result.usage.cached_tokens


class Pair:
    """Two replicas with one worker each, and a gateway for each."""

    def __init__(self, stack: Stack, redis: RedisServer, model: Path, *flags: str) -> None:
        self.redis = redis
        self.ports = free_port(), free_port()
        self.schedulers, self.workers, self.gateways = list[Service](), list[Service](), list[Service]()
        for port in self.ports:
            scheduler = stack.start_scheduler("--redis", redis.url, "--metrics-listen", f"127.0.0.1:{port}")
            self.schedulers.append(scheduler)
            self.workers.append(stack.start_worker(scheduler, model, *flags, "--kv-transfer"))
            self.gateways.append(stack.start_gateway(scheduler))

    async def compute(self, client: AsyncClient, prompt: list[int]) -> list[int]:
        """The answer of the first replica, which has told Redis about its blocks."""
        before = self.redis.num_keys()
        tokens, _ = await answer(client, prompt)
        deadline = time.monotonic() + 60
        while self.redis.num_keys() < before + NUM_BLOCKS:
            assert time.monotonic() < deadline, "the index was not written"
            await asyncio.sleep(0.02)
        return tokens

    async def count(self, name: str, replica: int = 1) -> float:
        """A counter of a scheduler."""
        page = await asyncio.to_thread(read_page, self.ports[replica])
        found = re.search(rf"^quire_{name}_total\S* (\S+)$", page, re.MULTILINE)
        assert found is not None, page
        return float(found[1])


@pytest.mark.parametrize("name", ["", "gemma3", "qwen3_5"])
async def test_a_replica_pulls_what_the_other_has_computed(tmp_path: Path, name: str) -> None:
    """Also what the rows of a model with windows or states need besides the blocks."""
    model = make_model(tmp_path / "model", name) if name else demo_model_dir()
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        pair = Pair(stack, redis, model, *REAL)
        async with (
            await stack.connect(pair.gateways[0]) as first,
            await stack.connect(pair.gateways[1]) as second,
        ):
            for number in range(10):  # a search that takes long is given up
                prompt = [number, *PROMPT]
                expected = await pair.compute(first, prompt)
                tokens, num_cached = await answer(second, prompt)
                assert tokens == expected
                if await pair.count("borrowed_tokens"):
                    break
            assert num_cached == NUM_BLOCKS * 16, stack.logs()
            assert await pair.count("borrowed_tokens") == num_cached
            assert await pair.count("lent_blocks", 0) >= NUM_BLOCKS
            salted = await answer(second, prompt, cache_salt="another tenant")
            assert salted == (expected, 0)
            await wait_idle(stack, first)
            await wait_idle(stack, second)


async def test_the_lender_and_its_worker_may_freeze_and_die_at_any_time(tmp_path: Path) -> None:
    """Each simulated worker checks every block that a step reads."""
    prompts = [[number, *PROMPT] for number in range(9)]
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        pair = Pair(stack, redis, demo_model_dir(), *SIM)
        async with (
            await stack.connect(pair.gateways[0]) as first,
            await stack.connect(pair.gateways[1]) as second,
        ):

            async def ask(start: int, change: Callable[[], object]) -> None:
                """Prompts that the first replica has just computed; `change` happens while the second searches."""
                some = prompts[start : start + 3]
                expected = [await pair.compute(first, prompt) for prompt in some]
                before = await pair.count("prefix_searches")
                asked = asyncio.gather(*(answer(second, prompt) for prompt in some))
                while not asked.done():
                    if await pair.count("prefix_searches") > before:
                        break
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(change)
                assert [tokens for tokens, _ in await asked] == expected, stack.logs()

            worker, scheduler = pair.workers[0], pair.schedulers[0]
            await ask(0, worker.kill)
            worker.start()
            await stack.until(first, lambda schedulers: is_ready(schedulers, worker))
            await ask(3, lambda: scheduler.signal(signal.SIGSTOP))
            scheduler.signal(signal.SIGCONT)
            await stack.until(first, lambda schedulers: is_ready(schedulers, worker))
            await ask(6, scheduler.kill)
            assert await pair.count("prefix_searches") > 0
            await wait_idle(stack, second)
