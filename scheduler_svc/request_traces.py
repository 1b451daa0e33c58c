"""Reports about single requests: debug log lines for their start and end, the stages of open requests and of those that
ended last, and spans of sampled requests. All are made from the times at which the step loop acts.

schedule                              from the Submit to the end of the last sample
  queue | prefill | decode            of each sample
  move                                from the loss of a row (worker lost or drained, row failed or preempted) to
                                      the next row
row                                   made by each worker that runs the sample
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.internal.v1.scheduler_pb2 import RequestStage, RequestTimeline

from scheduler_svc.core.messages import Finished
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.history import MAX_ENDED, MAX_STAGES
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


def _stage(index: int, name: str, start: float, end: float, worker_id: str, reason: str = "") -> RequestStage:
    worker_id = "" if name == "queue" else worker_id
    return RequestStage(name=name, sample_index=index, start=start, end=end, worker_id=worker_id, reason=reason)


FirstTokenAt = Callable[[int, int, int], float | None]


@dataclass(slots=True)
class SampleTrace:
    """One sample: its rows so far."""

    opened_at: float | None = None  # first row
    worker_id: str = ""  # of the newest row
    lost_at: float | None = None  # while it waits for a row again


@dataclass(slots=True)
class GroupTrace:
    """One open request, with its span if it is sampled."""

    group: SequenceGroup
    span: OpenSpan | None = None
    stages: list[RequestStage] = field(default_factory=list)  # those that have ended
    num_output_tokens: int = 0  # of the samples that have ended
    samples: dict[int, SampleTrace] = field(default_factory=dict)

    def sample(self, index: int) -> SampleTrace:
        found = self.samples.get(index)
        if found is None:
            found = self.samples[index] = SampleTrace()
        return found

    def stages_of(
        self, index: int, first_token_at: float | None, now: float, *, has_output: bool
    ) -> list[tuple[str, float, float]]:
        """Name, start and end of the stages of a sample until now, without moves."""
        opened_at = self.sample(index).opened_at
        if opened_at is None:
            return [("queue", self.group.arrival, now)]
        queue = ("queue", self.group.arrival, opened_at)
        if first_token_at is None and not has_output:
            return [queue, ("prefill", opened_at, now)]
        first_token_at = now if first_token_at is None else first_token_at
        return [queue, ("prefill", opened_at, first_token_at), ("decode", first_token_at, now)]

    def record(self, reason: str, ended_at: float, stages: list[RequestStage]) -> RequestTimeline:
        group = self.group
        return RequestTimeline(
            request_id=group.request_id,
            tenant_id=group.tenant_id,
            trace_id=group.traceparent.split("-")[1] if group.traceparent else "",
            arrived_at=group.arrival,
            ended_at=ended_at,
            reason=reason,
            prompt_tokens=len(group.prompt),
            output_tokens=self.num_output_tokens,
            stages=stages[:MAX_STAGES],
        )


class RequestTraces:
    """Owns the stages of open requests, and the spans of sampled ones. The step loop calls it, with its times."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._open: dict[int, GroupTrace] = {}  # by id(group)
        self.ended: deque[RequestTimeline] = deque(maxlen=MAX_ENDED)

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    def find(self, request_id: str, first_token_at: FirstTokenAt, now: float) -> RequestTimeline | None:
        """An open request or one that ended lately. `ended_at` of an open one is `now`, its reason empty."""
        for trace in self._open.values():
            if trace.group.request_id == request_id:
                return self._open_record(trace, first_token_at, now)
        return next((record for record in reversed(self.ended) if record.request_id == request_id), None)

    def _open_record(self, trace: GroupTrace, first_token_at: FirstTokenAt, now: float) -> RequestTimeline:
        group, stages = trace.group, list(trace.stages)
        for sequence in group.sequences[:MAX_STAGES]:
            if sequence.is_finished:
                continue
            index, worker_id = sequence.sample_index, trace.sample(sequence.sample_index).worker_id
            token_at = first_token_at(group.owner, group.handle, index)
            found = trace.stages_of(index, token_at, now, has_output=False)
            stages += [_stage(index, *times, worker_id) for times in found]
            if (lost_at := trace.sample(index).lost_at) is not None:
                stages.append(_stage(index, "move", lost_at, now, "", sequence.requeue_reason))
        return trace.record("", now, stages)

    def begin(self, group: SequenceGroup, now: float) -> None:
        """A request has arrived. If it is sampled, its rows become children of its new span."""
        trace = self._open[id(group)] = GroupTrace(group)
        if self._tracer is None or not group.traceparent:
            return
        facts: Attributes = {
            "quire.request_id": group.request_id,
            "quire.prompt_tokens": len(group.prompt),
            "quire.samples": group.n,
            "quire.takes_over": group.takes_over,
        }
        trace.span = self._tracer.begin("schedule", parent=group.traceparent, at=now, attributes=facts, is_served=True)
        group.traceparent = trace.span.traceparent

    def refuse(self, group: SequenceGroup, code: str, now: float) -> None:
        """The request was refused with this status code."""
        trace = self._open.pop(id(group), None)
        if trace is not None and trace.span is not None:
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
        stage = _stage(sample_index, "move", sample.lost_at, now, worker_id, reasons[0] if reasons else "")
        self._add(trace, stage, facts, "" if worker_id else "ended")
        sample.lost_at = None

    def _add(self, trace: GroupTrace, stage: RequestStage, facts: Attributes, error: str) -> None:
        if len(trace.stages) < MAX_STAGES:
            trace.stages.append(stage)
        if self._tracer is not None and trace.span is not None:
            parent = trace.span.traceparent
            self._tracer.add(stage.name, parent=parent, start=stage.start, end=stage.end, attributes=facts, error=error)

    def record_ends(self, finished: Iterable[Finished], first_token_at: FirstTokenAt, now: float) -> None:
        """Samples have ended. `first_token_at(owner, handle, sample)`: when an update before this one had its token."""
        for end in finished:
            trace = self._open.get(id(end.group))
            if trace is not None:
                group = end.group
                self._add_sample(trace, end, first_token_at(group.owner, group.handle, end.sample_index), now)
        for end in finished:
            trace = self._open.get(id(end.group))
            if trace is not None and end.group.is_finished:
                self._end(trace, end.reason, now)

    def _end(self, trace: GroupTrace, reason: FinishReason, now: float) -> None:
        if trace.span is not None:
            error = reason.value if reason is FinishReason.ERROR else ""
            trace.span.end(now, {"quire.finish_reason": reason.value}, error)
        self.ended.append(trace.record(reason.value, now, trace.stages))
        del self._open[id(trace.group)]

    def _add_sample(self, trace: GroupTrace, end: Finished, first_token_at: float | None, now: float) -> None:
        self._add_move(trace, end.sample_index, now, "")
        trace.num_output_tokens += end.num_output_tokens
        error = end.reason.value if end.reason is FinishReason.ERROR else ""
        has_output = bool(end.num_output_tokens) and not error
        *before, last = trace.stages_of(end.sample_index, first_token_at, now, has_output=has_output)
        for name, start, stop in before:
            self._add_stage(trace, name, end, start, stop, "")
        name, start, stop = last
        self._add_stage(trace, name, end, start, stop, error)

    def _add_stage(self, trace: GroupTrace, name: str, end: Finished, start: float, stop: float, error: str) -> None:
        facts: dict[str, int | str] = {"quire.sample": end.sample_index}
        if name == "prefill":
            facts["quire.cached_tokens"] = end.num_cached_tokens
        if name == "decode":
            facts["quire.output_tokens"] = end.num_output_tokens
            facts["quire.recomputed_tokens"] = end.num_recomputed_tokens
        worker_id = trace.sample(end.sample_index).worker_id
        self._add(trace, _stage(end.sample_index, name, start, stop, worker_id), facts, error)
