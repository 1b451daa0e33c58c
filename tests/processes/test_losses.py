"""Killing or draining a worker or scheduler under load does not lose, repeat or change a token."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.processes.load import Load
from tests.processes.models import make_checkpoint
from tests.processes.stack import Stack, is_ready, wait_idle

FLAGS = ("--dtype", "bfloat16", "--num-blocks", "96", "--max-num-seqs", "6", "--max-num-batched-tokens", "48")


async def test_outputs_survive_worker_and_scheduler(tmp_path: Path) -> None:
    torch.set_num_threads(1)
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
            scheduler.start()
            assert await load.finish() == undisturbed
            await wait_idle(stack, client)
