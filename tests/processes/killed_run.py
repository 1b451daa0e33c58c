"""Requests that are preempted, and whose worker is killed and started again while they run."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from quire_client import AsyncClient, GenerateResult, PromptEmbeddings, SchedulerStatus

from tests.processes.stack import Service, Stack

TOKENS_BEFORE_KILL = 20


@dataclass(frozen=True)
class Request:
    """A greedy request. Those with `is_patient` run first and have a lower priority than the others."""

    prompt: PromptEmbeddings | list[int]
    max_tokens: int
    is_patient: bool = False

    @property
    def options(self) -> dict[str, object]:
        priority = 10 if self.is_patient else 0
        return {"max_tokens": self.max_tokens, "priority": priority, "temperature": 0.0, "ignore_eos": True}


async def run(client: AsyncClient, request: Request) -> GenerateResult:
    return await client.generate(request.prompt, **request.options)


async def run_with_kill(
    stack: Stack, client: AsyncClient, worker: Service, requests: list[Request]
) -> list[GenerateResult]:
    """Run all requests at once, the patient ones first. The worker is stopped until these run and the urgent ones wait,
    so that the urgent ones preempt. It is killed and started again when the first request has some tokens.
    """
    worker.signal(signal.SIGSTOP)
    patient = [asyncio.create_task(run(client, r)) for r in requests[1:] if r.is_patient]
    seen = asyncio.Event()
    first = asyncio.create_task(_streamed(client, requests[0], seen))
    num_patient = 1 + len(patient)
    await stack.until(client, lambda all_: all_[0].num_running > 0 and _num_open(all_) == num_patient)
    urgent = [asyncio.create_task(run(client, r)) for r in requests if not r.is_patient]
    await stack.until(client, lambda all_: _num_open(all_) == len(requests))
    worker.signal(signal.SIGCONT)
    await asyncio.wait_for(seen.wait(), 60)
    worker.kill()
    worker.start()
    return await asyncio.gather(first, *patient, *urgent)


def _num_open(schedulers: tuple[SchedulerStatus, ...]) -> int:
    return schedulers[0].num_running + schedulers[0].num_waiting


async def _streamed(client: AsyncClient, request: Request, seen: asyncio.Event) -> GenerateResult:
    """The result of a stream; sets `seen` after TOKENS_BEFORE_KILL tokens."""
    num_tokens = 0
    async with client.stream(request.prompt, **request.options) as stream:
        async for delta in stream:
            num_tokens += len(delta.token_ids)
            if num_tokens >= TOKENS_BEFORE_KILL:
                seen.set()
        return await stream.result()
