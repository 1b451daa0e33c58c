"""A request is refused by what it becomes, before its parts are made: over HTTP and gRPC by the same count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.http import pooling as pooling
from gateway_svc.http.openai import bodies
from gateway_svc.http.replies import STARTED_AT_ONCE, merged
from gateway_svc.request.field_errors import MAX_COST, SAMPLE_COST
from gateway_svc.request.pooling import check_embed
from gateway_svc.request.validation import RequestLimits, check_generate
from svc_common.errors import InvalidRequestError

IDS = list(range(5, 4005))
SCHEMA = {"properties": {f"k{number}": {"type": "string"} for number in range(3000)}}

TOO_LARGE: dict[str, dict[str, Any]] = {  # by the field that the error names
    "n": {"prompt": [5], "n": 1_000_000},
    "best_of": {"prompt": [[5]] * 1024, "n": 2, "best_of": 20},
    "beam_width": {"prompt": [[5]] * 1024, "beam_width": 64},
    "guided_json": {"prompt": [[5]] * 1024, "guided_json": SCHEMA},
    "guided_choice": {"prompt": [[5]] * 1024, "guided_choice": ["x" * 1000] * 100},
    "structured_outputs.choice": {"prompt": [[5]] * 1024, "structured_outputs": {"choice": ["x" * 1000] * 100}},
    "allowed_token_ids": {"prompt": [[5]] * 1024, "allowed_token_ids": list(range(65_000))},
    "prompt_logprobs": {"prompt": [IDS] * 16, "prompt_logprobs": 20},
    "logprobs": {"prompt": [IDS] * 32, "echo": True, "logprobs": 20},
}
SERVED: tuple[dict[str, Any], ...] = (
    {"prompt": [[5]] * 1024, "n": 4},
    {"prompt": [[5]] * 64, "guided_json": SCHEMA},
    {"prompt": [[5] * 2000] * 1024},
    {"prompt": [[5] * 32_000], "prompt_logprobs": 20},
    {"prompt": [[5] * 2000] * 64, "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": "word " * 1_000_000},
)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_body_is_refused_before_its_requests_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[pb.Prompt] = []
    monkeypatch.setattr(bodies, "_with_prompt", lambda request, prompt: made.append(prompt))
    with pytest.raises(InvalidRequestError) as caught:
        bodies.completion_generation(json.dumps(TOO_LARGE[name]).encode())
    assert caught.value.field == name
    assert caught.value.message.startswith(f"{name} makes this request too large: ")
    assert f"at most {MAX_COST} are allowed" in caught.value.message
    assert not made


@pytest.mark.parametrize("body", SERVED, ids=lambda body: ",".join(body))
def test_a_large_body_that_is_worth_its_cost(body: dict[str, Any]) -> None:
    asked = bodies.completion_generation(json.dumps(body).encode())
    for request in asked.requests[:2]:
        check_generate(request)


@pytest.mark.parametrize(
    ("parse", "body", "field"),
    [
        (pooling.embeddings_of, {"input": ["x" * 7000] * 2048}, "inputs"),
        (pooling.score_of, {"text_1": "x" * 1_000_000, "text_2": ["y"] * 1000}, "text_2"),
        (pooling.score_of, {"text_1": "x", "text_2": ["y"] * 10_000}, "text_2"),
        (pooling.rerank_of, {"query": "x" * 1_000_000, "documents": ["y"] * 1000}, "documents"),
    ],
)
def test_inputs_that_are_too_large_together(parse: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} has .* at most {MAX_COST} are allowed") as caught:
        check_embed(parse(json.dumps(body).encode()).request, RequestLimits())
    assert caught.value.field == field


async def test_a_thousand_prompts_are_started_in_slices() -> None:
    """Other tasks of the loop run in between."""
    started: list[int] = []
    seen: list[int] = []

    async def events(number: int) -> AsyncGenerator[pb.GenerateResponse, None]:
        started.append(number)
        yield pb.GenerateResponse()

    async def watch() -> None:
        while len(started) < 1024:
            seen.append(len(started))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    assert len([event async for event in merged([events(number) for number in range(1024)])]) == 1024
    await watching
    assert max(later - earlier for earlier, later in pairwise([*seen, 1024])) <= STARTED_AT_ONCE


def test_images_and_continuations_are_not_parameters_of_prompts() -> None:
    request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), media=[bytes(12 << 20)])
    request.continuation.samples.add(output_token_ids=[50_000] * 1_000_000)
    check_generate(request)


def test_a_message_is_counted_like_a_body() -> None:
    prompt = pb.Prompt(tokens=types.TokenIds(ids=[5]))
    most = MAX_COST // SAMPLE_COST - 2
    check_generate(pb.GenerateRequest(prompt=prompt, sampling=types.SamplingParams(n=most)))
    with pytest.raises(
        InvalidRequestError, match=r"sampling\.n makes this request too large: 1 prompts with"
    ) as caught:
        check_generate(pb.GenerateRequest(prompt=prompt, sampling=types.SamplingParams(n=most + 2)))
    assert caught.value.field == "sampling.n"
