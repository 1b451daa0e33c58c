"""A stream longer than its worker's KV pool, in a model with a sliding window, through a kill of the worker."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from quire_client import AsyncClient

from tests.processes.models import SHAPES, VOCAB_SIZE, Reference, make_checkpoint
from tests.processes.stack import Stack, is_ready, wait_idle

SHAPE = next(shape for shape in SHAPES if shape.extra.get("sliding_window"))
NUM_BLOCKS, BLOCK_SIZE = 18, 16  # 288 tokens: two windows of 90 tokens and a chunk of a prompt
FLAGS = (
    *("--dtype", "float32", "--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "48"),
)
MAX_TOKENS = 400


async def stream(client: AsyncClient, prompt: list[int], started: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with client.stream(token_ids=prompt, **options) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            if len(tokens) > MAX_TOKENS // 2:
                started.set()
    return tokens


async def test_a_stream_longer_than_the_pool_equals_transformers(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", SHAPE)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (350, 20)]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, *FLAGS)
        gateway = stack.start_gateway(scheduler)
        reference = Reference(model_dir)
        async with await stack.connect(gateway) as client:
            started = [asyncio.Event() for _ in prompts]
            streams = [asyncio.create_task(stream(client, *pair)) for pair in zip(prompts, started, strict=True)]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), 60)
            worker.kill()
            worker.start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, worker))
            results = await asyncio.wait_for(asyncio.gather(*streams), 60)
            await wait_idle(stack, client)
    for prompt, tokens in zip(prompts, results, strict=True):
        assert len(prompt) + len(tokens) > NUM_BLOCKS * BLOCK_SIZE
        assert tokens == reference.greedy_after(prompt, tokens)
