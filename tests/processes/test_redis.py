"""Redis only holds hints: stopped, flushed and restarted under load, it changes no output and fails no request."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.processes.load import Load
from tests.processes.models import make_checkpoint
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Stack, wait_idle

FLAGS = ("--dtype", "float32", "--num-blocks", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")


async def wait_for_keys(redis: RedisServer) -> None:
    deadline = time.monotonic() + 20.0
    while redis.num_keys() == 0:
        assert time.monotonic() < deadline, "the index was not written to Redis again"
        await asyncio.sleep(0.05)


async def test_redis_may_stop_and_restart_at_any_time(tmp_path: Path) -> None:
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
            await load.reach(0.1)
            redis.stop()
            await load.reach(0.3)
            redis.start()
            await load.reach(0.5)
            redis.flush()
            await load.reach(0.6)
            redis.stop()
            assert await load.finish() == undisturbed

            assert await Load(client, "down").finish() == undisturbed
            await stack.until(client, lambda schedulers: schedulers[0].prefix_index == "redis (down)")
            redis.start()
            await stack.until(client, lambda schedulers: schedulers[0].prefix_index == "redis")
            await wait_for_keys(redis)
            await wait_idle(stack, client)
            assert await Load(client, "healed").finish() == undisturbed


async def test_a_scheduler_starts_without_its_redis(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    redis = RedisServer(tmp_path)
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        stack.start_worker(scheduler, model_dir, *FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            result = await client.generate(token_ids=[1, 2, 3], max_tokens=4, ignore_eos=True)
            assert len(result.token_ids) == 4
