"""Spans of the scheduler and the worker for preempted, lost, refused and failed sequences."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire.internal.v1 import worker_pb2

from scheduler_svc.core.messages import Finished, RowAssignment
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceData, SequenceGroup, SequenceStatus
from scheduler_svc.history import MAX_ENDED, MAX_STAGES, RequestTimelines
from step_protocol.messages import StepBatch
from step_protocol.types import RowError, RowErrorCode
from svc_common.observe.otlp import Tracer
from tests.builders import make_group
from worker_svc.steps.row_traces import RowTraces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EMPTY = np.empty(0, np.uint32)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    return Tracer(SimpleSpanProcessor(exporter), Resource({}))


def traced_group() -> SequenceGroup:
    group = make_group(8)
    group.traceparent, group.arrival = PARENT, 0.0
    group.sequences = [Sequence(group, 0, SequenceData(group.prompt, EMPTY), 0)]
    return group


def opened(group: SequenceGroup, worker_id: str) -> list[StepBatch]:
    row_open = RowAssignment(0, group, 0, group.prompt, len(group.prompt), EMPTY, 0)
    return [StepBatch(1, EMPTY, EMPTY, EMPTY, np.empty(0, np.bool_), EMPTY, opens=[row_open], worker_id=worker_id)]


def ended(group: SequenceGroup, reason: FinishReason, num_output: int) -> list[Finished]:
    group.sequences[0].status = SequenceStatus.FINISHED
    return [Finished(group, 0, reason, num_output, 0, 0, 0)]


def spans_of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    return round(((span.end_time or 0) - (span.start_time or 0)) / 1e9, 2)


def test_a_sequence_that_lost_its_worker(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    timelines, group = RequestTimelines(tracer), traced_group()
    timelines.begin(group, 0.0)
    assert group.traceparent != PARENT, "rows are children of the scheduler's span"
    timelines.record_steps(opened(group, "a"), 1.0)
    group.sequences[0].requeue_reason = "lost"
    timelines.record_moves(group.sequences, 3.0)
    timelines.record_steps(opened(group, "b"), 3.5)
    timelines.record_ends(ended(group, FinishReason.LENGTH, 5), lambda *_: 2.0, 6.0)
    spans = spans_of(exporter)
    durations = {name: seconds(span) for name, span in spans.items()}
    assert durations == {"queue": 1.0, "prefill": 1.0, "move": 0.5, "decode": 4.0, "schedule": 6.0}
    move = spans["move"].attributes or {}
    assert (move["quire.reason"], move["quire.from_worker"], move["quire.to_worker"]) == ("lost", "a", "b")
    assert not timelines.num_open
    (record,) = timelines.ended
    assert record.trace_id == PARENT.split("-")[1]
    assert [(stage.name, stage.start, stage.end, stage.worker_id, stage.reason) for stage in record.stages] == [
        ("move", 3.0, 3.5, "b", "lost"),
        ("queue", 0.0, 1.0, "", ""),
        ("prefill", 1.0, 2.0, "b", ""),
        ("decode", 2.0, 6.0, "b", ""),
    ]


def test_a_sequence_that_ends_while_it_waits_for_a_worker(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    timelines, group = RequestTimelines(tracer), traced_group()
    timelines.begin(group, 0.0)
    timelines.record_steps(opened(group, "a"), 1.0)
    timelines.record_moves(group.sequences, 2.0)
    timelines.record_ends(ended(group, FinishReason.ERROR, 0), lambda *_: None, 9.0)
    spans = spans_of(exporter)
    assert {name for name, span in spans.items() if not span.status.is_ok} == {"move", "prefill", "schedule"}


def test_a_request_that_is_not_sampled_has_stages_and_no_spans(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    timelines, group = RequestTimelines(tracer), traced_group()
    group.traceparent = ""
    timelines.begin(group, 0.0)
    timelines.record_steps(opened(group, "a"), 1.0)
    group.sequences[0].requeue_reason = "preempted"
    timelines.record_moves(group.sequences, 3.0)
    found = timelines.find(group.request_id, lambda *_: 2.0, 4.0)
    assert found is not None
    assert [(stage.name, stage.start, stage.end, stage.reason) for stage in found.stages] == [
        ("queue", 0.0, 1.0, ""),
        ("prefill", 1.0, 2.0, ""),
        ("decode", 2.0, 4.0, ""),
        ("move", 3.0, 4.0, "preempted"),
    ]
    assert (found.reason, found.trace_id, timelines.find("unknown", lambda *_: None, 4.0)) == ("", "", None)
    timelines.record_ends(ended(group, FinishReason.LENGTH, 5), lambda *_: 2.0, 6.0)
    assert timelines.find(group.request_id, lambda *_: None, 7.0) == timelines.ended[0]
    assert exporter.get_finished_spans() == ()


def test_the_requests_and_stages_that_are_kept_are_bounded() -> None:
    timelines = RequestTimelines()
    for i in range(MAX_ENDED + 5):
        group = make_group(8, f"r{i}")
        group.sequences = [Sequence(group, k, SequenceData(group.prompt, EMPTY), k) for k in range(MAX_STAGES + 1)]
        for sequence in group.sequences:
            sequence.status = SequenceStatus.FINISHED
        timelines.begin(group, 0.0)
        ends = [Finished(group, k, FinishReason.LENGTH, 1, 0, 0, 0) for k in range(MAX_STAGES + 1)]
        timelines.record_ends(ends, lambda *_: None, 1.0)
    assert (len(timelines.ended), len(timelines.ended[-1].stages), timelines.num_open) == (MAX_ENDED, MAX_STAGES, 0)
    assert (timelines.ended[0].request_id, timelines.ended[0].output_tokens) == ("r5", MAX_STAGES + 1)


def step(step_id: int, opens: int = 0, close: list[int] | None = None) -> tuple[worker_pb2.StepBatch, SimpleNamespace]:
    """A message that opens rows, and the decoded step. Row 0 has an invalid traceparent."""
    message = worker_pb2.StepBatch(step_id=step_id)
    for row in range(opens):
        message.opens.add(row=row, request_id=f"r{row}")
        message.traces.add(row=row, traceparent=PARENT if row else "junk")
    return message, SimpleNamespace(step_id=step_id, close_rows=np.array(close or [], np.uint32))


def test_rows_of_a_worker(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    rows = RowTraces(tracer, "w")
    rows.note(*step(1, opens=4))  # type: ignore[arg-type]
    rows.record_output(
        SimpleNamespace(errors=[RowError(2, "secret", RowErrorCode.NAN), RowError(9, "", RowErrorCode.NAN)])
    )  # type: ignore[arg-type]
    rows.note(*step(5, close=[0, 1, 2]))  # type: ignore[arg-type]
    rows.reset()
    spans = {str((span.attributes or {})["quire.request_id"]): span for span in exporter.get_finished_spans()}
    assert {name: (span.attributes or {}).get("error.type") for name, span in spans.items()} == {
        "r1": None,
        "r2": "nan",
        "r3": "lease ended",
    }
    assert (spans["r1"].attributes or {})["quire.steps"] == 4
    assert "secret" not in spans["r2"].to_json()
