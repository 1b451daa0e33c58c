"""The past of a scheduler: events, load, and the stages of open requests and of those that ended last, for operators.
All lists are bounded. Messages that are kept here have times of the event loop's clock; an answer has Unix times. Start
and end of a request are log lines too, and the stages of a sampled one are spans:

schedule                              from the Submit to the end of the last sample
  queue | prefill | decode            of each sample
  move                                from the loss of a row (worker lost or drained, row failed or preempted) to
                                      the next row
row                                   made by each worker that runs the sample
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import sub
from typing import TYPE_CHECKING

import numpy as np
from quire.internal.v1 import scheduler_pb2 as pb

from scheduler_svc.core.messages import Finished
from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from scheduler_svc.core.sequence import Sequence as QueuedSequence
from scheduler_svc.core.stats import Load
from scheduler_svc.core.steps.costs import Cost
from step_protocol.messages import StepBatch

if TYPE_CHECKING:
    from svc_common.observe.otlp import Attributes, OpenSpan, Tracer

log = logging.getLogger(__name__)

MAX_EVENTS = 200
MAX_ENDED = 200  # requests
MAX_SAMPLES = 360
SAMPLE_S = 10.0
MAX_TENANTS = 50
MAX_STAGES = 64  # of one request
MAX_TEXT = 300  # characters of an event: workers choose their ids and errors
JOIN_S = 10.0  # equal events within this time are one with a count


class Events:
    """Owns the newest events."""

    def __init__(self) -> None:
        self.newest: deque[pb.SchedulerEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, now: float, text: str, *, is_bad: bool = False, count: int = 0) -> None:
        """Add an event. With a `count`, it is added to that of the same event of the last JOIN_S."""
        text = text[:MAX_TEXT]
        for event in reversed(self.newest):
            if not count or event.at < now - JOIN_S:
                break
            if event.text == text:
                event.count += count
                return
        self.newest.append(pb.SchedulerEvent(at=now, text=text, is_bad=is_bad, count=count))


class LoadSamples:
    """Owns the samples of the last hour. `keep_samples` of the service takes them."""

    def __init__(self) -> None:
        self.newest: deque[tuple[float, ...]] = deque(maxlen=MAX_SAMPLES)
        self._before: Sequence[int] = ()

    def add(self, now: float, load: Load, counters: Sequence[int]) -> None:
        """Add the load and the changes of the counters. The first call only keeps the counters."""
        if self._before:
            changes = map(sub, counters, self._before)
            self.newest.append((now, load.num_running, load.num_waiting, *changes))
        self._before = counters

    def to_bytes(self, now: float) -> bytes:
        """The samples with their age instead of their time, as in GetHistoryResponse."""
        return np.array([(now - at, *values) for at, *values in self.newest], dtype="<f4").tobytes()


def _stage(index: int, name: str, start: float, end: float, worker_id: str, reason: str = "") -> pb.RequestStage:
    worker_id = "" if name == "queue" else worker_id
    return pb.RequestStage(name=name, sample_index=index, start=start, end=end, worker_id=worker_id, reason=reason)


FirstTokenAt = Callable[[int, int, int], float | None]


@dataclass(slots=True)
class SampleTimeline:
    """One sample: its rows so far."""

    opened_at: float | None = None  # first row
    worker_id: str = ""  # of the newest row
    lost_at: float | None = None  # while it waits for a row again


@dataclass(slots=True)
class OpenTimeline:
    """One open request, with its span if it is sampled."""

    group: SequenceGroup
    span: OpenSpan | None = None
    stages: list[pb.RequestStage] = field(default_factory=list)  # those that have ended
    num_output_tokens: int = 0  # of the samples that have ended
    samples: dict[int, SampleTimeline] = field(default_factory=dict)

    def sample(self, index: int) -> SampleTimeline:
        found = self.samples.get(index)
        if found is None:
            found = self.samples[index] = SampleTimeline()
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

    def record(self, reason: str, ended_at: float, stages: list[pb.RequestStage]) -> pb.RequestTimeline:
        group = self.group
        return pb.RequestTimeline(
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


class RequestTimelines:
    """Owns the stages of open requests, and the spans of sampled ones. The step loop calls it, with its times."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._open: dict[int, OpenTimeline] = {}  # by id(group)
        self.ended: deque[pb.RequestTimeline] = deque(maxlen=MAX_ENDED)

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    def find(self, request_id: str, first_token_at: FirstTokenAt, now: float) -> pb.RequestTimeline | None:
        """An open request or one that ended lately. `ended_at` of an open one is `now`, its reason empty."""
        for timeline in self._open.values():
            if timeline.group.request_id == request_id:
                return self._open_record(timeline, first_token_at, now)
        return next((record for record in reversed(self.ended) if record.request_id == request_id), None)

    def _open_record(self, timeline: OpenTimeline, first_token_at: FirstTokenAt, now: float) -> pb.RequestTimeline:
        group, stages = timeline.group, list(timeline.stages)
        for sequence in group.sequences[:MAX_STAGES]:
            if sequence.is_finished:
                continue
            index, worker_id = sequence.sample_index, timeline.sample(sequence.sample_index).worker_id
            token_at = first_token_at(group.owner, group.handle, index)
            found = timeline.stages_of(index, token_at, now, has_output=False)
            stages += [_stage(index, *times, worker_id) for times in found]
            if (lost_at := timeline.sample(index).lost_at) is not None:
                stages.append(_stage(index, "move", lost_at, now, "", sequence.requeue_reason))
        return timeline.record("", now, stages)

    def begin(self, group: SequenceGroup, now: float) -> None:
        """A request has arrived. If it is sampled, its rows become children of its new span."""
        timeline = self._open[id(group)] = OpenTimeline(group)
        if self._tracer is None or not group.traceparent:
            return
        facts: Attributes = {
            "quire.request_id": group.request_id,
            "quire.prompt_tokens": len(group.prompt),
            "quire.samples": group.n,
            "quire.takes_over": group.takes_over,
        }
        span = self._tracer.begin("schedule", parent=group.traceparent, at=now, attributes=facts, is_served=True)
        timeline.span, group.traceparent = span, span.traceparent

    def refuse(self, group: SequenceGroup, code: str, now: float) -> None:
        """The request was refused with this status code."""
        timeline = self._open.pop(id(group), None)
        if timeline is not None and timeline.span is not None:
            timeline.span.end(now, error=code)

    def record_moves(self, requeued: Iterable[QueuedSequence], now: float) -> None:
        """Sequences lost their row."""
        for sequence in requeued:
            if (timeline := self._open.get(id(sequence.group))) is not None:
                sample = timeline.sample(sequence.sample_index)
                sample.lost_at = now if sample.lost_at is None else sample.lost_at

    def record_steps(self, batches: Iterable[StepBatch], now: float) -> None:
        """Rows were opened."""
        for batch in batches:
            for row_open in batch.opens:
                timeline = self._open.get(id(row_open.group))
                if timeline is not None:
                    self._record_opened(timeline, row_open.sample_index, batch.worker_id, now)

    def _record_opened(self, timeline: OpenTimeline, sample_index: int, worker_id: str, now: float) -> None:
        sample = timeline.sample(sample_index)
        if sample.opened_at is None:
            sample.opened_at = now
        if sample.lost_at is not None:
            self._add_move(timeline, sample_index, now, worker_id)
        sample.worker_id = worker_id

    def _add_move(self, timeline: OpenTimeline, sample_index: int, now: float, worker_id: str) -> None:
        sample = timeline.sample(sample_index)
        if sample.lost_at is None:
            return
        reasons = [seq.requeue_reason for seq in timeline.group.sequences if seq.sample_index == sample_index]
        facts: Attributes = {
            "quire.sample": sample_index,
            "quire.reason": reasons[0] if reasons else "",
            "quire.from_worker": sample.worker_id,
            "quire.to_worker": worker_id,
        }
        stage = _stage(sample_index, "move", sample.lost_at, now, worker_id, reasons[0] if reasons else "")
        self._add(timeline, stage, facts, "" if worker_id else "ended")
        sample.lost_at = None

    def _add(self, timeline: OpenTimeline, stage: pb.RequestStage, facts: Attributes, error: str) -> None:
        if len(timeline.stages) < MAX_STAGES:
            timeline.stages.append(stage)
        if self._tracer is not None and timeline.span is not None:
            parent = timeline.span.traceparent
            self._tracer.add(stage.name, parent=parent, start=stage.start, end=stage.end, attributes=facts, error=error)

    def record_ends(self, finished: Iterable[Finished], first_token_at: FirstTokenAt, now: float) -> None:
        """Samples have ended. `first_token_at(owner, handle, sample)`: when an update before this one had its token."""
        for end in finished:
            timeline = self._open.get(id(end.group))
            if timeline is not None:
                group = end.group
                self._add_sample(timeline, end, first_token_at(group.owner, group.handle, end.sample_index), now)
        for end in finished:
            timeline = self._open.get(id(end.group))
            if timeline is not None and end.group.is_finished:
                self._end(timeline, end.reason, now)

    def _end(self, timeline: OpenTimeline, reason: FinishReason, now: float) -> None:
        if timeline.span is not None:
            error = reason.value if reason is FinishReason.ERROR else ""
            timeline.span.end(now, {"quire.finish_reason": reason.value}, error)
        self.ended.append(timeline.record(reason.value, now, timeline.stages))
        del self._open[id(timeline.group)]

    def _add_sample(self, timeline: OpenTimeline, end: Finished, first_token_at: float | None, now: float) -> None:
        self._add_move(timeline, end.sample_index, now, "")
        timeline.num_output_tokens += end.num_output_tokens
        error = end.reason.value if end.reason is FinishReason.ERROR else ""
        has_output = bool(end.num_output_tokens) and not error
        *before, last = timeline.stages_of(end.sample_index, first_token_at, now, has_output=has_output)
        for name, start, stop in before:
            self._add_stage(timeline, name, end, start, stop, "")
        name, start, stop = last
        self._add_stage(timeline, name, end, start, stop, error)

    def _add_stage(
        self, timeline: OpenTimeline, name: str, end: Finished, start: float, stop: float, error: str
    ) -> None:
        facts: dict[str, int | str] = {"quire.sample": end.sample_index}
        if name == "prefill":
            facts["quire.cached_tokens"] = end.num_cached_tokens
        if name == "decode":
            facts["quire.output_tokens"] = end.num_output_tokens
            facts["quire.recomputed_tokens"] = end.num_recomputed_tokens
        worker_id = timeline.sample(end.sample_index).worker_id
        self._add(timeline, _stage(end.sample_index, name, start, stop, worker_id), facts, error)


def history_to_proto(
    events: Events, ended: Iterable[pb.RequestTimeline], to_unix: Callable[[float], float]
) -> pb.GetHistoryResponse:
    """The answer of GetHistory without a request. `to_unix` converts a time of the event loop."""
    message = pb.GetHistoryResponse(events=events.newest)
    for event in message.events:
        event.at = to_unix(event.at)
    for record in ended:
        message.ended.append(_in_unix_time(record, to_unix))
        del message.ended[-1].stages[:]
    return message


def add_totals(message: pb.GetHistoryResponse, refusals: Mapping[str, int], tenants: Mapping[str, Cost]) -> None:
    """Add counts since the start: refused requests by code, and the tenants that used the most."""
    message.refused.update(refusals)
    for name, cost in nlargest(MAX_TENANTS, tenants.items(), key=lambda pair: pair[1].processor_us):
        message.tenants.add(tenant_id=name, processor_s=cost.processor_us / 1e6, block_s=cost.block_s)


def request_to_proto(record: pb.RequestTimeline | None, to_unix: Callable[[float], float]) -> pb.GetHistoryResponse:
    """The answer of GetHistory for one request."""
    return pb.GetHistoryResponse(request=None if record is None else _in_unix_time(record, to_unix))


def _in_unix_time(record: pb.RequestTimeline, to_unix: Callable[[float], float]) -> pb.RequestTimeline:
    message = pb.RequestTimeline()
    message.CopyFrom(record)
    message.arrived_at, message.ended_at = to_unix(record.arrived_at), to_unix(record.ended_at)
    for stage in message.stages:
        stage.start, stage.end = to_unix(stage.start), to_unix(stage.end)
    return message


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
