"""The Generate, Resume, Embed and Score calls in progress, their limits and their early ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from quire.internal.v1 import inputs_pb2

from gateway_svc.answer.request_meter import GatewayMetrics, RequestMeter
from gateway_svc.callers.caller import record_generation, scoped
from gateway_svc.request.threads import RETRY_FULL_S
from gateway_svc.schedulers.scheduler_request import SchedulerRequest
from svc_common.errors import AlreadyExistsError, OverloadedError, ServiceError, TakenOverError, UnavailableError
from svc_common.observe.logs import current_request_id

log = logging.getLogger(__name__)

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
