"""Workers spread evenly over the schedulers of a model; moving one loses, repeats and changes no token."""

from __future__ import annotations

from pathlib import Path

from quire_client import SchedulerStatus
from quire_client.demo import demo_model_dir

from tests.processes.load import Load
from tests.processes.stack import Service, Stack, num_ready, wait_idle

SIM = ("--executor", "sim", "--sim-step-ms", "20")
DEADLINE_S = 40.0  # a worker with rows moves after 10 s


def counts(schedulers: tuple[SchedulerStatus, ...]) -> list[int]:
    return sorted(num_ready(scheduler) for scheduler in schedulers)


def start_worker(stack: Stack, schedulers: list[Service]) -> Service:
    first, *others = schedulers
    flags = [word for scheduler in others for word in ("--scheduler", scheduler.address)]
    return stack.start_worker(first, demo_model_dir(), *SIM, *flags)


async def test_workers_spread_over_schedulers_and_return_to_a_restarted_one(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        schedulers = [stack.start_scheduler() for _ in range(2)]
        gateway = stack.start_gateway(*schedulers)
        for _ in range(4):
            start_worker(stack, schedulers)
        async with await stack.connect(gateway, workers=0) as client:
            await stack.until(client, lambda all_: counts(all_) == [2, 2], DEADLINE_S)
            undisturbed = await Load(client, "undisturbed").finish()

            load = Load(client, "scheduler killed")
            await load.reach(0.2)
            schedulers[1].kill()
            await stack.until(client, lambda all_: counts(all_) == [0, 4], DEADLINE_S)
            assert await load.finish() == undisturbed

            schedulers[1].start()
            runs = 0
            while counts((await client.status()).schedulers) != [2, 2]:  # while requests are running
                assert await Load(client, f"handover {runs}").finish() == undisturbed
                runs += 1
                assert runs < 60, stack.logs()
            await wait_idle(stack, client)
        moved = [service for service in stack.services if "has fewer workers; leaving" in service.log()]
        assert moved, stack.logs()
