"""An OTLP collector in the test's process: keeps the spans that services export."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class Span:
    """One exported span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    is_failed: bool
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans, in the order of their arrival."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Span] = []
        self._arrived = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self._arrived:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, span) for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, holds: Callable[[list[Span]], bool], deadline_s: float = 20.0) -> list[Span]:
        """All spans as soon as `holds(spans)`. Raises TimeoutError with the names of those that have arrived."""
        deadline = time.monotonic() + deadline_s
        with self._arrived:
            while not holds(self.spans):
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"spans: {sorted((s.service, s.name) for s in self.spans)}")
            return list(self.spans)


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def trace_collector() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
