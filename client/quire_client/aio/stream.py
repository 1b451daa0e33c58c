"""The calls of one client, and the stream of one request: reads its events and resumes it when it breaks."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from quire.v1 import inference_pb2 as pb

from quire_client.aio.transport import AsyncGateways, BoundedEvent, Call, Gateway, in_thread, read_event, sleep
from quire_client.aio.turn_log import AsyncTurnLog
from quire_client.assembly import assembler_of
from quire_client.connection.channel import Metadata
from quire_client.errors import (
    AlreadyExists,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    QuireError,
    StreamEndedEarly,
    client_closed,
    gateway_hangs,
)
from quire_client.retry import (
    CONNECT_RETRY,
    RETRY_TAKEN_S,
    AsyncStallWatch,
    Deadline,
    ResumePolicy,
    Resumption,
    RetryPolicy,
    gave_up,
    log,
    probe_timeout_s,
)
from quire_client.types import Delta, GenerateResult, Sample

T = TypeVar("T")


class AsyncCalls:
    """The calls of one client."""

    def __init__(
        self,
        openers: Sequence[Callable[[], grpc.aio.Channel]],
        metadata: Metadata,
        retry: RetryPolicy,
        explain: Callable[[QuireError], QuireError],
    ) -> None:
        self.gateways = AsyncGateways(openers, metadata)
        self._explain = explain  # adds the cause if no gateway was ever reached; blocks
        self._was_reached = False
        self.ring = self.gateways.ring
        self.watch = AsyncStallWatch(self.ring, self.gateways.probe)
        self.rng = random.Random()
        self._retry = retry

    async def close(self) -> None:
        self.watch.close()
        await self.gateways.close()

    async def wait_until_reachable(self, connect_timeout_s: float) -> None:
        """Return as soon as one gateway answers. If none answers, raises the error of one of them."""
        deadline = Deadline(connect_timeout_s)
        num_attempts = 0
        while True:
            error = await self.gateways.first_answer(probe_timeout_s(deadline))
            if error is None:
                self._was_reached = True
                return
            num_attempts += 1
            delay_s = CONNECT_RETRY.delay_s(error, num_attempts, deadline.remaining_s(), self.rng)
            if delay_s is None:
                raise await self._explained(error)
            await sleep(delay_s)

    async def unary(
        self,
        method: Callable[[Gateway], Callable[..., Awaitable[T]]],
        request: Any,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> T:
        """A unary call with retries; `timeout_s` limits all attempts together."""
        deadline = Deadline(timeout_s)

        async def attempt(target: int) -> T:
            return await self.gateways.unary(target, method, request, deadline.remaining_s(), metadata)

        return await self.retrying(attempt, deadline)

    async def retrying(
        self,
        attempt: Callable[[int], Awaitable[T]],
        deadline: Deadline,
        wait: Callable[[float], Awaitable[object]] = sleep,
    ) -> T:
        """Try one gateway after the other: without delay while one works, then with the delays of the retry policy."""
        num_attempts = num_moves = 0
        while True:
            target = self.ring.next(time.monotonic())
            try:
                result = await attempt(target)
                self.ring.works(target, time.monotonic())
                self._was_reached = True
                return result
            except QuireError as quire_error:
                error = quire_error
            now = time.monotonic()
            if isinstance(error, ConnectionFailed):
                self.gateways.leave(target, now)
                num_moves += 1
                if num_moves % len(self.ring) and self.ring.has_working(now):
                    continue
            num_attempts += 1
            delay_s = self._retry.delay_s(error, num_attempts, deadline.remaining_s(), self.rng)
            if delay_s is None:
                raise await self._explained(error)
            log.info("attempt %d failed (%s); retrying in %.2f s", num_attempts, error.message, delay_s)
            await wait(delay_s)

    async def _explained(self, error: QuireError) -> QuireError:
        """Add the cause to the error of a call if no gateway was ever reached."""
        if self._was_reached or not isinstance(error, ConnectionFailed | DeadlineExceeded):
            return error
        return await in_thread(partial(self._explain, error))


NOT_OPEN = "the stream is not open: use it as `async with client.stream(...) as stream:`"


class AsyncGenerateStream:
    """The output of one request as it is generated: a context manager and an iterator of Deltas.

    Entering it waits until the server has accepted the request and so sets `request_id`, `seed`, `model` and
    `num_prompt_tokens`. Leaving it cancels the request. `resumes` counts how often the stream broke and was resumed.
    """

    def __init__(
        self,
        calls: AsyncCalls,
        request: pb.GenerateRequest | pb.ResumeRequest,
        timeout_s: float | None,
        policy: ResumePolicy,
        metadata: Metadata = (),
        turn_log: AsyncTurnLog | None = None,
    ) -> None:
        self._calls = calls
        self._turn_log = turn_log
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._deadline = Deadline(None)
        self._policy = policy
        self.assembler = assembler_of(request, can_resume=policy.is_on)
        self._resumption = Resumption(policy, calls.rng)
        self._call: Call | None = None
        self._following: deque[pb.GenerateResponse] = deque()  # events of the last message that are not read yet
        self._result: GenerateResult | None = None
        self._is_cancelled = BoundedEvent()
        self._was_sent = False
        self._is_lost = False
        self.target = 0  # the gateway in use: its index in the list of targets
        self.waiting_since: float | None = None
        self.stall_timeout_s = policy.stall_timeout_s

    async def __aenter__(self) -> Self:
        self._deadline = Deadline(self._timeout_s)
        self._calls.watch.add(self)
        try:
            await self._calls.retrying(self._open, self._deadline, self._is_cancelled.wait_for)
        except BaseException:
            self._calls.watch.discard(self)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._calls.watch.discard(self)
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._result is None:
            delta = await self._advance()
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def events(self) -> AsyncIterator[Delta | Sample]:
        """The output as Deltas, and each complete Sample (finish reason, usage) after its last Delta.

        async for event in stream.events():
            match event:
                case Delta(text=text): ...
                case Sample(finish_reason=reason, usage=usage): ...
        """
        num_shown = 0
        while True:
            delta = None if self._result is not None else await self._advance()
            if delta is not None:
                yield delta
            ended = self.assembler.ended_samples
            while num_shown < len(ended):
                yield ended[num_shown]
                num_shown += 1
            if self._result is not None:
                return

    @property
    def is_accepted(self) -> bool:
        """Whether the server has accepted the request."""
        return self.assembler.accepted is not None

    @property
    def request_id(self) -> str:
        """The id of the request, for `abort` and logs."""
        return self._accepted.request_id

    @property
    def seed(self) -> int:
        """The seed in use; if the request has none, it follows from `request_id`."""
        return self._accepted.seed

    @property
    def model(self) -> str:
        """The model that answers."""
        return self._accepted.model

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self._accepted.prompt_tokens

    @property
    def num_samples(self) -> int:
        """Number of samples of the answer."""
        return self.assembler.num_samples

    @property
    def resumes(self) -> int:
        """Number of times that the stream broke and was resumed."""
        return self.assembler.num_resumes

    @property
    def finished_samples(self) -> tuple[Sample, ...]:
        """Samples that are complete already."""
        return self.assembler.finished_samples

    async def result(self) -> GenerateResult:
        """The whole request; reads the rest of the stream first."""
        while self._result is None:
            await self._advance()
        return self._result

    def cancel(self) -> None:
        """End the request on the server and free its blocks. Safe to call after the end."""
        self._is_cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def lose(self) -> None:
        """Abandon the current gateway because it hangs. Called by the client's stall watch."""
        self._is_lost = True
        if self._call is not None:
            self._call.cancel()

    @property
    def _accepted(self) -> pb.Accepted:
        if self.assembler.accepted is None:
            raise RuntimeError(NOT_OPEN)
        return self.assembler.accepted

    async def _open(self, target: int) -> None:
        """Send the request, or its continuation after a break, and wait until it is accepted."""
        self._check_wanted()
        is_repeated, self._was_sent = self._was_sent, True
        request = self.assembler.next_request(is_repeated=is_repeated)
        self.target, self._is_lost = target, False
        self._following.clear()
        self._call = call = self._calls.gateways.open_stream(
            target, request, self._deadline.remaining_s(), self._metadata
        )
        if self._is_cancelled.is_set():
            call.cancel()
        try:
            self._feed(await self._next_event(call))
        except AlreadyExists as error:
            error.retry_after_s = RETRY_TAKEN_S if is_repeated else None
            raise
        except BaseException:
            call.cancel()
            raise

    async def _advance(self) -> Delta | None:
        if self._call is None:
            raise RuntimeError(NOT_OPEN)
        try:
            event = await self._next_event(self._call)
        except QuireError as error:
            if not self.assembler.is_complete:
                await self._resume_after(error)
                return None
            event = None  # the break came after the last event
        if event is not None:
            return self._feed(event)
        self._result = self.assembler.result()
        if self._turn_log is not None:
            await self._turn_log.add(self.assembler)
        return None

    async def _resume_after(self, error: QuireError) -> None:
        """Try one gateway after the other until one accepts the continuation. Raises the error if none does."""
        ring, resumption = self._calls.ring, self._resumption
        resumption.broke(time.monotonic(), made_progress=self.assembler.made_progress)
        while True:
            now = time.monotonic()
            if isinstance(error, ConnectionFailed | StreamEndedEarly):
                self._calls.gateways.leave(self.target, now)
            remaining_s = self._deadline.remaining_s()
            delay_s = resumption.delay_s(error, now, remaining_s, has_working=ring.has_working(now))
            if delay_s is None:
                error.partial = self.assembler.partial()
                raise gave_up(error, self._policy)
            log.warning("the stream of request %s broke (%s); resuming", self.assembler.request_id, error.message)
            await self._is_cancelled.wait_for(delay_s)
            try:
                await self._open(ring.next(time.monotonic()))
                break
            except QuireError as next_error:
                error = next_error
        log.info("resumed request %s", self.assembler.request_id)
        resumption.accepted(time.monotonic())
        ring.works(self.target, time.monotonic())

    async def _next_event(self, call: Call) -> pb.GenerateResponse | None:
        """The next event; None at the end of a complete stream. Raises StreamEndedEarly at any other end."""
        if self._following:
            return self._following.popleft()
        self.waiting_since = time.monotonic()
        try:
            event = await read_event(call, self.assembler.request_id)
        except QuireError as error:
            if self._is_lost and not self._is_cancelled.is_set():
                raise gateway_hangs(self.stall_timeout_s, self.assembler.request_id) from None
            raise error from None
        finally:
            self.waiting_since = None
        if event is None and not self.assembler.is_complete:
            raise self.assembler.ended_early()
        if event is not None and event.following:
            self._following.extend(event.following)
        return event

    def _feed(self, event: pb.GenerateResponse | None) -> Delta | None:
        try:
            return None if event is None else self.assembler.feed(event)
        except QuireError as error:
            error.partial = self.assembler.partial()
            self.cancel()
            raise

    def _check_wanted(self) -> None:
        if self._calls.gateways.is_closed:
            raise client_closed()
        if self._is_cancelled.is_set():
            raise Cancelled("the stream was cancelled", request_id=self.assembler.request_id)
