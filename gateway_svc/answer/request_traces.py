"""Spans of sampled requests: the whole request, its preparation until it is sent to a scheduler, and its moves.

The span of the whole request has the name and attributes of OpenTelemetry's semantic conventions for generative AI.
Prompts, outputs and stop strings are not exported.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.answer.open_streams import RequestMeter
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from svc_common.errors import ServiceError
from svc_common.observe.tracing import HEADER, current_traceparent, is_traceparent, valid_traceparent

if TYPE_CHECKING:
    from svc_common.observe.otlp import Attributes, OpenSpan, Tracer

Events = AsyncGenerator[pb.GenerateResponse, None]

MAX_INT = 2**63 - 1  # largest value of an attribute; seeds have 64 bits without a sign
PROVIDER = "quire"
OPERATIONS = {"chat": "chat", "audio": "generate_content"}  # by kind of prompt; others: text_completion
SAMPLING_ATTRIBUTES = {  # by field of SamplingParams
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}


def request_attributes(request: pb.GenerateRequest) -> dict[str, str | bool | int | float]:
    """The request without its prompt, as attributes. Fields that are not set have no attribute."""
    operation = OPERATIONS.get(request.prompt.WhichOneof("kind") or "", "text_completion")
    facts: dict[str, str | bool | int | float] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    if request.stop.HasField("max_tokens"):
        facts["gen_ai.request.max_tokens"] = request.stop.max_tokens
    for field, attribute in SAMPLING_ATTRIBUTES.items():
        if request.sampling.HasField(field):  # type: ignore[arg-type]
            value = getattr(request.sampling, field)
            facts[attribute] = min(value, MAX_INT) if isinstance(value, int) else value
    return facts


class RequestTrace:
    """The spans of one sampled request. Times are on the event loop's clock."""

    def __init__(self, tracer: Tracer, parent: str, request: pb.GenerateRequest) -> None:
        self._tracer = tracer
        self._started_at = time.monotonic()
        self._facts = request_attributes(request)
        self._operation = str(self._facts["gen_ai.operation.name"])
        self._span: OpenSpan = tracer.begin(self._operation, parent=parent, at=self._started_at, is_served=True)
        self._meter: RequestMeter | None = None
        self._detached_at: float | None = None  # while the request waits for another scheduler

    @property
    def traceparent(self) -> str:
        """Makes the spans of the scheduler children of the request's span."""
        return self._span.traceparent

    def set_meter(self, request_id: str, meter: RequestMeter) -> None:
        """The request has its id and is measured by `meter`."""
        self._meter = meter
        self._span.rename(f"{self._operation} {meter.model}")
        ids = {"quire.request_id": request_id, "gen_ai.response.id": request_id}
        self._facts |= {**ids, "gen_ai.request.model": meter.model}

    def on_prepared(self, request: SchedulerRequest) -> None:
        """The request is checked and tokenized; `request` is what is sent to a scheduler."""
        self._tracer.add("prepare", parent=self.traceparent, start=self._started_at, end=time.monotonic())
        request.set_trace(self)

    def on_detached(self) -> None:
        """The request has lost its scheduler."""
        if self._detached_at is None:
            self._detached_at = time.monotonic()

    def on_accepted(self) -> None:
        """A scheduler has queued the request."""
        self._end_move("")

    async def around(self, events: Events) -> Events:
        """The events of the request. Its span ends with them."""
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except Exception as error:
            # The code only: the message may quote the request.
            self._end(error.code.name if isinstance(error, ServiceError) else type(error).__name__)
            raise
        except BaseException:  # the client left
            self._facts["quire.is_cancelled"] = True
            self._end("")
            raise
        self._end("error" if self._meter is not None and self._meter.finish_reason == "error" else "")

    def _end(self, error: str) -> None:
        self._end_move(error or "ended")
        self._span.end(time.monotonic(), self._attributes(), error)

    def _end_move(self, error: str) -> None:
        if self._detached_at is not None:
            self._tracer.add(
                "move", parent=self.traceparent, start=self._detached_at, end=time.monotonic(), error=error
            )
            self._detached_at = None

    def _attributes(self) -> Attributes:
        meter = self._meter
        if meter is None:
            return self._facts
        if meter.first_token_at is not None:
            self._span.event("first token", meter.first_token_at)
        return {
            **self._facts,
            "gen_ai.usage.input_tokens": meter.num_prompt_tokens,
            "gen_ai.usage.output_tokens": meter.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": meter.num_cached_tokens,
            "gen_ai.response.model": meter.model,
            "gen_ai.response.finish_reasons": [meter.finish_reason] if meter.finish_reason else [],
        }


class GenerationTraces:
    """Samples requests. `draw` returns a random number from 0 to 1."""

    def __init__(self, tracer: Tracer, ratio: float, draw: Callable[[], float] = random.random) -> None:
        self._tracer = tracer
        self._ratio = ratio
        self._draw = draw

    @staticmethod
    def receive(headers: Mapping[str, Any]) -> None:
        """Keep the traceparent of the call that the running task serves."""
        current_traceparent.set(str(headers.get(HEADER, "")))

    def begin(self, request: pb.GenerateRequest) -> RequestTrace | None:
        """The trace of this request, which the running task serves; None if it is not sampled.

        If the client sent a traceparent, its flag decides; else the ratio decides.
        """
        given = current_traceparent.get()
        if given and is_traceparent(given):
            parent = valid_traceparent(given)
            return RequestTrace(self._tracer, parent, request) if parent else None
        return RequestTrace(self._tracer, "", request) if self._draw() < self._ratio else None
