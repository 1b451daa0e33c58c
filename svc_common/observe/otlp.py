"""Spans in OpenTelemetry's SDK, exported over OTLP by a thread of the SDK. Imported only if traces are on.

The SDK reads the OTEL_* variables for the exporter (headers, certificates, timeouts), its queue and the resource.
When the collector is slow or away, the queue drops spans; requests never wait for it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from svc_common.observe.metrics import quire_version

CLOSE_TIMEOUT_S = 3.0
RECHECK_S = 30.0

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class OpenSpan:
    """A span that has begun. `traceparent` makes other spans its children. Call `end` once."""

    __slots__ = ("_clock", "_span", "traceparent")

    def __init__(self, span: trace.Span, clock: UnixClock) -> None:
        self._span = span
        self._clock = clock
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"  # sampled

    def rename(self, name: str) -> None:
        """Give the span another name."""
        self._span.update_name(name)

    def event(self, name: str, at: float) -> None:
        """Record an event of the span at time `at`."""
        self._span.add_event(name, timestamp=self._clock.unix_ns(at))

    def end(self, at: float, attributes: Attributes | None = None, error: str = "") -> None:
        """End the span at time `at`. With `error`, the code or class of an error, it has failed."""
        if attributes:
            self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._clock.unix_ns(at))


class Tracer:
    """Makes spans. Times come from the event loop's clock (time.monotonic). Thread-safe."""

    def __init__(self, processor: SpanProcessor, resource: Resource) -> None:
        # The gateway has sampled the request, so that every span is recorded. At exit, `close` has a time limit.
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._clock = UnixClock()
        self._tracer = self._provider.get_tracer("quire", quire_version())

    def begin(
        self, name: str, *, parent: str, at: float, attributes: Attributes | None = None, is_served: bool = False
    ) -> OpenSpan:
        """Begin a span at time `at`. `parent` is a valid traceparent, or empty for the first span of a trace.

        `is_served`: the span serves a call of another process.
        """
        span = self._tracer.start_span(
            name,
            _context(parent),
            kind=SpanKind.SERVER if is_served else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=self._clock.unix_ns(at),
        )
        return OpenSpan(span, self._clock)

    def add(
        self, name: str, *, parent: str, start: float, end: float, attributes: Attributes | None = None, error: str = ""
    ) -> None:
        """Record a span that is over."""
        self.begin(name, parent=parent, at=start, attributes=attributes).end(max(start, end), error=error)

    async def close(self) -> None:
        """Export what is left, for at most CLOSE_TIMEOUT_S."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            loop.call_soon_threadsafe(done.set)

        # A daemon thread, because the SDK may wait 30 s for a collector that does not answer.
        threading.Thread(target=shut_down, name="trace-shutdown", daemon=True).start()
        await asyncio.wait([asyncio.ensure_future(done.wait())], timeout=CLOSE_TIMEOUT_S)


def make_tracer(endpoint: str, service: str, instance: str) -> Tracer:
    """The tracer of a service process."""
    own = Resource.create(
        {"service.name": f"quire-{service}", "service.instance.id": instance, "service.version": quire_version()}
    )
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), own.merge(OTELResourceDetector().detect()))


class UnixClock:
    """Converts times of the monotonic clock. Both clocks are compared again every RECHECK_S."""

    def __init__(self) -> None:
        self._checked_at = -math.inf
        self._offset_ns = 0

    def unix_ns(self, at: float) -> int:
        """Time `at` as nanoseconds since 1970."""
        if time.monotonic() > self._checked_at + RECHECK_S:
            # The highest of several: the thread may lose the processor between the two calls.
            self._offset_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(10))
            self._checked_at = time.monotonic()
        return self._offset_ns + int(at * 1e9)


def _context(parent: str) -> Context:
    if not parent:
        return Context()
    _, trace_id, span_id, flags = parent.split("-")
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(remote), Context())
