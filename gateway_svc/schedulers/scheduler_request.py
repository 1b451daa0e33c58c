"""One request to a scheduler: the journal of its output, which survives the loss of the scheduler.

Tokens are appended to the journal of their sample, and the handler reads it with its own cursor. So a client that does
not read uses memory for at most max_tokens, and later gets all pending tokens as one chunk.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from typing import Protocol

from quire.internal.v1 import scheduler_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.schedulers.logprobs import LogprobJournal, PromptLogprobJournal, TokenLogprobs, extras_of
from gateway_svc.schedulers.wire import continuation_from_outputs
from svc_common.errors import ServiceError

log = logging.getLogger(__name__)

MAX_DEADLINE_MS = 2**32 - 1  # 49 days; a later deadline is not sent
CANCEL_PATIENCE_S = 5.0  # longest wait for a scheduler's answer to a cancel


class RequestOwner(Protocol):
    """Knows which scheduler has the request."""

    def cancel(self, request: SchedulerRequest, sample_index: int | None, reason: types.FinishReason.ValueType) -> bool:
        """Send a cancel to the scheduler. False if no scheduler has the request: no answer will come."""

    def release(self, request: SchedulerRequest) -> None:
        """The handler has ended: cancel the running samples and deliver nothing more."""


class Trace(Protocol):
    """Notes the moves of a request that is sampled for traces."""

    @property
    def traceparent(self) -> str: ...
    def on_detached(self) -> None: ...
    def on_accepted(self) -> None: ...


class Pacer(Protocol):
    """Decides when handlers wake up for new tokens (submitter.py)."""

    def wake(self, handler: SchedulerRequest) -> None: ...
    def begin_interval(self) -> None: ...


class SampleJournal:
    """One sample: its whole output so far, and how it ended. `logprobs`: those of tokens that the handler has not read;
    None if not requested.
    """

    __slots__ = ("finish", "is_closed", "logprobs", "num_given", "outputs", "versions")

    def __init__(self, outputs: array[int], logprobs: LogprobJournal | None = None) -> None:
        self.outputs = outputs
        self.logprobs = logprobs
        self.finish: pb.SampleFinished | None = None
        self.is_closed = False  # a stop string matched: later tokens, and what `finish` says of them, are no output
        self.num_given = len(outputs)  # tokens that the client already had
        # The weights from each of these output positions on. Empty: the checkpoint's.
        self.versions: list[tuple[int, pb.WeightsChange]] = []

    def note_weights(self, change: pb.WeightsChange, base: pb.WeightsChange | None) -> None:
        """The next tokens are computed by these weights. `base` computed the tokens so far, if nothing is noted."""
        start, versions = len(self.outputs), self.versions
        if not versions and base is not None:
            versions.append((self.num_given, base))
        if versions and versions[-1][1].weights.revision == change.weights.revision:
            return
        if versions and versions[-1][0] == start:
            versions.pop()
            if versions and versions[-1][1].weights.revision == change.weights.revision:
                return
        versions.append((start, change))

    def spans(self, num_output: int) -> list[types.WeightVersionSpan]:
        """The weights that computed the first output tokens. Empty: the checkpoint's computed all of them."""
        if all(not change.weights.version for _, change in self.versions):
            return []
        ends = [start for start, _ in self.versions[1:]] + [num_output]
        pairs = zip(self.versions, ends, strict=True)
        spans = [(start, min(end, num_output), change) for (start, change), end in pairs]
        return [
            types.WeightVersionSpan(
                weights=change.weights, start=start, end=end, keeps_kv=change.keeps_kv and start > 0
            )
            for start, end, change in spans
            if start < end
        ]


class SchedulerRequest:
    """The handler awaits `wait_accepted` once, then `wait` repeatedly, and calls `release` at the end.

    The scheduler client delivers tokens and finished samples. Both waits raise failures: a refusal, no scheduler in
    time, an internal error. `resumes`: the client resumes a request after it lost the stream. `deadline`: the client's
    deadline on the loop's clock. `pacer` decides when the handler wakes up for new tokens; None: at once.
    """

    def __init__(
        self,
        submit: pb.Submit,
        outputs: Sequence[array[int]],
        finished: Sequence[bool],
        *,
        resumes: bool = False,
        deadline: float | None = None,
        pacer: Pacer | None = None,
        num_prompt_logprobs: int = 0,
    ) -> None:
        self.samples = [SampleJournal(output[:], _logprob_journal(submit)) for output in outputs]
        self.prompt_logprobs: PromptLogprobJournal | None = None
        if submit.HasField("prompt_logprobs"):
            self.prompt_logprobs = PromptLogprobJournal(
                submit.prompt_logprobs, num_prompt_logprobs, extras_of(submit.sampling)
            )
        for index, sample in enumerate(self.samples):
            if finished[index]:
                sample.finish = pb.SampleFinished(sample_index=index)
        self._num_unfinished = len(outputs) - sum(finished)
        self._num_awaited = self._num_unfinished  # samples that are not finished and not closed
        self.pooled: array[float] | None = None  # the numbers of a pooled request
        self.handle: int | None = None  # while a scheduler has the request
        self.base_weights: pb.WeightsChange | None = None  # weights that computed its first tokens
        self.is_resumed = resumes  # a stream was lost: the next Submit takes over from it and may wait for a scheduler
        self._submit = submit
        self._trace: Trace | None = None
        self._deadline = deadline
        self._is_accepted = False
        self._is_aborted = False
        self._error: ServiceError | None = None
        self._pacer = pacer
        self._news: set[int] = set()  # samples with new tokens or a new end
        self.is_due = False  # the handler should read its news now: `wait` returns at once
        self._waiter: asyncio.Future[None] | None = None
        self._owner: RequestOwner | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def request_id(self) -> str:
        return self._submit.request_id

    @property
    def num_bytes(self) -> int:
        """Size of its message, without its output."""
        return self._submit.ByteSize()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._submit.prompt_token_ids) // 4

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of prompt tokens, and largest number of output tokens of one sample."""
        return self.num_prompt_tokens, self._submit.stop.max_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all samples so far. After a move, their KV is recomputed."""
        num_tokens = 0
        for sample in self.samples:
            num_tokens += len(sample.outputs)
        return num_tokens

    @property
    def is_finished(self) -> bool:
        """Every sample has ended."""
        return not self._num_unfinished

    @property
    def is_over(self) -> bool:
        """Nothing more is expected from a scheduler."""
        return not self._num_awaited or self._error is not None

    def set_trace(self, trace: Trace) -> None:
        """The request is sampled for traces, here and in the scheduler."""
        self._trace = trace
        self._submit.traceparent = trace.traceparent

    # -- called by the handler ----------------------------------------------------------------------------------------

    async def wait_accepted(self) -> None:
        """Wait until the request is queued. Raises the refusal."""
        while not self._is_accepted and self._error is None:
            await self._sleep()
        if self._error is not None:
            raise self._error

    async def wait(self) -> list[int]:
        """Wait until samples have new tokens or ended; returns their indices in order. Returns no index if only
        prompt tokens have new log probabilities. Raises a failure.
        """
        while not self.is_due and self._error is None:
            await self._sleep()
        if not self._has_news and self._error is not None:
            raise self._error
        self.is_due = False
        news = sorted(self._news)
        self._news.clear()
        return news

    def announce_output(self) -> None:
        """Wake the handler for output that the journals had from the start."""
        self._news.update(range(len(self.samples)))
        self.wake()

    def close_sample(self, index: int) -> None:
        """A stop string matched: cancel the sample. It ends with the scheduler's answer, which has the usage."""
        sample = self.samples[index]
        was_closed, sample.is_closed = sample.is_closed, True
        if not was_closed and sample.finish is None:
            self._num_awaited -= 1
            self._cancel_at_scheduler(index, types.FINISH_REASON_STOP)

    def abort(self) -> None:
        """End all samples with ABORTED, for the Abort RPC."""
        self._is_accepted = self._is_aborted = True
        self._wake()
        self._cancel_at_scheduler(None, types.FINISH_REASON_ABORTED)

    def release(self) -> None:
        """The handler has ended: cancel the running samples. May be called twice."""
        for timer in self._timers:
            timer.cancel()
        if self._owner is not None:
            self._owner.release(self)
        self._owner = None

    def _cancel_at_scheduler(self, index: int | None, reason: types.FinishReason.ValueType) -> None:
        indices = range(len(self.samples)) if index is None else (index,)
        if self._owner is None or not self._owner.cancel(self, index, reason):
            self._finish_here(indices, reason)
            return
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(CANCEL_PATIENCE_S, self._finish_here, indices, reason))

    def _finish_here(self, indices: Sequence[int], reason: types.FinishReason.ValueType) -> None:
        for index in indices:
            if self.samples[index].finish is None:
                self.on_finished(pb.SampleFinished(sample_index=index, reason=reason))

    # -- called by the scheduler client -------------------------------------------------------------------------------

    def attach(self, owner: RequestOwner) -> None:
        """Set the receiver of cancels."""
        self._owner = owner

    def next_submit(self, handle: int) -> pb.Submit:
        """The request with all output so far as its Continuation."""
        self.handle = handle
        self._submit.handle = handle
        self._submit.takes_over = self.is_resumed
        self._set_deadline()
        has_output = self.prompt_logprobs is not None or self._num_unfinished < len(self.samples)
        if has_output or self.num_output_tokens:
            samples = ((s.outputs, s.is_closed or s.finish is not None) for s in self.samples)
            num_prompt_logprobs = 0 if self.prompt_logprobs is None else self.prompt_logprobs.num_received
            self._submit.continuation.CopyFrom(continuation_from_outputs(samples, num_prompt_logprobs))
        return self._submit

    def _set_deadline(self) -> None:
        """Set the time left until the client's deadline. A resumed request gets no deadline: a scheduler must not
        refuse it.
        """
        self._submit.ClearField("deadline_ms")
        if self._deadline is None or self.is_resumed:
            return
        left_ms = round(1000 * (self._deadline - asyncio.get_running_loop().time()))
        if left_ms <= MAX_DEADLINE_MS:
            self._submit.deadline_ms = max(0, left_ms)

    def on_detached(self) -> None:
        """The request left its scheduler: finish the samples whose cancel has no answer yet."""
        self.handle = None
        self.is_resumed = True
        if self._trace is not None:
            self._trace.on_detached()
        if self._is_aborted:  # the cancel was lost with the stream, and no other scheduler may start the request
            self._finish_here(range(len(self.samples)), types.FINISH_REASON_ABORTED)
        closed = [i for i, s in enumerate(self.samples) if s.is_closed and s.finish is None]
        self._finish_here(closed, types.FINISH_REASON_STOP)

    def on_accepted(self) -> None:
        self._is_accepted = True
        if self._trace is not None:
            self._trace.on_accepted()
        self._wake()

    def on_tokens(
        self, sample_index: int, offset: int, token_ids: array[int], scored: TokenLogprobs | None = None
    ) -> None:
        """Append tokens from an output position on; `scored`: of a single token. Repeated tokens are dropped; a gap
        fails the request, and so do missing log probabilities.
        """
        if sample_index >= len(self.samples):
            self.fail(self._internal(f"the scheduler sent sample {sample_index}, but n is {len(self.samples)}"))
            return
        sample = self.samples[sample_index]
        if sample.is_closed or sample.finish is not None:
            return
        have = len(sample.outputs)
        if offset > have:
            self.fail(self._internal(f"the scheduler sent output position {offset}, expected {have}"))
            return
        if not (token_ids := token_ids[have - offset :]):
            return
        if self.prompt_logprobs is not None and self.prompt_logprobs.num_received < self.num_prompt_tokens:
            self.fail(self._internal("the scheduler sent a token before all prompt_logprobs"))
            return
        if sample.logprobs is not None and not sample.logprobs.append(scored):
            self.fail(self._internal(f"the scheduler sent no or too few log probabilities for output position {have}"))
            return
        sample.outputs.extend(token_ids)
        self._record_news(sample_index, is_urgent=not have)
        if not have and self._pacer is not None:
            self._pacer.begin_interval()

    def on_prompt_logprobs(self, position: int, scored: TokenLogprobs | None) -> None:
        """Append the log probabilities of a prompt token. A repeated position is dropped; a gap fails the request."""
        if self.prompt_logprobs is None:
            return
        problem = self.prompt_logprobs.append(position, scored)
        if problem is not None:
            self.fail(self._internal(problem))
        elif self._pacer is None:
            self.wake()
        else:
            self._pacer.wake(self)

    def on_weights(self, change: pb.WeightsChange) -> None:
        """The next tokens are computed by these weights."""
        for sample in self.samples:
            if sample.finish is None:
                sample.note_weights(change, self.base_weights)

    def on_pooled(self, numbers: array[float]) -> None:
        """The numbers of a pooled request. Its end follows."""
        if self.pooled is None:
            self.pooled = numbers

    def on_finished(self, finish: pb.SampleFinished) -> None:
        if finish.sample_index >= len(self.samples):
            self.fail(self._internal(f"the scheduler ended sample {finish.sample_index}, but n is {len(self.samples)}"))
            return
        sample = self.samples[finish.sample_index]
        if sample.finish is None and self._error is None:  # after an error the output is not complete
            sample.finish = finish
            self._num_unfinished -= 1
            self._num_awaited -= not sample.is_closed
            self._record_news(finish.sample_index, is_urgent=True)

    def fail(self, error: ServiceError) -> None:
        """End the stream with this error, after the tokens received so far."""
        if self._error is None:
            self._error = error
            self._wake()

    def _internal(self, problem: str) -> ServiceError:
        log.error("request %s: %s", self.request_id, problem)
        return ServiceError(f"internal error: {problem}")

    def _record_news(self, sample_index: int, *, is_urgent: bool) -> None:
        """Record that a sample has news. First tokens and ends are urgent and rare, so they skip the pacer."""
        self._news.add(sample_index)
        if self._pacer is None or is_urgent:
            self.is_due = True
            self._wake()
        else:
            self._pacer.wake(self)

    def wake(self) -> None:
        """Wake the handler if there is news."""
        self.is_due = self._has_news
        self._wake()

    @property
    def _has_news(self) -> bool:
        return bool(self._news) or (self.prompt_logprobs is not None and len(self.prompt_logprobs.pending) > 0)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _sleep(self) -> asyncio.Future[None]:
        """Done at the next `_wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


def _logprob_journal(submit: pb.Submit) -> LogprobJournal | None:
    return LogprobJournal(submit.logprobs, extras_of(submit.sampling)) if submit.HasField("logprobs") else None
