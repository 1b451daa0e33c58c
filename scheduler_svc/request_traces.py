"""What the scheduler reports about single requests: debug log lines for their start and end, and spans of sampled
requests, made from the times at which the step loop acts.

schedule                              from the Submit to the end of the last sample
  queue | prefill | decode            of each sample
  move                                from the loss of a row (worker lost or drained, row failed or preempted) to
                                      the next row
row                                   made by each worker that runs the sample
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_svc.core.messages import Finished
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup
from step_protocol.messages import StepBatch

if TYPE_CHECKING:
    from svc_common.observe.otlp import Attributes, OpenSpan, Tracer

log = logging.getLogger(__name__)


def log_queued(group: SequenceGroup) -> None:
    """Log that a request was queued."""
    facts = {
        "request_id": group.request_id,
        "prompt_tokens": len(group.prompt),
        "max_tokens": group.stop.max_tokens,
        "samples": group.n,
        "takes_over": group.takes_over,
    }
    log.debug("request %s is queued: %d prompt tokens", group.request_id, len(group.prompt), extra=facts)


def log_finished(finished: Finished, now: float) -> None:
    """Log that a sample of a request has ended."""
    group = finished.group
    facts = {
        "request_id": group.request_id,
        "sample": finished.sample_index,
        "reason": finished.reason.value,
        "output_tokens": finished.num_output_tokens,
        "cached_tokens": finished.num_cached_tokens,
        "preemptions": finished.num_preemptions,
        "seconds": round(now - group.arrival, 4),
    }
    log.debug(
        "request %s: sample %d ended (%s) with %d tokens after %.3f s",
        group.request_id,
        finished.sample_index,
        finished.reason.value,
        finished.num_output_tokens,
        now - group.arrival,
        extra=facts,
    )


FirstTokenAt = Callable[[int, int, int], float | None]


@dataclass(slots=True)
class SampleTrace:
    """One sample: its rows so far."""

    opened_at: float | None = None  # first row
    worker_id: str = ""  # of the newest row
    lost_at: float | None = None  # while it waits for a row again


@dataclass(slots=True)
class GroupTrace:
    """One request with its open span."""

    span: OpenSpan
    group: SequenceGroup
    samples: dict[int, SampleTrace] = field(default_factory=dict)

    def sample(self, index: int) -> SampleTrace:
        found = self.samples.get(index)
        if found is None:
            found = self.samples[index] = SampleTrace()
        return found


class RequestTraces:
    """Owns the spans of open requests that are sampled. Called by the step loop, with its times."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, GroupTrace] = {}  # by id(group)

    @property
    def is_active(self) -> bool:
        """Whether a request is traced now."""
        return bool(self._open)

    def begin(self, group: SequenceGroup, now: float) -> None:
        """A request has arrived. If it is sampled, its rows become children of its new span."""
        if not group.traceparent:
            return
        facts: Attributes = {
            "quire.request_id": group.request_id,
            "quire.prompt_tokens": len(group.prompt),
            "quire.samples": group.n,
            "quire.takes_over": group.takes_over,
        }
        span = self._tracer.begin("schedule", parent=group.traceparent, at=now, attributes=facts, is_served=True)
        group.traceparent = span.traceparent
        self._open[id(group)] = GroupTrace(span, group)

    def refuse(self, group: SequenceGroup, code: str, now: float) -> None:
        """The request was refused with this status code."""
        if (trace := self._open.pop(id(group), None)) is not None:
            trace.span.end(now, error=code)

    def record_moves(self, requeued: Iterable[Sequence], now: float) -> None:
        """Sequences lost their row."""
        for sequence in requeued:
            if (trace := self._open.get(id(sequence.group))) is not None:
                sample = trace.sample(sequence.sample_index)
                sample.lost_at = now if sample.lost_at is None else sample.lost_at

    def record_steps(self, batches: Iterable[StepBatch], now: float) -> None:
        """Rows were opened."""
        for batch in batches:
            for row_open in batch.opens:
                trace = self._open.get(id(row_open.group))
                if trace is not None:
                    self._record_opened(trace, row_open.sample_index, batch.worker_id, now)

    def _record_opened(self, trace: GroupTrace, sample_index: int, worker_id: str, now: float) -> None:
        sample = trace.sample(sample_index)
        if sample.opened_at is None:
            sample.opened_at = now
        if sample.lost_at is not None:
            self._add_move(trace, sample_index, now, worker_id)
        sample.worker_id = worker_id

    def _add_move(self, trace: GroupTrace, sample_index: int, now: float, worker_id: str) -> None:
        sample = trace.sample(sample_index)
        if sample.lost_at is None:
            return
        reasons = [seq.requeue_reason for seq in trace.group.sequences if seq.sample_index == sample_index]
        facts: Attributes = {
            "quire.sample": sample_index,
            "quire.reason": reasons[0] if reasons else "",
            "quire.from_worker": sample.worker_id,
            "quire.to_worker": worker_id,
        }
        error = "" if worker_id else "ended"
        self._tracer.add(
            "move", parent=trace.span.traceparent, start=sample.lost_at, end=now, attributes=facts, error=error
        )
        sample.lost_at = None

    def record_ends(self, finished: Iterable[Finished], first_token_at: FirstTokenAt, now: float) -> None:
        """Samples have ended. `first_token_at(owner, handle, sample)`: when an update before this one had its token."""
        for end in finished:
            trace = self._open.get(id(end.group))
            if trace is not None:
                group = end.group
                self._add_sample(trace, end, first_token_at(group.owner, group.handle, end.sample_index), now)
                if all(sequence.is_finished for sequence in group.sequences):
                    self._end(trace, end.reason, now)

    def _end(self, trace: GroupTrace, reason: FinishReason, now: float) -> None:
        error = reason.value if reason is FinishReason.ERROR else ""
        trace.span.end(now, {"quire.finish_reason": reason.value}, error)
        del self._open[id(trace.group)]

    def _add_sample(self, trace: GroupTrace, end: Finished, first_token_at: float | None, now: float) -> None:
        sample = trace.sample(end.sample_index)
        self._add_move(trace, end.sample_index, now, "")
        error = end.reason.value if end.reason is FinishReason.ERROR else ""
        opened_at = sample.opened_at
        if opened_at is None:
            self._add_stage(trace, "queue", end, trace.group.arrival, now, error)
            return
        self._add_stage(trace, "queue", end, trace.group.arrival, opened_at)
        if first_token_at is None and (error or not end.num_output_tokens):
            self._add_stage(trace, "prefill", end, opened_at, now, error)
            return
        first_token_at = now if first_token_at is None else first_token_at
        self._add_stage(trace, "prefill", end, opened_at, first_token_at)
        self._add_stage(trace, "decode", end, first_token_at, now, error)

    def _add_stage(
        self, trace: GroupTrace, name: str, end: Finished, start: float, stop: float, error: str = ""
    ) -> None:
        facts: dict[str, int | str] = {"quire.sample": end.sample_index}
        if name == "prefill":
            facts["quire.cached_tokens"] = end.num_cached_tokens
        if name == "decode":
            facts["quire.output_tokens"] = end.num_output_tokens
            facts["quire.recomputed_tokens"] = end.num_recomputed_tokens
        self._tracer.add(name, parent=trace.span.traceparent, start=start, end=stop, attributes=facts, error=error)
