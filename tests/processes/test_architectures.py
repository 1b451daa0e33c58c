"""For every architecture, greedy tokens through gateway, scheduler and worker equal those of transformers."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from quire_client import AsyncClient, GenerateResult
from quire_client.types import SchedulerStatus

from tests.processes.models import SHAPES, VOCAB_SIZE, Reference, Shape, make_checkpoint
from tests.processes.stack import Service, Stack, wait_idle

BUDGET = 48  # tokens per step: a prompt of 700 takes at least 15 steps
NUM_BLOCKS = 64  # 1,024 tokens: barely more than the longest prompt with its output
BLOCK_SIZE = 16
PATIENT_TOKENS, URGENT_TOKENS = 150, 24
WORKER_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)),
    *("--max-num-seqs", "12", "--max-num-batched-tokens", str(BUDGET)),
)
PATIENT_LENGTHS = (1, 2, 15, 16, 17, 33, 60, 100, 128, 161, 5, 240)
URGENT_LENGTHS = (700, 1, 3, 47, 48, 49, 97, 120, 128, 300, 64, 31)
SHARED_PREFIX = 96


@dataclass(frozen=True)
class Request:
    token_ids: list[int]
    max_tokens: int
    priority: int


def mixed_requests(seed: int) -> list[Request]:
    """24 prompts of 1 to 700 tokens. Those longer than 96 tokens share their first 96."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(SHARED_PREFIX)]

    def prompt(length: int) -> list[int]:
        own = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        return own if length <= SHARED_PREFIX else shared + own[SHARED_PREFIX:]

    patient = [Request(prompt(length), PATIENT_TOKENS, priority=10) for length in PATIENT_LENGTHS]
    return patient + [Request(prompt(length), URGENT_TOKENS, priority=0) for length in URGENT_LENGTHS]


async def run_all(stack: Stack, client: AsyncClient, worker: Service, requests: list[Request]) -> list[GenerateResult]:
    """Run all requests at once. The worker is stopped until the patient requests run and the urgent ones wait, so that
    the urgent requests preempt.
    """

    def run(request: Request) -> asyncio.Task[GenerateResult]:
        options = {"max_tokens": request.max_tokens, "priority": request.priority}
        call = client.generate(token_ids=request.token_ids, temperature=0.0, ignore_eos=True, **options)
        return asyncio.create_task(call)

    worker.signal(signal.SIGSTOP)
    patient = [run(r) for r in requests if r.priority]
    await stack.until(client, lambda schedulers: num_open(schedulers) == len(patient) and schedulers[0].num_running > 0)
    urgent = [run(r) for r in requests if not r.priority]
    await stack.until(client, lambda schedulers: num_open(schedulers) == len(requests))
    worker.signal(signal.SIGCONT)
    return await asyncio.gather(*patient, *urgent)


def num_open(schedulers: tuple[SchedulerStatus, ...]) -> int:
    return schedulers[0].num_waiting + schedulers[0].num_running


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=pytest.mark.deep if i in (1, 3, 5, 7) else ()) for i, shape in enumerate(SHAPES)],
    ids=lambda shape: shape.name,
)
async def test_greedy_tokens_equal_transformers(shape: Shape, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model_dir = make_checkpoint(tmp_path / "model", shape)
    requests = mixed_requests(seed=SHAPES.index(shape))
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, *WORKER_FLAGS)
        gateway = stack.start_gateway(scheduler)
        reference = Reference(model_dir)
        expected = {i: reference.greedy(r.token_ids, r.max_tokens) for i, r in enumerate(requests) if not r.priority}
        async with await stack.connect(gateway) as client:
            results = await run_all(stack, client, worker, requests)
            (status,) = await wait_idle(stack, client)
    for i, (request, result) in enumerate(zip(requests, results, strict=True)):
        tokens = list(result.token_ids)
        assert len(tokens) == request.max_tokens
        assert tokens == expected.get(i, tokens), f"prompt of {len(request.token_ids)} tokens"
        # Checks the long outputs with one forward pass each.
        assert tokens == reference.greedy_after(request.token_ids, tokens), f"prompt of {len(request.token_ids)} tokens"
    usages = [result.usage for result in results]
    assert all(u.prompt_tokens == len(r.token_ids) for u, r in zip(usages, requests, strict=True))
    assert status.preemptions >= 1
    assert sum(result.samples[0].preemptions for result in results) >= 1
    assert sum(usage.cached_tokens for usage in usages) >= SHARED_PREFIX
    computed = sum(u.prompt_tokens - u.cached_tokens + u.output_tokens - 1 for u in usages)
    assert status.steps >= computed / BUDGET  # no step exceeds the budget: long prompts are chunked
