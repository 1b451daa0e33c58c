"""Metrics of the gateway: latencies and tokens as clients see them, and the schedulers behind the gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from quire.v1 import types_pb2 as types

from gateway_svc.operators.audit.audit_log import AuditLog
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from prefix_index.reader import RedisPrefixReader
from svc_common.metrics import LATENCIES_S, TOKEN_COUNTS, Buckets, Row, Spec

log = logging.getLogger(__name__)

MODEL = ("model_name",)
SCHEDULER_STATES = ("ready", "attached", "away")


def _latency(name: str, meaning: str, *vllm: str) -> Spec:
    return Spec(name, "histogram", meaning, "seconds", MODEL, (name, *vllm))


SPECS = (
    Spec(
        "requests_total",
        "counter",
        "generations that ended, by finish reason (for n > 1, the reason of the last sample); cancelled: by the "
        "client; failed: ended with an error status",
        "",
        ("model_name", "finished_reason"),
        ("request_success_total",),
    ),
    Spec("requests_resumed_total", "counter", "accepted generations that resumed with a continuation", "", MODEL),
    Spec(
        "request_moves_total", "counter", "number of times that an open request lost its scheduler and was resubmitted"
    ),
    Spec("prompt_tokens_total", "counter", "tokens of accepted prompts", "tokens", MODEL, ("prompt_tokens_total",)),
    Spec(
        "generation_tokens_total",
        "counter",
        "output tokens sent to clients",
        "tokens",
        MODEL,
        ("generation_tokens_total",),
    ),
    _latency("time_to_first_token_seconds", "time from a request's arrival to its first token"),
    _latency(
        "inter_token_latency_seconds",
        "time between tokens of a sample; tokens that arrive together share the time equally",
        "time_per_output_token_seconds",
    ),
    _latency("e2e_request_latency_seconds", "time from a request's arrival to its end"),
    _latency(
        "request_time_per_output_token_seconds",
        "per request: time from first to last token, divided by the tokens after the first",
    ),
    Spec(
        "request_prompt_tokens", "histogram", "prompt tokens of a request", "tokens", MODEL, ("request_prompt_tokens",)
    ),
    Spec(
        "request_generation_tokens",
        "histogram",
        "output tokens of a request, all samples together",
        "tokens",
        MODEL,
        ("request_generation_tokens",),
    ),
    Spec("gateway_streams", "gauge", "open generations"),
    Spec("gateway_streams_limit", "gauge", "limit of open generations (--max-streams)"),
    Spec("gateway_request_bytes", "gauge", "size of all open requests", "bytes"),
    Spec("gateway_schedulers", "gauge", "schedulers by state: ready, attached (no model yet), away", "", ("state",)),
    Spec("gateway_ready_workers", "gauge", "ready workers of all schedulers", "", MODEL),
    Spec(
        "gateway_requests_waiting", "gauge", "sequences in the queues of all schedulers, by their heartbeats", "", MODEL
    ),
    Spec("gateway_requests_running", "gauge", "sequences running on all workers, by the same heartbeats", "", MODEL),
    Spec(
        "gateway_kv_cache_usage_perc",
        "gauge",
        "fraction of the blocks of the workers of the fullest scheduler that sequences use, 0 to 1",
        "",
        MODEL,
    ),
    Spec(
        "audit_lost_lines_total",
        "counter",
        "lines of the audit log that were dropped because it could not be written; absent without --audit-log",
    ),
    Spec("redis_up", "gauge", "1 if the last call to Redis succeeded; absent without --redis"),
    Spec("redis_errors_total", "counter", "failed calls to Redis; absent without --redis"),
)

# The endpoint picker of an InferencePool asks the pods that serve requests, so gateways answer for their schedulers.
PICKED = {
    "gateway_requests_waiting": ("num_requests_waiting",),
    "gateway_requests_running": ("num_requests_running",),
    "gateway_kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}


def specs_for_picker() -> tuple[Spec, ...]:
    """SPECS with the names that an endpoint picker reads."""
    return tuple(dataclasses.replace(spec, vllm=PICKED.get(spec.name, spec.vllm)) for spec in SPECS)


REASONS = {value: name.removeprefix("FINISH_REASON_").lower() for name, value in types.FinishReason.items()}


@dataclass(slots=True)
class ModelTimes:
    """Measurements of the requests for one model."""

    ttft: Buckets = field(default_factory=lambda: Buckets(LATENCIES_S))
    itl: Buckets = field(default_factory=lambda: Buckets(LATENCIES_S))
    e2e: Buckets = field(default_factory=lambda: Buckets(LATENCIES_S))
    per_token: Buckets = field(default_factory=lambda: Buckets(LATENCIES_S))
    prompt: Buckets = field(default_factory=lambda: Buckets(TOKEN_COUNTS))
    generation: Buckets = field(default_factory=lambda: Buckets(TOKEN_COUNTS))
    ends: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class RequestMeter:
    """Measures one request of a model and logs its end. Times are on the event loop's clock.

    A context manager: the request ends with the block, which an error makes a failure or, if it is no Exception (the
    call was cancelled, or closed while an event waits to be written), a cancellation.
    """

    def __init__(self, request_id: str, model: str, times: ModelTimes, now: Callable[[], float]) -> None:
        self._request_id = request_id
        self.model = model
        self._times = times
        self.now = now
        self._started_at = now()
        self._first_at: dict[int, float] = {}  # by sample
        self._last_at: dict[int, float] = {}
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason = ""  # of the last sample that ended
        self._reason = "stop"  # for a continuation that is already complete

    def __enter__(self) -> RequestMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(None if kind is None else "failed" if issubclass(kind, Exception) else "cancelled")

    @property
    def first_token_at(self) -> float | None:
        """When the first token of any sample was sent; None before."""
        return min(self._first_at.values(), default=None)

    def on_accepted(self, num_prompt: int, *, resumes: bool) -> None:
        self.num_prompt_tokens = num_prompt
        self._times.prompt_tokens += num_prompt
        self._times.num_resumed += resumes
        if not log.isEnabledFor(logging.DEBUG):
            return
        waited_s = self.now() - self._started_at
        facts = {"model": self.model, "prompt_tokens": num_prompt, "seconds": round(waited_s, 4)}
        log.debug(
            "request %s accepted after %.3f s: %d prompt tokens", self._request_id, waited_s, num_prompt, extra=facts
        )

    def on_tokens(self, sample: int, count: int, now: float) -> None:
        """`count` new tokens of a sample arrived together. Called tens of thousands of times per second."""
        last_at = self._last_at.get(sample)
        self._last_at[sample] = now
        self.num_output_tokens += count
        self._times.output_tokens += count
        if last_at is not None:
            self._times.itl.observe((now - last_at) / count, count)
            return
        if not self._first_at:
            self._times.ttft.observe(now - self._started_at)
        self._first_at[sample] = now

    def on_finished(self, reason: types.FinishReason.ValueType, num_cached: int = 0) -> None:
        """One sample has ended; `num_cached` tokens of its prompt were cached."""
        self._reason = self.finish_reason = REASONS[reason]
        self.num_cached_tokens += num_cached

    def end(self, reason: str | None = None) -> None:
        """The request ended. Default reason: the finish reason of the last sample. Called once."""
        reason, times, now = reason or self._reason, self._times, self.now()
        times.ends[reason] += 1
        times.e2e.observe(now - self._started_at)
        times.prompt.observe(self.num_prompt_tokens)
        times.generation.observe(self.num_output_tokens)
        num_further = self.num_output_tokens - len(self._first_at)
        if num_further > 0:
            decode_s = sum(last - self._first_at[sample] for sample, last in self._last_at.items())
            times.per_token.observe(decode_s / num_further)
        self._log_end(reason, now)

    def _log_end(self, reason: str, now: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        total_s = now - self._started_at
        first_s = None if self.first_token_at is None else self.first_token_at - self._started_at
        log.info(
            "request %s ended (%s): %d prompt tokens, %d output tokens, %.3f s",
            self._request_id,
            reason,
            self.num_prompt_tokens,
            self.num_output_tokens,
            total_s,
            extra={
                "request_id": self._request_id,
                "model": self.model,
                "reason": reason,
                "prompt_tokens": self.num_prompt_tokens,
                "output_tokens": self.num_output_tokens,
                "first_token_s": None if first_s is None else round(first_s, 4),
                "seconds": round(total_s, 4),
            },
        )


class GatewayMetrics:
    """Measurements of this gateway, by model."""

    def __init__(self) -> None:
        self.models: dict[str, ModelTimes] = {}

    def request(self, request_id: str, model: str) -> RequestMeter:
        """Measure one generation, as a context manager."""
        times = self.models.get(model) or self.models.setdefault(model, ModelTimes())
        return RequestMeter(request_id, model, times, asyncio.get_running_loop().time)


class Streams(Protocol):
    """The properties of the calls in progress that metrics read."""

    max_streams: int
    num_bytes: int

    def __len__(self) -> int: ...


class GatewayReader:
    """The current values of all SPECS."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        streams: Streams,
        directory: ModelDirectory,
        num_moves: Callable[[], int],
        redis: RedisPrefixReader | None,
        audit: AuditLog | None = None,
    ) -> None:
        self._metrics = metrics
        self._streams = streams
        self._directory = directory
        self._num_moves = num_moves
        self._redis = redis
        self._audit = audit

    def __call__(self) -> Iterator[Row]:
        yield "gateway_streams", (), len(self._streams)
        yield "gateway_streams_limit", (), self._streams.max_streams
        yield "gateway_request_bytes", (), self._streams.num_bytes
        yield "request_moves_total", (), self._num_moves()
        states = Counter(_state_of(client) for client in self._directory.clients)
        for state in SCHEDULER_STATES:
            yield "gateway_schedulers", (state,), states[state]
        for model, num_workers in self._directory.models():
            yield "gateway_ready_workers", (model.name,), num_workers
            yield from self._queue_rows(model.name)
        for name, times in list(self._metrics.models.items()):
            yield from model_rows(name, times)
        if self._audit is not None:
            yield "audit_lost_lines_total", (), self._audit.num_lost
        if self._redis is not None:
            yield "redis_up", (), float(self._redis.is_up)
            yield "redis_errors_total", (), self._redis.num_errors

    def _queue_rows(self, model: str) -> Iterator[Row]:
        clients = [c for c in self._directory.clients if c.model is not None and c.model.name == model]
        beats = [c.heartbeat for c in clients if c.heartbeat is not None]
        yield "gateway_requests_waiting", (model,), sum(beat.num_waiting for beat in beats)
        yield "gateway_requests_running", (model,), sum(beat.num_running for beat in beats)
        yield "gateway_kv_cache_usage_perc", (model,), max((beat.kv_cache_usage for beat in beats), default=0.0)


def _state_of(client: SchedulerClient) -> str:
    return "ready" if client.is_ready else "attached" if client.is_connected else "away"


def model_rows(model: str, times: ModelTimes) -> Iterator[Row]:
    for reason, count in times.ends.items():
        yield "requests_total", (model, reason), count
    yield "requests_resumed_total", (model,), times.num_resumed
    yield "prompt_tokens_total", (model,), times.prompt_tokens
    yield "generation_tokens_total", (model,), times.output_tokens
    yield "time_to_first_token_seconds", (model,), times.ttft
    yield "inter_token_latency_seconds", (model,), times.itl
    yield "e2e_request_latency_seconds", (model,), times.e2e
    yield "request_time_per_output_token_seconds", (model,), times.per_token
    yield "request_prompt_tokens", (model,), times.prompt
    yield "request_generation_tokens", (model,), times.generation
