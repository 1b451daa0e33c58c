"""The Generate, Resume, Embed and Score calls in progress, their limits and their early ends; latencies and tokens of
each as clients see them. `gateway_svc/metrics.py` exports the figures.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.internal.v1 import inputs_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.callers.caller import record_generation, scoped
from gateway_svc.request.threads import RETRY_FULL_S
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from svc_common.errors import AlreadyExistsError, OverloadedError, ServiceError, TakenOverError, UnavailableError
from svc_common.observe.logs import current_request_id
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
        self.is_background = False  # its times do not count
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
        if self.is_background:
            self._first_at.setdefault(sample, now)
            return
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
        if not self.is_background:
            times.e2e.observe(now - self._started_at)
        times.prompt.observe(self.num_prompt_tokens)
        times.generation.observe(self.num_output_tokens)
        num_further = self.num_output_tokens - len(self._first_at)
        if num_further > 0 and not self.is_background:
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


RETRY_DRAINING_S = 1.0


class OpenStream:
    """One call in progress, until the `with` block of `OpenStreams.open` ends. It has no requests until its prompts are
    tokenized. `scoped_id` is the request id inside the services.
    """

    def __init__(
        self, streams: OpenStreams, request_id: str, scoped_id: str, num_bytes: int, meter: RequestMeter
    ) -> None:
        self._streams = streams
        self.request_id = request_id
        self.scoped_id = scoped_id
        self.num_bytes = num_bytes
        self.meter = meter
        self._requests: list[SchedulerRequest] = []
        self.is_aborted = False
        self._error: ServiceError | None = None

    def __enter__(self) -> OpenStream:
        current_request_id.set(self.scoped_id)
        record_generation(self.request_id, self.meter)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for request in self._requests:
            request.release()
        self.meter.__exit__(kind)
        self._streams.close(self)

    def add_inputs(self, inputs: Sequence[inputs_pb2.CarriedInput]) -> None:
        """Count the inputs of its prompt, which are kept as long as the stream is open."""
        self._streams.add_bytes(self, sum(len(carried.data) for carried in inputs))

    def set_request(self, request: SchedulerRequest) -> None:
        """Attach a request of the call. Raises the error of `end` if that was called before."""
        if self._error is not None:
            raise self._error
        self._requests.append(request)
        if self.is_aborted:
            request.abort()

    def end(self, error: ServiceError) -> None:
        """Cancel the requests now, and end the stream with this error after the tokens received so far."""
        self._error = error
        for request in self._requests:
            request.fail(error)
            request.release()

    def abort(self) -> None:
        """End the stream with ABORTED."""
        self.is_aborted = True
        for request in self._requests:
            request.abort()


class OpenStreams:
    """Owns the calls in progress of this gateway."""

    def __init__(self, max_streams: int, max_bytes: int, metrics: GatewayMetrics | None = None) -> None:
        self.metrics = metrics or GatewayMetrics()
        self.max_streams = max_streams
        self.num_bytes = 0  # sum over all requests
        self._max_bytes = max_bytes
        self._by_id: dict[str, OpenStream] = {}
        self._is_draining = False
        self._all_closed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(
        self, request_id: str, num_bytes: int, model: str, *, resumes: bool = False, kind: str = "gen"
    ) -> OpenStream:
        """A call in progress, as a context manager. Raises if the gateway drains or is full, or the id is in use.

        `kind` begins the id of a request without one.
        """
        self.check_room(num_bytes)
        request_id = request_id or f"{kind}-{secrets.token_hex(12)}"
        scoped_id = scoped(request_id)
        self._end_former(request_id, scoped_id, resumes=resumes)
        meter = self.metrics.request(scoped_id, model)
        stream = self._by_id[scoped_id] = OpenStream(self, request_id, scoped_id, num_bytes, meter)
        self.num_bytes += num_bytes
        return stream

    def add_bytes(self, stream: OpenStream, num_bytes: int) -> None:
        """Count further bytes that are kept as long as the stream is open."""
        self._check_bytes(num_bytes)
        stream.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def close(self, stream: OpenStream) -> None:
        """The call has ended."""
        self.num_bytes -= stream.num_bytes
        if self._by_id.get(stream.scoped_id) is stream:  # else a resumed stream has taken over
            del self._by_id[stream.scoped_id]
        if not self._by_id:
            self._all_closed.set()

    def abort(self, scoped_id: str) -> bool:
        """End a call with ABORTED. False if it is not open here."""
        stream = self._by_id.get(scoped_id)
        if stream is not None:
            stream.abort()
        return stream is not None

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls and wait for the open ones. Those still open after `timeout_s` end with UNAVAILABLE."""
        self._is_draining = True
        self._all_closed.clear()
        if not self._by_id:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            log.warning("ending %d streams that are still open after %g s", len(self._by_id), timeout_s)
            self.end_all()

    def end_all(self) -> None:
        """End all calls with UNAVAILABLE."""
        for stream in list(self._by_id.values()):
            stream.end(UnavailableError("this gateway is shutting down; resume on another gateway"))

    def check_room(self, num_bytes: int = 0, num_calls: int = 1) -> None:
        """Raise if this many further calls would be refused."""
        if self._is_draining:
            raise UnavailableError(
                "this gateway is shutting down; retry on another gateway", retry_after_s=RETRY_DRAINING_S
            )
        if len(self._by_id) + num_calls > self.max_streams:
            raise OverloadedError(
                f"{len(self._by_id)} streams are open on this gateway and this request needs {num_calls} more; the "
                f"limit is {self.max_streams} (--max-streams); retry later",
                retry_after_s=RETRY_FULL_S,
            )
        self._check_bytes(num_bytes)

    def _check_bytes(self, num_bytes: int) -> None:
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"open requests on this gateway hold {self.num_bytes} bytes and this one has {num_bytes}; "
                f"the limit is {self._max_bytes} (--max-request-bytes); retry later",
                retry_after_s=RETRY_FULL_S,
            )

    def _end_former(self, request_id: str, scoped_id: str, *, resumes: bool) -> None:
        """End the former stream of a request that its client resumes. It may still be open on this gateway."""
        former = self._by_id.get(scoped_id)
        if former is None:
            return
        if not resumes:
            words = f"request_id {request_id!r} is in use on this gateway; choose another or wait for that request"
            raise AlreadyExistsError(words, field="request_id")
        log.info("request %s was resumed in another stream", request_id)
        former.end(TakenOverError(f"request_id {request_id!r} was resumed in another stream"))
