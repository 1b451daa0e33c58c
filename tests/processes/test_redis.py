"""Redis is an accelerator: stopped, flushed and started again under load, it changes no output and fails no request."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import torch
from quire_client import AsyncClient

from tests.processes.models import VOCAB_SIZE, make_checkpoint
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Stack, wait_idle

FLAGS = ("--dtype", "float32", "--num-blocks", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
WAVE = 8
WAVES = 4


def wave_prompts(wave: int) -> list[list[int]]:
    """Every wave begins with the same 64 tokens and goes on differently."""
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(64)]
    own = random.Random(wave)
    return [shared + [own.randrange(VOCAB_SIZE) for _ in range(own.choice((1, 30, 150)))] for _ in range(WAVE)]


class Load:
    """Waves of requests, one after the other without a pause; `outputs` in order, errors are raised by `finish`."""

    def __init__(self, client: AsyncClient, salt: str) -> None:
        self._client = client
        self._salt = salt
        self.num_tokens = 0
        self._task = asyncio.create_task(self._run())

    async def finish(self) -> list[tuple[int, ...]]:
        return await self._task

    async def reach(self, num_tokens: int) -> None:
        """Wait until the load has got so many tokens, and is still running."""
        while self.num_tokens < num_tokens:
            assert not self._task.done(), "the load ended before it could be disturbed"
            await asyncio.sleep(0.005)

    async def _run(self) -> list[tuple[int, ...]]:
        outputs: list[tuple[int, ...]] = []
        for wave in range(WAVES):
            outputs += await asyncio.gather(*(self._generate(prompt) for prompt in wave_prompts(wave)))
        return outputs

    async def _generate(self, prompt: list[int]) -> tuple[int, ...]:
        stream = self._client.stream(
            token_ids=prompt, max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, cache_salt=self._salt
        )
        async with stream:
            async for delta in stream:
                self.num_tokens += len(delta.token_ids)
            return (await stream.result()).token_ids


async def wait_for_keys(redis: RedisServer) -> None:
    deadline = time.monotonic() + 20.0
    while redis.num_keys() == 0:
        assert time.monotonic() < deadline, "the index did not come back into Redis"
        await asyncio.sleep(0.05)


async def test_redis_may_go_and_come_back_at_any_time(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model_dir = make_checkpoint(tmp_path / "model")
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        for _ in range(2):
            stack.start_worker(scheduler, model_dir, *FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway, workers=2) as client:
            undisturbed = await Load(client, "undisturbed").finish()
            await stack.until(client, lambda schedulers: schedulers[0].prefix_index == "redis")
            await wait_for_keys(redis)

            load = Load(client, "disturbed")
            total = WAVES * WAVE * 40
            await load.reach(total // 10)
            redis.stop()
            await load.reach(total * 3 // 10)
            redis.start()
            await load.reach(total * 5 // 10)
            redis.flush()
            await load.reach(total * 6 // 10)
            redis.stop()
            assert await load.finish() == undisturbed

            again = await Load(client, "down").finish()
            assert again == undisturbed
            await stack.until(client, lambda schedulers: schedulers[0].prefix_index == "redis (down)")
            redis.start()
            await stack.until(client, lambda schedulers: schedulers[0].prefix_index == "redis")
            await wait_for_keys(redis)
            await wait_idle(stack, client)
            assert await Load(client, "healed").finish() == undisturbed


async def test_a_scheduler_starts_without_its_redis(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model_dir = make_checkpoint(tmp_path / "model")
    redis = RedisServer(tmp_path)
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        stack.start_worker(scheduler, model_dir, *FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            result = await client.generate(token_ids=[1, 2, 3], max_tokens=4, ignore_eos=True)
            assert len(result.token_ids) == 4
