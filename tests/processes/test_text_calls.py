"""Large Tokenize calls delay no prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.demo import demo_model_dir

from tests.processes.stack import Stack

NUM_CALLS = 24
TOKENIZE_BYTES = 4 << 20


@pytest.mark.timeout(300)
async def test_a_prompt_overtakes_large_tokenize_calls(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim")
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway):
            pass
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(gateway.address, options=options) as channel:
            stub = InferenceServiceStub(channel)
            text = "the quick brown fox " * (TOKENIZE_BYTES // 20 - 1)
            calls = [stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=text))) for _ in range(NUM_CALLS)]
            tasks = [asyncio.ensure_future(_code(call)) for call in calls]
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result() for task in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            request = pb.GenerateRequest(prompt=pb.Prompt(text="one two three " * 146), stop={"max_tokens": 2})
            events = [event async for event in stub.Generate(request, timeout=120)]
            assert events[-1].HasField("finished")
            assert any(not task.done() for task in waiting), "all Tokenize calls ended before the prompt was served"
            codes = await asyncio.gather(*tasks)
            assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def _code(call: grpc.aio.UnaryUnaryCall[pb.TokenizeRequest, pb.TokenizeResponse]) -> grpc.StatusCode:
    return await call.code()
