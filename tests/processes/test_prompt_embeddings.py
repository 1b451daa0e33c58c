"""Prompts of input embeddings through all services: greedy tokens equal those of transformers, with prompts in chunks,
prefix hits, preemption and kill -9 of the worker in one run.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from pathlib import Path

import pytest
import safetensors.torch
import torch
from quire_client import AsyncClient, GenerateResult, InvalidRequest, PromptEmbeddings

from tests.processes.killed_run import Request, run, run_with_kill
from tests.processes.models import SHAPES, Reference, Shape, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Stack, wait_idle

BUDGET, BLOCK_SIZE, NUM_BLOCKS = 32, 16, 24  # the pool holds little beside the longest request
WORKER_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", str(BUDGET), "--determinism", "exact"),
)
PATIENT_TOKENS, URGENT_TOKENS = 120, 16


Prompt = torch.Tensor | list[int]


def asked(prompt: Prompt, max_tokens: int, *, is_patient: bool = False) -> Request:
    if isinstance(prompt, list):
        return Request(prompt, max_tokens, is_patient)
    return Request(PromptEmbeddings(safetensors.torch.save({"prompt": prompt})), max_tokens, is_patient)


def tuned(reference: Reference, soft: torch.Tensor, length: int) -> torch.Tensor:
    """PEFT's prompt tuning: virtual tokens in front of the embeddings of a text."""
    return torch.cat((soft, reference.embed([(7 * i + length) % 500 for i in range(length)])))


def mixed_prompts(reference: Reference) -> tuple[list[Prompt], list[Prompt]]:
    """Patient and urgent prompts: embeddings of all types, and token ids. One has the embeddings of a token prompt."""
    soft = torch.randn(20, reference.embed([0]).shape[1], generator=torch.Generator().manual_seed(1)) * 0.15
    ids = [(3 * i) % 500 for i in range(50)]
    patient = [soft[:1], tuned(reference, soft, 30), tuned(reference, soft, 90).bfloat16(), ids]
    urgent = [tuned(reference, soft, 300), tuned(reference, soft, 44).half(), reference.embed(ids), ids[:3]]
    return patient, urgent


def expected(reference: Reference, prompt: Prompt, output: list[int]) -> list[int]:
    if isinstance(prompt, list):
        return reference.greedy_after(prompt, output)
    return reference.greedy_after_embeddings(prompt.float(), output)


@pytest.mark.parametrize(
    "shape", [SHAPES[0], pytest.param(SHAPES[5], marks=pytest.mark.deep)], ids=lambda shape: shape.name
)
async def test_embeddings_equal_transformers(shape: Shape, tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model", shape)
    reference = Reference(model_dir)
    patient, urgent = mixed_prompts(reference)
    prompts = [*patient, *urgent]
    requests = [asked(prompt, PATIENT_TOKENS, is_patient=True) for prompt in patient]
    requests += [asked(prompt, URGENT_TOKENS) for prompt in urgent]
    http = f"127.0.0.1:{free_port()}"
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, model_dir, *WORKER_FLAGS)
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", http))
        async with await stack.connect(gateway) as client:
            results = await run_with_kill(stack, client, worker, requests)
            (status,) = await wait_idle(stack, client)
            for prompt, request, result in zip(prompts, requests, results, strict=True):
                tokens = list(result.token_ids)
                assert len(tokens) == request.max_tokens
                assert tokens == expected(reference, prompt, tokens)
                assert result.usage.prompt_tokens == len(prompt)
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
        result = await run(client, asked(prompt, 4))
        cached.append(result.usage.cached_tokens)
        tokens = list(result.token_ids)
        assert tokens == expected(reference, prompt, tokens)
    assert cached == [0, 0, 0, 0, 64, 64]


async def check_http(address: str, request: Request, result: GenerateResult) -> None:
    assert isinstance(request.prompt, PromptEmbeddings)
    body = {
        "prompt_embeds": [base64.b64encode(request.prompt.data).decode()] * 2,
        "temperature": 0,
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def post() -> dict:
        headers = {"content-type": "application/json"}
        call = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(call, timeout=60) as reply:
            return json.load(reply)

    answer = await asyncio.to_thread(post)
    assert [choice["text"] for choice in answer["choices"]] == [result.text] * 2
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["prompt_tokens"] == 2 * result.usage.prompt_tokens


async def check_refusals(client: AsyncClient, hidden_size: int) -> None:
    """A bad prompt beside good ones harms none of them."""
    good = asked(torch.ones(40, hidden_size), 12)
    alone = await run(client, good)
    bad = [torch.ones(4, hidden_size + 1), torch.full((4, hidden_size), torch.nan), torch.ones(4, hidden_size).double()]
    answers = await asyncio.gather(
        *(run(client, asked(prompt, 4)) for prompt in bad), run(client, good), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [InvalidRequest] * 3 + [GenerateResult]
    assert answers[3].token_ids == alone.token_ids
    assert (await client.models())[0].hidden_size == hidden_size
