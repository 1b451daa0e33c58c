"""Traces of requests with OpenTelemetry, if --trace-endpoint is set; otherwise no package of it is imported.

A gateway decides which requests are sampled. The `traceparent` of a sampled request (W3C Trace Context) travels as a
field to its scheduler and its workers; the field of other requests is empty and free. Spans are made from
times that the services measure anyway, and a thread exports them.
"""

from __future__ import annotations

import argparse
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING

from svc_common.config import Flag, FlagGroup, SettingError, in_range, text

if TYPE_CHECKING:
    from svc_common.observe.otlp import Tracer

HEADER = "traceparent"
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
SAMPLED = 1
MAX_CHARS = 55

# The header of the call that the running task serves. Set only by gateways that trace.
current_traceparent: ContextVar[str] = ContextVar("current_traceparent", default="")

GROUP = "traces (docs/traces.md); they need the extra `tracing`"
ENDPOINT = Flag("--trace-endpoint", text,
    "export spans of sampled requests to this OTLP collector over gRPC, such as http://collector:4317 or, "
    "with TLS, https://collector:4317. The OTEL_* environment variables set everything else. Unset: no "
    "traces", metavar="URL",
)  # fmt: skip
RATIO = Flag("--trace-ratio", in_range(float, 0.0, 1.0),
    "fraction of requests without a traceparent of their client that are sampled, 0 to 1. Requests with a "
    "traceparent are sampled if its flag says so", default=1.0, metavar="RATIO",
)  # fmt: skip
TRACE_FLAGS = FlagGroup(GROUP, (ENDPOINT,))
TRACE_FLAGS_OF_GATEWAY = FlagGroup(GROUP, (ENDPOINT, RATIO))  # the service that samples


class TracingError(SettingError):
    """Traces cannot be exported with these settings."""


def valid_traceparent(text: str) -> str:
    """`text` if it is a traceparent of a sampled request, else an empty string: an invalid header is ignored."""
    return text if is_traceparent(text) and int(text[-2:], 16) & SAMPLED else ""


def is_traceparent(text: str) -> bool:
    """Whether `text` is a traceparent. Fields that later versions of the format append are not supported."""
    return len(text) == MAX_CHARS and TRACEPARENT.fullmatch(text) is not None


def make_tracer(args: argparse.Namespace, service: str, instance: str) -> Tracer | None:
    """The tracer of this process; None without --trace-endpoint. Raises TracingError."""
    endpoint = args.trace_endpoint
    if endpoint is None:
        return None
    if not re.fullmatch(r"https?://[^/]+/?", endpoint):
        raise TracingError(f"--trace-endpoint {endpoint}: must be http://HOST:PORT, or https://HOST:PORT with TLS")
    try:
        from svc_common.observe import otlp
    except ImportError as error:
        raise TracingError(
            f"--trace-endpoint needs OpenTelemetry ({error}): install the extra `tracing`: pip install "
            "'quire-server[tracing]'"
        ) from None
    return otlp.make_tracer(endpoint, service, instance)
