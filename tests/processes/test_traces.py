"""Spans of one request from all three services, joined by its trace id, also after its worker was killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.demo import demo_model_dir

from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, is_ready
from tests.processes.trace_collector import Collector, Span, trace_collector

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
ROOT = f"text_completion {demo_model_dir().name}"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{CALLER_SPAN}-01", f"00-{TRACE_ID}-{CALLER_SPAN}-00"
NUM_TOKENS = 40
CLOCK_NS = 50_000_000  # the clock of an event loop shows when its turn began
SLOW = ("--executor", "sim", "--sim-step-ms", "25", "--sim-eos-probability", "0", "--num-blocks", "64")


class TracedStack:
    """A scheduler, two slow workers and a gateway that samples only what its clients ask for."""

    def __init__(self, stack: Stack, collector: Collector) -> None:
        flag = f"--trace-endpoint=http://{collector.address}"
        self.stack = stack
        self.collector = collector
        self.scheduler = stack.start_scheduler(flag, "--heartbeat-timeout-s=5")
        self.workers = [stack.start_worker(self.scheduler, demo_model_dir(), *SLOW, flag) for _ in range(2)]
        self.http = f"127.0.0.1:{free_port()}"
        flags = (flag, "--trace-ratio=0", f"--http-listen={self.http}")
        self.gateway = stack.start_gateway(self.scheduler, flags=flags)

    async def wait_ready(self) -> None:
        async with await self.stack.connect(self.gateway, workers=2) as client:
            await self.stack.until(client, lambda all_: all(is_ready(all_, worker) for worker in self.workers))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedStack]:
    with pytest.MonkeyPatch.context() as patch, trace_collector() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with Stack(tmp_path_factory.mktemp("stack")) as stack:
            traced = TracedStack(stack, collector)
            asyncio.run(traced.wait_ready())
            yield traced


async def generate(traced: TracedStack, traceparent: str, request: pb.GenerateRequest) -> AsyncIterator[str]:
    """The kinds of the events of a request with this metadata."""
    async with grpc.aio.insecure_channel(traced.gateway.address) as channel:
        call = InferenceServiceStub(channel).Generate(request, metadata=(("traceparent", traceparent),), timeout=60)
        async for event in call:
            yield event.WhichOneof("event")


def request_of(request_id: str, num_tokens: int = NUM_TOKENS) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        prompt=pb.Prompt(tokens=types.TokenIds(ids=range(5, 69))),
        sampling=types.SamplingParams(temperature=0.0),
        stop=types.StopParams(max_tokens=num_tokens, ignore_eos=True),
    )


def of_request(spans: list[Span], request_id: str) -> dict[str, Span]:
    """The spans of a request by name; for `row`, the newest."""
    trace_ids = {span.trace_id for span in spans if span.attributes.get("quire.request_id") == request_id}
    assert len(trace_ids) <= 1, "one request, one trace"
    return {span.name: span for span in spans if span.trace_id in trace_ids}


async def test_spans_of_a_request_join_in_all_services_after_its_worker_was_killed(traced: TracedStack) -> None:
    events = generate(traced, SAMPLED, request_of("moved"))
    async with contextlib.aclosing(events):
        seen = [await anext(events) for _ in range(4)]
        assert seen[:2] == ["accepted", "chunk"]
        killed = running_worker(traced, "moved")
        killed.kill()
        seen += [kind async for kind in events]
    assert seen[-1] == "finished"
    all_ = traced.collector.wait(
        lambda spans: (
            {ROOT, "prepare", "schedule", "queue", "prefill", "decode", "move", "row"}
            <= set(of_request(spans, "moved"))
        )
    )
    spans = of_request(all_, "moved")
    assert {span.trace_id for span in spans.values()} == {TRACE_ID}
    assert {span.service for span in spans.values()} == {"quire-gateway", "quire-scheduler", "quire-worker"}
    root, schedule, row = spans[ROOT], spans["schedule"], spans["row"]
    assert root.parent_id == CALLER_SPAN
    assert (schedule.parent_id, row.parent_id) == (root.span_id, schedule.span_id)
    assert {spans[name].parent_id for name in ("queue", "prefill", "decode", "move")} == {schedule.span_id}
    survivor = next(worker for worker in traced.workers if worker is not killed)
    assert row.attributes["quire.worker_id"] == survivor.name
    move = spans["move"].attributes
    assert (move["quire.reason"], move["quire.from_worker"], move["quire.to_worker"]) == (
        "lost",
        killed.name,
        survivor.name,
    )
    facts = {name.removeprefix("gen_ai."): value for name, value in root.attributes.items()}
    assert (facts["operation.name"], facts["provider.name"]) == ("text_completion", "quire")
    assert (facts["request.temperature"], facts["request.max_tokens"]) == (0.0, NUM_TOKENS)
    assert facts["request.model"] == facts["response.model"] == ROOT.partition(" ")[2]
    assert (facts["usage.output_tokens"], facts["response.id"]) == (NUM_TOKENS, "moved")
    assert not any(span.is_failed for span in spans.values())
    queue, prefill, decode, moved = (spans[name] for name in ("queue", "prefill", "decode", "move"))
    assert schedule.start_ns == queue.start_ns <= queue.end_ns == prefill.start_ns <= prefill.end_ns == decode.start_ns
    assert decode.start_ns <= moved.start_ns <= moved.end_ns <= decode.end_ns == schedule.end_ns
    assert root.start_ns - CLOCK_NS <= schedule.start_ns <= schedule.end_ns <= root.end_ns + CLOCK_NS


def running_worker(traced: TracedStack, request_id: str) -> Service:
    """The worker that runs the request: the one whose pool has used blocks."""
    with grpc.insecure_channel(traced.gateway.address) as channel:
        status = InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
    names = [w.worker_id for s in status.schedulers for w in s.workers if w.rows_used]
    (name,) = names
    return next(worker for worker in traced.workers if worker.name == name)


async def test_the_flag_of_a_traceparent_and_the_ratio_decide(traced: TracedStack) -> None:
    for request_id, header in (("unsampled", UNSAMPLED), ("invalid", "00-zz"), ("sampled", SAMPLED)):
        assert [kind async for kind in generate(traced, header, request_of(request_id, 2))][-1] == "finished"
    spans = traced.collector.wait(lambda spans: ROOT in of_request(spans, "sampled"))
    assert not of_request(spans, "unsampled")
    assert not of_request(spans, "invalid"), "without a valid traceparent, --trace-ratio=0 decides"


async def test_a_refused_request_has_a_failed_span(traced: TracedStack) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in generate(traced, f"00-{'1' * 32}-{CALLER_SPAN}-01", request_of("refused", 100_000)):
            pass
    spans = traced.collector.wait(lambda spans: any(span.trace_id == "1" * 32 for span in spans))
    (root,) = [span for span in spans if span.trace_id == "1" * 32]
    assert (root.name, root.is_failed, root.attributes["error.type"]) == (ROOT, True, "INVALID_ARGUMENT")


async def test_the_traceparent_of_an_http_request(traced: TracedStack) -> None:
    trace_id = "2" * 32
    body = {"model": "", "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{traced.http}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"traceparent": f"00-{trace_id}-{CALLER_SPAN}-01", "content-type": "application/json"},
    )
    answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=30).read())
    assert json.loads(answer)["usage"]["completion_tokens"] == 2
    spans = traced.collector.wait(
        lambda spans: {ROOT, "schedule", "row"} <= {span.name for span in spans if span.trace_id == trace_id}
    )
    assert {s.service for s in spans if s.trace_id == trace_id} == {"quire-gateway", "quire-scheduler", "quire-worker"}


def test_a_service_stops_in_time_without_its_collector(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler(f"--trace-endpoint=http://127.0.0.1:{free_port()}")
        scheduler.wait_ready()
        assert scheduler.terminate() == 0
