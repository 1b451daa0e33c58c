"""Handover: the streams of a drained worker, and the cached prefixes of a scheduler that was killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.port_proxy import PortProxy, Streams
from tests.processes.ports import free_port
from tests.processes.stack import POLL_S, Service, Stack, is_ready, wait_idle

VOCAB_SIZE = 2048
HOST = "127.0.0.1"
FLAGS = (
    *("--dtype", "float32", "--num-blocks", "5000"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "256"),
)
NUM_STREAMS = 20
NUM_PROMPTS = 3  # each is used by several streams that share no blocks
MAX_TOKENS = 2400  # about 2,000 tokens are left when the second worker has registered
MIN_LEFT = 500  # a drain that waited for this many tokens would exceed its deadline
TOKENS_AFTERWARDS = 200  # tokens that each stream receives on its new worker before the test cancels it
DRAIN_DEADLINE_S = 20.0  # a drain takes far less, except on a busy machine


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def request(number: int, max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": prompt(number % NUM_PROMPTS, 40), "cache_salt": str(number), **sampling}


async def read(client: AsyncClient, number: int, outputs: list[list[int]], is_enough: asyncio.Event) -> None:
    """Read one long stream and append its tokens to its output until `is_enough` is set."""
    async with client.stream(**request(number, MAX_TOKENS)) as stream:
        async for delta in stream:
            outputs[number] += delta.token_ids
            if is_enough.is_set():
                return


@pytest.mark.slow
async def test_a_drained_worker_hands_over_its_streams_and_ends(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        leaving = stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
        gateway = stack.start_gateway(scheduler)
        proxy, behind = (
            PortProxy(lambda: open_connection(scheduler)),
            replace(scheduler, address=f"{HOST}:{free_port()}"),
        )
        staying = stack.start_worker(behind, demo_model_dir(), *FLAGS)
        async with await stack.connect(gateway) as client:
            await asyncio.to_thread(staying.wait_ready)  # it reaches the scheduler when the proxy listens
            outputs: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
            is_enough = asyncio.Event()
            streams = asyncio.gather(*(read(client, number, outputs, is_enough) for number in range(NUM_STREAMS)))
            while not all(outputs):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await proxy.start(HOST, int(behind.address.rpartition(":")[2]))
            await stack.until(client, lambda schedulers: is_ready(schedulers, staying))
            began = time.monotonic()
            await client.drain_worker(leaving.name)
            assert await asyncio.to_thread(leaving.wait, DRAIN_DEADLINE_S) == 0
            seconds = time.monotonic() - began
            had = list(map(len, outputs))
            left = [MAX_TOKENS - tokens for tokens in had]
            assert min(left) >= MIN_LEFT
            while any(len(o) < tokens + TOKENS_AFTERWARDS for o, tokens in zip(outputs, had, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            is_enough.set()
            await streams
            longest = max(map(len, outputs))
            calls = (client.generate(**request(number, longest)) for number in range(NUM_PROMPTS))
            undisturbed = [list(result.token_ids) for result in await asyncio.gather(*calls)]
            record_property("drain_s", round(seconds, 2))
            print(f"drained in {seconds:.2f} s, when the streams had {min(left)} to {max(left)} tokens left")
            assert all(output == undisturbed[n % NUM_PROMPTS][: len(output)] for n, output in enumerate(outputs))
            await wait_idle(stack, client)
        await proxy.close()


async def open_connection(service: Service) -> Streams:
    return await asyncio.open_connection(HOST, int(service.address.rpartition(":")[2]))


async def cached_tokens(client: AsyncClient) -> list[int]:
    """The number of cached tokens that each prompt hits, one request after the other."""
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
            assert await cached_tokens(client) == before  # the other replica has leased the workers

            second.kill()
            second.start()
            await all_ready()
            assert await cached_tokens(client) == before  # the restarted scheduler has leased them again
