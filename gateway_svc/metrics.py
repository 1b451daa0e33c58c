"""Metrics of the gateway: latencies and tokens as clients see them, and the schedulers behind the gateway."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

from gateway_svc.answer.open_streams import GatewayMetrics, ModelTimes, OpenStreams
from gateway_svc.operators.audit import AuditLog
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.schedulers.scheduler_client import SchedulerClient
from prefix_index.reader import RedisPrefixReader
from svc_common.observe.metrics import Row, Spec

MODEL = ("model_name",)
SCHEDULER_STATES = ("ready", "attached", "away")


def _latency(name: str, meaning: str, *vllm: str) -> Spec:
    return Spec(name, "histogram", meaning, "seconds", MODEL, (name, *vllm))


SPECS = (
    Spec(
        "requests_total", "counter",
        "generations that ended, by finish reason (for n > 1, the reason of the last sample); cancelled: by the "
        "client; failed: ended with an error status; dropped: copies for a shadow that found no room", "",
        ("model_name", "finished_reason"), ("request_success_total",),
    ),
    Spec("requests_resumed_total", "counter", "accepted generations that resumed with a continuation", "", MODEL),
    Spec(
        "request_moves_total", "counter", "number of times that an open request lost its scheduler and was resubmitted"
    ),
    Spec("prompt_tokens_total", "counter", "tokens of accepted prompts", "tokens", MODEL, ("prompt_tokens_total",)),
    Spec(
        "generation_tokens_total", "counter", "output tokens sent to clients", "tokens", MODEL,
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
        "request_generation_tokens", "histogram", "output tokens of a request, all samples together", "tokens", MODEL,
        ("request_generation_tokens",),
    ),
    Spec("gateway_streams", "gauge", "open generations"),
    Spec("gateway_streams_limit", "gauge", "limit of open generations (--max-streams)"),
    Spec("gateway_request_bytes", "gauge", "size of all open requests", "bytes"),
    Spec("gateway_schedulers", "gauge", "schedulers by state: ready, attached (no model yet), away", "", ("state",)),
    Spec("gateway_revisions", "gauge", "revisions of the model with ready workers; normally 1", "", MODEL),
    Spec(
        "gateway_unready_requests_total", "counter",
        "requests that arrived while their model was not ready; no name: for models that are not served, while a "
        "scheduler has no model yet", "", MODEL,
    ),
    Spec("gateway_ready_workers", "gauge", "ready workers of all schedulers", "", MODEL),
    Spec(
        "gateway_requests_waiting", "gauge", "sequences in the queues of all schedulers, by their heartbeats", "", MODEL
    ),
    Spec("gateway_requests_running", "gauge", "sequences running on all workers, by the same heartbeats", "", MODEL),
    Spec(
        "gateway_kv_cache_usage_perc", "gauge",
        "fraction of the blocks of the workers of the fullest scheduler that sequences use, 0 to 1", "", MODEL,
    ),
    Spec(
        "audit_lost_lines_total", "counter",
        "lines of the audit log that were dropped because it could not be written; absent without --audit-log",
    ),
    Spec("redis_up", "gauge", "1 if the last call to Redis succeeded; absent without --redis"),
    Spec("redis_errors_total", "counter", "failed calls to Redis; absent without --redis"),
)  # fmt: skip

# The endpoint picker of an InferencePool asks the pods that serve requests, so gateways answer for their schedulers.
PICKED = {
    "gateway_requests_waiting": ("num_requests_waiting",),
    "gateway_requests_running": ("num_requests_running",),
    "gateway_kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}


def specs_for_picker() -> tuple[Spec, ...]:
    """SPECS with the names that an endpoint picker reads."""
    return tuple(dataclasses.replace(spec, vllm=PICKED.get(spec.name, spec.vllm)) for spec in SPECS)


class GatewayReader:
    """The current values of all SPECS."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        streams: OpenStreams,
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
            yield "gateway_revisions", (model.name,), len(self._directory.revisions(model.name))
            yield "gateway_ready_workers", (model.name,), num_workers
            yield from self._queue_rows(model.name)
        for name, count in self._directory.unready.items():
            yield "gateway_unready_requests_total", (name,), count
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
