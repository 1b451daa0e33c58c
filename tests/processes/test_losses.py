"""Killing or draining a worker or scheduler under load does not lose, repeat or change a token."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire_client import AsyncClient

from tests.processes.load import Load
from tests.processes.models import make_checkpoint
from tests.processes.stack import Stack, is_ready, wait_idle

FLAGS = ("--dtype", "bfloat16", "--num-blocks", "96", "--max-num-seqs", "6", "--max-num-batched-tokens", "48")


async def test_outputs_survive_worker_and_scheduler(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, model_dir, *FLAGS) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway, workers=2) as client:
            undisturbed = await Load(client, "undisturbed").finish()

            load = Load(client, "worker killed")
            await load.reach(0.2)
            workers[0].kill()
            assert await load.finish() == undisturbed

            workers[0].start()
            await stack.until(client, lambda schedulers: is_ready(schedulers, workers[0]))
            load = Load(client, "worker leaves")
            await load.reach(0.2)
            assert workers[1].terminate() == 0
            assert await load.finish() == undisturbed

            load = Load(client, "scheduler killed")
            await load.reach(0.2)
            scheduler.kill()
            await stack.until(client, lambda schedulers: not schedulers[0].connected)
            async with await AsyncClient.connect(gateway.address, retry=None, stall_timeout_s=None) as new_client:
                num_open = (await client.status()).open_streams
                new = [
                    asyncio.create_task(new_client.generate(token_ids=[i], max_tokens=4, ignore_eos=True))
                    for i in range(1, 20)
                ]
                while (await client.status()).open_streams < num_open + len(new):
                    assert not [task.result() for task in new if task.done()]  # raises a refusal
                scheduler.start()
                assert [len(result.token_ids) for result in await asyncio.gather(*new)] == [4] * len(new)
            assert await load.finish() == undisturbed
            await wait_idle(stack, client)
