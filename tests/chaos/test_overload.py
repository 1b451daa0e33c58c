"""Five times the load that the system can serve, and clients that do not read: accepted requests are served, the others
are refused with a retry time.

The environment variable OVERLOAD_SECONDS sets the duration (default 8).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from quire_client import AsyncClient, RetryPolicy
from quire_client.demo import demo_model_dir
from quire_client.errors import Overloaded

from tests.chaos.report import quantile
from tests.processes.stack import Stack, wait_idle
from tests.simulated_tokens import sim_output
from worker_svc.simulator.tokens import read_vocabulary

SECONDS = float(os.environ.get("OVERLOAD_SECONDS", "8"))
STEP_S = 0.004
MAX_TOKENS = 160
ROWS, MAX_WAITING = 4, 12
CAPACITY_PER_S = ROWS / (STEP_S * MAX_TOKENS)
OFFERED = 5
NUM_STALLED = 2
STALLED_TOKENS = min(3900, int(SECONDS / STEP_S))  # far more than the buffers of a connection can hold
WARM_UP_S = 2.0
GROWTH_MIB = 24.0  # allowed growth: caches and buffers that fill once

WORKER_FLAGS = (
    *("--executor", "sim", "--sim-step-ms", str(1e3 * STEP_S), "--num-blocks", "2000"),
    *("--max-num-seqs", str(ROWS + NUM_STALLED), "--max-num-batched-tokens", "512"),
)


@dataclass
class Outcomes:
    """The outcomes of the requests. Times are seconds."""

    completed_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    without_hint: int = 0
    wrong: int = 0


class Client:
    """Sends requests at a fixed rate, without waiting for earlier requests."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._vocabulary = read_vocabulary(demo_model_dir())
        self.outcomes = Outcomes()

    async def offer(self, per_s: float, seconds: float) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            number = 0
            while time.monotonic() < began + seconds:
                number += 1
                group.create_task(self._request(number))
                await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))

    def expected(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        return tuple(sim_output(token_ids, max_tokens, self._vocabulary, temperature=0.0))

    async def _request(self, number: int) -> None:
        token_ids = random_prompt(number)
        began = time.monotonic()
        try:
            result = await self._client.generate(token_ids=token_ids, max_tokens=MAX_TOKENS, **GREEDY)
        except Overloaded as error:
            self.outcomes.refused_s.append(time.monotonic() - began)
            self.outcomes.without_hint += error.retry_after_s is None
            return
        self.outcomes.completed_s.append(time.monotonic() - began)
        self.outcomes.wrong += result.token_ids != self.expected(token_ids, MAX_TOKENS)


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def random_prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(32)]


def memory_mib(stack: Stack) -> dict[str, float]:
    running = [service for service in stack.services if service.process is not None]
    return {s.name: psutil.Process(s.process.pid).memory_info().rss / 2**20 for s in running if s.process}


@pytest.mark.slow
async def test_overload_and_stalled_readers(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--max-waiting", str(MAX_WAITING))
        stack.start_worker(scheduler, demo_model_dir(), *WORKER_FLAGS)
        gateway = stack.start_gateway(scheduler)
        async with (
            await stack.connect(gateway),
            await AsyncClient.connect(gateway.address, retry=RetryPolicy(max_attempts=1)) as client,
            await AsyncClient.connect(gateway.address) as lazy_client,
        ):
            load = Client(client)
            await load.offer(OFFERED * CAPACITY_PER_S, WARM_UP_S)
            await wait_idle(stack, client)
            load.outcomes = Outcomes()
            before = memory_mib(stack)

            async with (
                lazy_client.stream(token_ids=[7] * 32, max_tokens=STALLED_TOKENS, **GREEDY) as first,
                lazy_client.stream(token_ids=[8] * 32, max_tokens=STALLED_TOKENS, **GREEDY) as second,
            ):
                await load.offer(OFFERED * CAPACITY_PER_S, SECONDS)
                after = memory_mib(stack)
                stalled = [(await stream.result()).token_ids for stream in (first, second)]
            await wait_idle(stack, client)

        done = load.outcomes
        figures = {
            "completed": len(done.completed_s),
            "capacity": round(CAPACITY_PER_S * SECONDS),
            "refused": len(done.refused_s),
            "refusal_p50_ms": round(1e3 * quantile(done.refused_s, 0.5), 1),
            "refusal_p99_ms": round(1e3 * quantile(done.refused_s, 0.99), 1),
            "mib_before": {name: round(mib) for name, mib in before.items()},
            "mib_after": {name: round(mib) for name, mib in after.items()},
        }
        print(figures)
        record_property("overload", figures)
        assert done.wrong == 0
        assert done.without_hint == 0
        assert len(done.refused_s) > len(done.completed_s)
        assert len(done.completed_s) > ROWS + MAX_WAITING  # it served more than the first rows and the first queue
        assert stalled == [load.expected([token] * 32, STALLED_TOKENS) for token in (7, 8)]
        grown = {name: after[name] - before[name] for name in before if after[name] > before[name] + GROWTH_MIB}
        assert not grown, f"memory grew by {grown} MiB"
