"""Several workers of one scheduler: requests go to the worker that has their prefix, and load spreads over all."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from quire_client import AsyncClient, GenerateResult

from tests.processes.models import VOCAB_SIZE, make_checkpoint
from tests.processes.stack import Service, Stack, is_ready, wait_idle, worker_status

FLAGS = ("--dtype", "float32", "--num-blocks", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")
PREFIX_TOKENS = 320


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


async def generate(client: AsyncClient, token_ids: list[int], max_tokens: int = 8) -> GenerateResult:
    return await client.generate(token_ids=token_ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def steps(stack: Stack, client: AsyncClient, workers: list[Service]) -> list[int]:
    schedulers = await wait_idle(stack, client)
    return [worker_status(schedulers, worker).steps for worker in workers]


async def test_requests_follow_prefixes_and_load_spreads_to_new_workers(stack: Stack, tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, model_dir, *FLAGS) for _ in range(2)]
    gateway = stack.start_gateway(scheduler)
    async with await stack.connect(gateway, workers=2) as client:
        await check_prefix_holder(stack, client, workers)
        await check_balance(stack, client, workers)
        late = stack.start_worker(scheduler, model_dir, *FLAGS)
        await stack.until(client, lambda schedulers: is_ready(schedulers, late))
        await check_balance(stack, client, [*workers, late])


async def check_prefix_holder(stack: Stack, client: AsyncClient, workers: list[Service]) -> None:
    """Each of two prefixes is computed by one worker, which gets all requests with that prefix."""
    prefixes = [random_prompt(seed, PREFIX_TOKENS) for seed in (1, 2)]
    before = await steps(stack, client, workers)
    first = await asyncio.gather(*(generate(client, prefix, max_tokens=40) for prefix in prefixes))
    assert [result.usage.cached_tokens for result in first] == [0, 0]
    after = await steps(stack, client, workers)
    assert all(b > a for a, b in zip(before, after, strict=True)), "both prefixes went to one worker"
    holders = [await check_follow_ups(stack, client, workers, prefix) for prefix in prefixes]
    assert sorted(holders) == [0, 1]


async def check_follow_ups(stack: Stack, client: AsyncClient, workers: list[Service], prefix: list[int]) -> int:
    """Sends four follow-ups. Checks that all run on one worker and compute only the tokens after the prefix.

    Returns the worker's index.
    """
    before = await steps(stack, client, workers)
    for i in range(4):
        result = await generate(client, prefix + random_prompt(100 + i, 20))
        assert result.usage.cached_tokens == PREFIX_TOKENS
    after = await steps(stack, client, workers)
    # The other worker may get one step without rows, which closes its earlier rows.
    (holder,) = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if b > a + 1]
    return holder


async def check_balance(stack: Stack, client: AsyncClient, workers: list[Service]) -> None:
    """Checks that requests without a common prefix use all workers and get the same tokens as alone."""
    before = await steps(stack, client, workers)
    prompts = [random_prompt(1000 * len(workers) + i, 60) for i in range(10 * len(workers))]
    together = await asyncio.gather(*(generate(client, prompt, max_tokens=24) for prompt in prompts))
    after = await steps(stack, client, workers)
    assert all(b > a for a, b in zip(before, after, strict=True)), f"steps {before} -> {after}"
    alone = [await generate(client, prompt, max_tokens=24) for prompt in prompts[:3]]
    assert [r.token_ids for r in alone] == [r.token_ids for r in together[:3]]
