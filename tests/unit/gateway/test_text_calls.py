"""Tokenize, CountTokens and Detokenize have separate threads and a separate byte budget."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from quire.v1 import inference_pb2 as pb

from gateway_svc.request.prompts import readers
from gateway_svc.request.threads import INLINE_BYTES, LARGE_BYTES, Threads
from svc_common.errors import OverloadedError
from tests.unit.gateway.fakes import FakeScheduler, TestGateway, refused, until

SIZE = 2 * INLINE_BYTES


@pytest.fixture
def threads() -> Any:
    threads = Threads(max_call_bytes=3 * SIZE)
    yield threads
    threads.close()


async def test_a_prompt_is_read_while_calls_use_their_whole_budget(threads: Threads) -> None:
    gate = threading.Event()
    calls = [asyncio.create_task(threads.run_call(SIZE, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=f"hold {3 * SIZE} bytes and this one has {SIZE}; the limit") as caught:
        await threads.run_call(SIZE, gate.wait)
    assert caught.value.retry_after_s
    assert await threads.run_call(INLINE_BYTES, lambda: "small") == "small"
    assert await threads.requests.run(SIZE, lambda: "prompt") == "prompt"
    assert not any(call.done() for call in calls)
    gate.set()
    assert await asyncio.gather(*calls) == [True] * 3
    assert await threads.run_call(SIZE, lambda: "later") == "later"


async def test_a_cancelled_call_and_a_failed_call_return_their_budget(threads: Threads) -> None:
    gate = threading.Event()
    calls = [asyncio.create_task(threads.run_call(SIZE, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await threads.run_call(3 * SIZE, lambda: 1 // 0)
    assert await threads.run_call(3 * SIZE, lambda: "all") == "all"


async def test_small_inputs_overtake_large_ones(threads: Threads) -> None:
    gate = threading.Event()
    large = [asyncio.create_task(threads.requests.run(LARGE_BYTES + 1, gate.wait)) for _ in range(64)]
    await asyncio.sleep(0)
    assert await threads.requests.run(LARGE_BYTES, lambda: "small") == "small"
    assert not any(task.done() for task in large)
    gate.set()
    assert await asyncio.gather(*large) == [True] * 64


async def test_strings_of_a_long_text_are_refused(gateway: TestGateway) -> None:
    prompt = pb.Prompt(text="x" * (1 << 20))
    with pytest.raises(grpc.aio.AioRpcError, match="Tokenize accepts with token_strings at most 1048576"):
        await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=prompt, token_strings=True))
    assert len((await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=prompt))).ids) > readers.PART_IDS


async def test_a_single_call_above_the_budget_is_served(threads: Threads) -> None:
    assert await threads.run_call(100 * SIZE, lambda: "large") == "large"


async def test_all_rpcs_are_limited(
    scheduler: FakeScheduler, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, started = threading.Event(), threading.Event()

    def wait(*_: Any) -> pb.TokenizeResponse:
        started.set()
        gate.wait()
        return pb.TokenizeResponse()

    gateway.threads.max_call_bytes = SIZE
    monkeypatch.setattr(readers, "_tokenize_response", wait)
    open_call = gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x" * SIZE)))
    await until(started.is_set)
    for call in (
        gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x" * SIZE))),
        gateway.stub.Detokenize(pb.DetokenizeRequest(ids=[5] * SIZE)),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="--max-tokenize-bytes") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status, retry = Status(), RetryInfo()
        status.ParseFromString(dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"])
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.seconds == 1
    scheduler.play([5, 6])
    text = pb.Prompt(text="some words " * 200)
    counted = gateway.stub.CountTokens(pb.CountTokensRequest(request=pb.GenerateRequest(prompt=text)))
    with pytest.raises(grpc.aio.AioRpcError, match="--max-tokenize-bytes"):
        await counted
    error = await refused(gateway.generate(prompt=text))  # it is read, and longer than the model accepts
    assert "max_model_len" in (error.details() or "")
    assert not open_call.done()
    gate.set()
    await open_call


async def test_count_tokens_counts_the_prompt_of_a_request(scheduler: FakeScheduler, gateway: TestGateway) -> None:
    async def count(**fields: Any) -> int:
        request = pb.GenerateRequest(**fields)
        return (await gateway.stub.CountTokens(pb.CountTokensRequest(request=request))).prompt_tokens

    ids = (await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="some words")))).ids
    assert await count(prompt=pb.Prompt(text="some words")) == len(ids) > 2
    assert await count(prompt=pb.Prompt(text="some words"), truncate_prompt_tokens=2) == 2
    chat = pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="some words")]))
    rendered = (await gateway.stub.Tokenize(pb.TokenizeRequest(prompt=chat))).ids
    assert await count(prompt=chat) == len(rendered)
    for fields, words in (({}, "prompt is not set"), ({"sampling": {"top_p": 2}}, "sampling.top_p is 2; must be")):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await count(**({"prompt": pb.Prompt(text="a")} if fields else {}), **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not scheduler.submits
