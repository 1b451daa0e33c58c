"""Work that changes hands: a drained worker's streams, and the cached prefixes of a scheduler that died."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.stack import Stack, is_ready, wait_idle

VOCAB_SIZE = 2048
FLAGS = (
    *("--dtype", "float32", "--num-blocks", "5000"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "256"),
)
NUM_STREAMS = 20
NUM_PROMPTS = 3  # each is asked by several streams that share no blocks
MAX_TOKENS = 3000  # about 2,000 are left when the second worker is ready
MIN_LEFT = 500  # a drain that waited for so many would take longer than it may
DRAIN_DEADLINE_S = 20.0  # it takes far less; a busy machine is given time


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


async def read(client: AsyncClient, number: int, progress: list[int]) -> tuple[int, ...]:
    """One long stream; counts its tokens in `progress`."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    token_ids, salt = prompt(number % NUM_PROMPTS, 40), str(number)
    async with client.stream(token_ids=token_ids, cache_salt=salt, **options) as stream:
        async for delta in stream:
            progress[number] += len(delta.token_ids)
        return (await stream.result()).token_ids


@pytest.mark.slow
async def test_a_drained_worker_hands_its_streams_over_and_leaves(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        leaving = stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            undisturbed = await asyncio.gather(*(read(client, number, [0] * 20) for number in range(NUM_PROMPTS)))

            progress = [0] * NUM_STREAMS
            streams = asyncio.gather(*(read(client, number, progress) for number in range(NUM_STREAMS)))
            staying = stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
            await stack.until(client, lambda schedulers: is_ready(schedulers, staying))
            assert min(progress) > 0
            began = time.monotonic()
            await client.drain_worker(leaving.name)
            assert await asyncio.to_thread(leaving.wait, DRAIN_DEADLINE_S) == 0
            seconds = time.monotonic() - began
            left = [MAX_TOKENS - tokens for tokens in progress]
            assert min(left) >= MIN_LEFT
            outputs = await streams
            record_property("drain_s", round(seconds, 2))
            print(f"drained in {seconds:.2f} s; the streams had {min(left)} to {max(left)} tokens left then")
            assert [output == undisturbed[n % NUM_PROMPTS] for n, output in enumerate(outputs)] == [True] * NUM_STREAMS
            await wait_idle(stack, client)


async def cached_tokens(client: AsyncClient) -> list[int]:
    """What every prompt finds in the cache, asked one after the other."""
    prompts = (prompt(seed, 300 + 16 * seed) for seed in range(6))
    results = [
        await client.generate(token_ids=token_ids, temperature=0.0, max_tokens=4, ignore_eos=True)
        for token_ids in prompts
    ]
    return [result.usage.cached_tokens for result in results]


async def test_cached_prefixes_outlive_their_scheduler(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        first, second = (stack.start_scheduler() for _ in range(2))
        second.kill()
        flags = (*FLAGS, "--scheduler", second.address)
        workers = [stack.start_worker(first, demo_model_dir(), *flags) for _ in range(2)]
        gateway = stack.start_gateway(first, second)
        async with await stack.connect(gateway, workers=0) as client:

            async def all_ready() -> None:
                await stack.until(client, lambda status: all(is_ready(status, worker) for worker in workers))

            await all_ready()
            assert await cached_tokens(client) == [0] * 6
            before = await cached_tokens(client)
            assert min(before) >= 288

            second.start()
            await asyncio.to_thread(second.wait_ready)
            first.kill()
            await all_ready()
            assert await cached_tokens(client) == before  # the other replica has the workers now

            second.kill()
            second.start()
            await all_ready()
            assert await cached_tokens(client) == before  # the restarted one has them again
