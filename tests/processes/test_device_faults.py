"""A device that fails under load: the row or the worker ends with an error, and every stream keeps its tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from tests.processes.faulty_worker import FAULTS
from tests.processes.stack import Service, Stack, is_ready, wait_idle

FLAGS = ("--executor", "sim", "--sim-step-ms", "5", "--num-blocks", "256", "--max-num-seqs", "8")
NUM_STREAMS = 8
MAX_TOKENS = 60
EXIT_CORRUPT = 70


async def generate_all(client: AsyncClient) -> list[tuple[int, ...]]:
    requests = (
        client.generate(token_ids=[seed + 1, 5, 9], max_tokens=MAX_TOKENS, seed=seed, ignore_eos=True)
        for seed in range(NUM_STREAMS)
    )
    return [tuple(result.token_ids) for result in await asyncio.gather(*requests)]


async def test_a_faulty_device_loses_no_stream(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), *FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            expected = await generate_all(client)
            for fault in FAULTS:
                worker = stack.start_worker(
                    scheduler, demo_model_dir(), *FLAGS, "--fault", fault, module="tests.processes.faulty_worker"
                )
                await stack.until(client, lambda schedulers, worker=worker: is_ready(schedulers, worker))
                assert await generate_all(client) == expected, fault
                check_logs(worker, scheduler, fault)
                await wait_idle(stack, client)
                worker.kill()


def check_logs(worker: Service, scheduler: Service, fault: str) -> None:
    if fault in ("launch", "result"):
        assert worker.wait() == EXIT_CORRUPT
        assert "the KV pool may be corrupt, so this worker exits (exit code 70)" in worker.log()
        assert "CUDA error: an illegal memory access" in worker.log()
        assert f"worker {worker.name} is lost" in scheduler.log()
    elif fault == "hang":
        assert worker.is_running
        assert "its running step hangs" in scheduler.log()
        assert "was not answered within" not in scheduler.log()
        assert scheduler.log().count(f"worker {worker.name}: leased") == 1
    else:
        assert worker.is_running
        code = {"nan": "NAN", "memory": "INTERNAL"}[fault]
        assert f"failed ({code}): planted" in worker.log()
        assert f"worker {worker.name}: row" in scheduler.log()
