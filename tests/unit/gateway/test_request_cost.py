"""Requests and chunks stay cheap: counted in calls, which are the same on every machine, never in seconds.

When a limit is passed on purpose, run `make bench-requests` before and after, and raise it with the reason in the
commit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.answer.request_traces import GenerationTraces
from gateway_svc.request.models import ServedModel, read_bundle
from gateway_svc.schedulers.attach_stream import AttachStream
from svc_common.observe.otlp import Tracer
from tests.call_counts import counted
from tests.unit.gateway.fakes import LENGTH, TestGateway, make_bundle, make_info, u32

NUM_REQUESTS = 20
NUM_CHUNKS = 20
REQUEST = pb.GenerateRequest(
    prompt=pb.Prompt(tokens=types.TokenIds(ids=range(5, 69))),
    sampling=types.SamplingParams(temperature=0.0),
    stop=types.StopParams(max_tokens=1, ignore_eos=True),
)


@pytest.fixture
async def gateway() -> AsyncIterator[TestGateway]:
    """A gateway whose scheduler is this test: it reads the outbox and calls `_on_response`."""
    made = TestGateway(["127.0.0.1:1"])
    bundle = make_bundle()
    info = make_info(bundle)
    client = made.clients[0]
    client.loader.model = ServedModel(info, read_bundle(bundle, info.bundle_digest))
    client.on_welcome(scheduler_pb2.Welcome(scheduler_epoch=1, info=info, ready_workers=1))
    yield made
    made.threads.close()
    await made.grammars.close()
    await made.templates.close()


async def submitted(stream: AttachStream) -> int:
    """The handle of the next Submit, which is taken from the stream as by its writer."""
    await stream._writes.wait()
    stream._writes.clear()
    [message] = stream._waiting
    stream._waiting = []
    stream._flush.free(0.0)
    return message.submit.handle


async def serve_one(gateway: TestGateway, request: pb.GenerateRequest = REQUEST) -> list[pb.GenerateResponse]:
    """The messages of one request with one output token."""

    async def read() -> list[pb.GenerateResponse]:
        return [message async for message in gateway.generation.generate(request)]

    reader = asyncio.create_task(read())
    client = gateway.clients[0]
    handle = await submitted(client.stream)
    deltas = scheduler_pb2.Deltas(
        queued_handles=u32([handle]), handles=u32([handle]), offsets=u32([0]), token_ids=u32([7])
    )
    deltas.finished.add(handle=handle, reason=LENGTH)
    client.stream.on_response(scheduler_pb2.AttachResponse(deltas=deltas))
    return await reader


async def test_calls_of_a_request_that_is_not_sampled_for_traces(gateway: TestGateway) -> None:
    """With 1 % sampling, 99 of 100 requests. The calls per token are the same."""
    calls = {False: Counter[str](), True: Counter[str]()}
    await serve_one(gateway)
    for is_traced, counter in calls.items():
        if is_traced:
            tracer = Tracer(SimpleSpanProcessor(InMemorySpanExporter()), Resource({}))
            gateway.generation.traces = GenerationTraces(tracer, 0.0)
        with counted(counter):
            for _ in range(NUM_REQUESTS):
                await serve_one(gateway)
    num_calls = {is_traced: counter["call"] + counter["c_call"] for is_traced, counter in calls.items()}
    assert (num_calls[True] - num_calls[False]) / NUM_REQUESTS <= 5


async def test_calls_of_a_short_request(gateway: TestGateway) -> None:
    """From the decoded request to its last event, without gRPC."""
    kinds = [event.WhichOneof("event") for event in await serve_one(gateway)]
    assert kinds == ["accepted", "chunk", "finished"]
    calls = Counter[str]()
    with counted(calls):
        for _ in range(NUM_REQUESTS):
            await serve_one(gateway)
    assert calls["call"] / NUM_REQUESTS <= 321, "Python calls"
    assert calls["c_call"] / NUM_REQUESTS <= 250, "calls of C functions"


async def test_calls_of_a_short_request_with_joined_events(gateway: TestGateway) -> None:
    """One message instead of three. gRPC's cost of a message, which is not counted here, is above that of all calls of
    Python.
    """
    request = pb.GenerateRequest(joins_events=True)
    request.MergeFrom(REQUEST)
    assert len(await serve_one(gateway, request)) == 1
    calls = Counter[str]()
    with counted(calls):
        for _ in range(NUM_REQUESTS):
            await serve_one(gateway, request)
    assert calls["call"] / NUM_REQUESTS <= 321, "Python calls"
    assert calls["c_call"] / NUM_REQUESTS <= 257, "calls of C functions"


@pytest.mark.parametrize(("num_tokens", "python_calls", "c_calls"), [(1, 114, 106), (4, 114, 115)])
async def test_calls_of_a_chunk(gateway: TestGateway, num_tokens: int, python_calls: int, c_calls: int) -> None:
    """From a scheduler's message with these tokens to the event for the client, with the turns of the event loop."""
    request = pb.GenerateRequest()
    request.CopyFrom(REQUEST)
    request.stop.max_tokens = 100
    events, client, calls = gateway.generation.generate(request), gateway.clients[0], Counter[str]()
    first = asyncio.create_task(anext(events))
    handle = u32([await submitted(client.stream)])
    client.stream.on_response(scheduler_pb2.AttachResponse(deltas=scheduler_pb2.Deltas(queued_handles=handle)))
    assert (await first).HasField("accepted")
    for position in range(1 + NUM_CHUNKS):
        offsets = u32(range(num_tokens * position, num_tokens * (position + 1)))
        ids = u32([7] * num_tokens)
        deltas = scheduler_pb2.Deltas(handles=handle * num_tokens, offsets=offsets, token_ids=ids)
        message = scheduler_pb2.AttachResponse(deltas=deltas)
        with counted(calls if position else Counter()):
            client.stream.on_response(message)
            event = await anext(events)
        assert event.chunk.token_ids == [7] * num_tokens
    await events.aclose()
    assert calls["call"] / NUM_CHUNKS <= python_calls
    assert calls["c_call"] / NUM_CHUNKS <= c_calls
