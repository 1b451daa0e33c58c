"""Measures requests: latencies and tokens as clients see them. `gateway_svc/metrics.py` exports the figures."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.v1 import types_pb2 as types

from svc_common.observe.metrics import LATENCIES_S, TOKEN_COUNTS, Buckets

log = logging.getLogger(__name__)

http_request_id: ContextVar[str] = ContextVar("http_request_id", default="")  # x-request-id of the HTTP request

REASONS = {value: name.removeprefix("FINISH_REASON_").lower() for name, value in types.FinishReason.items()}
FAILED = (types.FINISH_REASON_ERROR, types.FINISH_REASON_UNSPECIFIED)


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
        self.processor_s = 0.0
        self.block_s = 0.0
        self.finish_reason = ""  # reason of the last sample that ended
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

    def on_finished(self, reason: types.FinishReason.ValueType, usage: types.Usage | None = None) -> None:
        """One sample has ended, with this usage."""
        self._reason = self.finish_reason = REASONS[reason]
        if usage is not None:
            self.num_cached_tokens += usage.cached_tokens
            self.processor_s += usage.processor_seconds
            self.block_s += usage.block_seconds

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
        x_request_id = http_request_id.get()
        first_s = None if self.first_token_at is None else self.first_token_at - self._started_at
        log.info(
            "request %s ended (%s): %d prompt tokens, %d output tokens, %.3f s%s",
            self._request_id,
            reason,
            self.num_prompt_tokens,
            self.num_output_tokens,
            total_s,
            x_request_id and f", x-request-id {x_request_id}",
            extra={
                "request_id": self._request_id,
                **({"x_request_id": x_request_id} if x_request_id else {}),
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

    def on_drop(self, model: str) -> None:
        """Count a copy of a request that was not sent to its shadow."""
        self.models.setdefault(model, ModelTimes()).ends["dropped"] += 1
