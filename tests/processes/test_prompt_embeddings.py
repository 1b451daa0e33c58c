"""Prompts of input embeddings through all services: greedy tokens equal those of transformers, with prompts in chunks,
prefix hits, preemption and kill -9 of the worker in one run.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from quire_client import AsyncClient, GenerateResult, InvalidRequest, PromptEmbeddings

from tests.processes.models import SHAPES, Reference, Shape, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, wait_idle

BUDGET, BLOCK_SIZE, NUM_BLOCKS = 32, 16, 40
WORKER_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", str(BUDGET), "--determinism", "exact"),
)
PATIENT_TOKENS, URGENT_TOKENS = 120, 16
TOKENS_BEFORE_KILL = 20


@dataclass(frozen=True)
class Request:
    prompt: torch.Tensor | list[int]
    max_tokens: int
    priority: int

    @property
    def data(self) -> PromptEmbeddings | list[int]:
        if isinstance(self.prompt, list):
            return self.prompt
        return PromptEmbeddings(safetensors.torch.save({"prompt": self.prompt}))


def tuned(reference: Reference, soft: torch.Tensor, length: int) -> torch.Tensor:
    """As PEFT's prompt tuning: virtual tokens in front of the embeddings of a text."""
    return torch.cat((soft, reference.embed([(7 * i + length) % 500 for i in range(length)])))


def mixed_requests(reference: Reference) -> list[Request]:
    """Embeddings in all types and token ids. Two prompts are equal, and one has the embeddings of a token prompt."""
    soft = torch.randn(20, reference.embed([0]).shape[1], generator=torch.Generator().manual_seed(1)) * 0.15
    ids = [(3 * i) % 500 for i in range(50)]
    patient = [soft[:1], tuned(reference, soft, 30), tuned(reference, soft, 90).bfloat16(), ids]
    urgent = [tuned(reference, soft, 300), tuned(reference, soft, 44).half(), reference.embed(ids), ids[:3]]
    return [
        *(Request(prompt, PATIENT_TOKENS, priority=10) for prompt in patient),
        *(Request(prompt, URGENT_TOKENS, priority=0) for prompt in urgent),
    ]


def expected(reference: Reference, request: Request, output: list[int]) -> list[int]:
    if isinstance(request.prompt, list):
        return reference.greedy_after(request.prompt, output)
    return reference.greedy_after_embeddings(request.prompt.float(), output)


async def run(client: AsyncClient, request: Request) -> GenerateResult:
    options = {"max_tokens": request.max_tokens, "priority": request.priority}
    return await client.generate(request.data, temperature=0.0, ignore_eos=True, **options)


async def run_with_kill(
    stack: Stack, client: AsyncClient, worker: Service, requests: list[Request]
) -> list[GenerateResult]:
    """Run all requests at once. The worker is stopped until the patient requests run and the urgent ones wait, so that
    these preempt. The worker is killed and started again when the first request has some tokens.
    """

    worker.signal(signal.SIGSTOP)
    patient = [asyncio.create_task(run(client, r)) for r in requests[1:] if r.priority]
    seen = asyncio.Event()
    first = asyncio.create_task(streamed(client, requests[0], seen))
    await stack.until(client, lambda all_: all_[0].num_running > 0)
    urgent = [asyncio.create_task(run(client, r)) for r in requests if not r.priority]
    await stack.until(client, lambda all_: all_[0].num_running + all_[0].num_waiting == len(requests))
    worker.signal(signal.SIGCONT)
    await asyncio.wait_for(seen.wait(), 60)
    worker.kill()
    worker.start()
    return await asyncio.gather(first, *patient, *urgent)


async def streamed(client: AsyncClient, request: Request, seen: asyncio.Event) -> GenerateResult:
    """The result of a stream; sets `seen` after TOKENS_BEFORE_KILL tokens."""
    num_tokens = 0
    options = {"max_tokens": request.max_tokens, "priority": request.priority}
    async with client.stream(request.data, temperature=0.0, ignore_eos=True, **options) as stream:
        async for delta in stream:
            num_tokens += len(delta.token_ids)
            if num_tokens >= TOKENS_BEFORE_KILL:
                seen.set()
        return await stream.result()


@pytest.mark.parametrize(
    "shape", [SHAPES[0], pytest.param(SHAPES[8], marks=pytest.mark.deep)], ids=lambda shape: shape.name
)
async def test_embeddings_equal_transformers(shape: Shape, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model_dir = make_checkpoint(tmp_path / "model", shape)
    reference = Reference(model_dir)
    requests = mixed_requests(reference)
    http = f"127.0.0.1:{free_port()}"
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, *WORKER_FLAGS)
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", http))
        async with await stack.connect(gateway) as client:
            results = await run_with_kill(stack, client, worker, requests)
            (status,) = await wait_idle(stack, client)
            for request, result in zip(requests, results, strict=True):
                tokens = list(result.token_ids)
                assert len(tokens) == request.max_tokens
                assert tokens == expected(reference, request, tokens)
                assert result.usage.prompt_tokens == len(request.prompt)
            assert status.preemptions >= 1
            assert sum(result.usage.recomputed_tokens for result in results) > 0
            await check_sharing(client, reference)
            await check_http(http, requests[5], results[5])
            await check_refusals(client, shape.hidden_size)


async def check_sharing(client: AsyncClient, reference: Reference) -> None:
    """Equal embeddings share blocks, others do not: also not with the tokens that have the same embeddings."""
    ids = [(11 * i) % 500 for i in range(70)]
    rows = reference.embed(ids)
    changed = rows.clone()
    changed[69, 0] += 0.5
    cached = []
    for prompt in (ids, rows, changed, rows.bfloat16(), rows, ids):
        result = await run(client, Request(prompt, 4, 0))
        cached.append(result.usage.cached_tokens)
        tokens = list(result.token_ids)
        assert tokens == expected(reference, Request(prompt, 4, 0), tokens)
    assert cached == [0, 0, 0, 0, 64, 64]


async def check_http(address: str, request: Request, result: GenerateResult) -> None:
    assert isinstance(request.data, PromptEmbeddings)
    body = {
        "prompt_embeds": [base64.b64encode(request.data.data).decode()] * 2,
        "temperature": 0,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def post() -> dict:
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)

    answer = await asyncio.to_thread(post)
    assert [choice["text"] for choice in answer["choices"]] == [result.text] * 2
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["prompt_tokens"] == 2 * len(request.prompt)


async def check_refusals(client: AsyncClient, hidden_size: int) -> None:
    """A bad prompt beside good ones harms none of them."""
    good = Request(torch.ones(40, hidden_size), 12, 0)
    alone = await run(client, good)
    bad = [torch.ones(4, hidden_size + 1), torch.full((4, hidden_size), torch.nan), torch.ones(4, hidden_size).double()]
    answers = await asyncio.gather(
        *(run(client, Request(prompt, 4, 0)) for prompt in bad), run(client, good), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [InvalidRequest] * 3 + [GenerateResult]
    assert answers[3].token_ids == alone.token_ids
    assert (await client.models())[0].hidden_size == hidden_size
