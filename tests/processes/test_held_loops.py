"""A process whose event loop is held for seconds keeps its streams, and a stopped process is found in bounded time."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.held_service import HELD_S
from tests.processes.stack import POLL_S, Service, Stack

HELD = "tests.processes.held_service"
LIMIT_S = 20.0


async def output_of(client: AsyncClient, *disturbed: Service) -> tuple[int, ...]:
    """The output of a request. Each of these processes is held in the middle of it."""
    ids: list[int] = []
    async with client.stream(token_ids=[5, 6, 7], max_tokens=400, seed=3, ignore_eos=True) as stream:
        async for delta in stream:
            ids += delta.token_ids
            if disturbed and len(ids) > 20:
                disturbed[0].signal(signal.SIGUSR1)
                disturbed = disturbed[1:]
    return tuple(ids)


def wait_for(service: Service, words: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while words not in service.log():
        assert time.monotonic() < deadline, service.log()
        time.sleep(POLL_S)


async def test_a_busy_process_is_not_lost_and_a_stopped_one_is(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--service=scheduler", module=HELD)
        worker = stack.start_worker(scheduler, demo_model_dir(), "--executor=sim", "--sim-step-ms=5")
        gateway = stack.start_gateway(scheduler, flags=("--service=gateway",), module=HELD)
        async with await stack.connect(gateway) as client:
            client_of = AsyncClient.connect(gateway.address, retry=None, stall_timeout_s=None)
            async with await client_of as patient:
                undisturbed = await output_of(patient)
                for held in (gateway, scheduler):
                    began = time.monotonic()
                    assert await output_of(patient, held) == undisturbed
                    assert time.monotonic() - began > HELD_S, "it was held"
            for service, words in ((gateway, "lost scheduler"), (scheduler, " left")):
                assert words not in service.log()
            assert worker.log().count("leased by scheduler") == 1

            stuck = asyncio.create_task(output_of(client))
            await stack.until(client, lambda schedulers: bool(schedulers[0].num_running))
            gateway.signal(signal.SIGSTOP)
            await asyncio.to_thread(wait_for, scheduler, " left")
            gateway.signal(signal.SIGCONT)
            assert await stuck == undisturbed
