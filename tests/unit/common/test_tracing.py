"""Sampling by traceparent, and spans as OpenTelemetry's SDK exports them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire.v1 import inference_pb2 as pb

from gateway_svc.answer.request_traces import GenerationTraces
from svc_common.errors import OverloadedError
from svc_common.observe.otlp import Tracer
from svc_common.observe.tracing import current_traceparent, valid_traceparent

ROOT = Path(__file__).resolve().parents[3]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    return Tracer(SimpleSpanProcessor(exporter), Resource({}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "junk",
        f"00-{TRACE}-{SPAN}-00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        SAMPLED + "-extra",
        SAMPLED + "\n",
    ],
)
def test_a_traceparent_that_is_invalid_or_not_sampled_is_ignored(text: str) -> None:
    assert valid_traceparent(text) == ""


@pytest.mark.parametrize(
    ("header", "drawn", "is_sampled"),
    [("", 0.05, True), ("", 0.1, False), (SAMPLED, 0.9, True), (SAMPLED[:-1] + "0", 0.0, False), ("junk", 0.0, True)],
)
def test_the_parent_decides_before_the_ratio(tracer: Tracer, header: str, drawn: float, is_sampled: bool) -> None:
    traces = GenerationTraces(tracer, 0.1, lambda: drawn)
    token = current_traceparent.set(header)
    try:
        assert (traces.begin(pb.GenerateRequest()) is not None) == is_sampled
    finally:
        current_traceparent.reset(token)


async def stream(error: BaseException | None) -> AsyncGenerator[pb.GenerateResponse, None]:
    yield pb.GenerateResponse()
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("error", "error_type", "is_cancelled"),
    [
        (None, None, None),
        (OverloadedError("model 'secret words' is full"), "RESOURCE_EXHAUSTED", None),
        (RuntimeError("secret words"), "RuntimeError", None),
        (asyncio.CancelledError(), None, True),
    ],
)
async def test_the_span_of_a_request_fails_with_it_and_quotes_no_message(
    tracer: Tracer,
    exporter: InMemorySpanExporter,
    error: BaseException | None,
    error_type: str | None,
    is_cancelled: bool | None,
) -> None:
    trace = GenerationTraces(tracer, 1.0).begin(pb.GenerateRequest())
    assert trace is not None
    with suppress(OverloadedError, RuntimeError, asyncio.CancelledError):
        async for _ in trace.around(stream(error)):
            pass
    (span,) = exporter.get_finished_spans()
    attributes = span.attributes or {}
    assert (attributes.get("error.type"), attributes.get("quire.is_cancelled")) == (error_type, is_cancelled)
    assert (span.status.status_code.name == "ERROR") == (error_type is not None)
    assert "secret" not in span.to_json()


def test_without_the_packages_the_flag_is_refused_and_its_absence_is_not() -> None:
    code = (
        "import sys, argparse; sys.modules['opentelemetry'] = None\n"
        "from svc_common.observe import tracing\n"
        "tracing.make_tracer(argparse.Namespace(trace_endpoint=None), 'worker', 'w')\n"
        "tracing.make_tracer(argparse.Namespace(trace_endpoint='http://a:1'), 'worker', 'w')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "install the extra `tracing`" in done.stderr.splitlines()[-1]
