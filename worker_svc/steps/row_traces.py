"""What a worker reports about single rows: debug log lines, to follow a request into the worker, and spans."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.internal.v1 import worker_pb2

from step_protocol.messages import StepBatch, StepOutput
from svc_common.observe.tracing import valid_traceparent

if TYPE_CHECKING:
    from svc_common.observe.otlp import Attributes, OpenSpan, Tracer

log = logging.getLogger(__name__)


class RowLog:
    """Keeps the requests of open rows, for debug logs."""

    def __init__(self) -> None:
        self._request_ids: dict[int, str] = {}

    def note(self, message: worker_pb2.StepBatch, batch: StepBatch) -> None:
        """A step was accepted; `batch` is the decoded message."""
        for row in batch.close_rows.tolist():
            self._record_closed(row, batch.step_id)
        for row_open in message.opens:
            self._record_opened(row_open, batch.step_id)

    def reset(self) -> None:
        """A new lease: all rows are closed."""
        self._request_ids.clear()

    def _record_opened(self, row_open: worker_pb2.RowOpen, step_id: int) -> None:
        request_id, row = row_open.request_id, row_open.row
        self._request_ids[row] = request_id
        facts = {
            "request_id": request_id,
            "sample": row_open.sample_index,
            "row": row,
            "step_id": step_id,
            "prompt_tokens": row_open.prompt_len,
            "computed_tokens": row_open.num_computed_tokens,
        }
        log.debug("request %s: sample %d has row %d", request_id, row_open.sample_index, row, extra=facts)

    def _record_closed(self, row: int, step_id: int) -> None:
        request_id = self._request_ids.pop(row, None)
        if request_id is not None:
            facts = {"request_id": request_id, "row": row, "step_id": step_id}
            log.debug("request %s: row %d is closed", request_id, row, extra=facts)


@dataclass(slots=True)
class RowTrace:
    """An open row."""

    span: OpenSpan
    step_id: int  # that opened it
    error: str = ""


class RowTraces:
    """Owns the spans of open rows. Called by the event loop; `record_output` by the thread that has the output."""

    def __init__(self, tracer: Tracer, worker_id: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._rows: dict[int, RowTrace] = {}

    def note(self, message: worker_pb2.StepBatch, batch: StepBatch) -> None:
        """A step was accepted; `batch` is the decoded message."""
        if self._rows and len(batch.close_rows):
            for row in batch.close_rows.tolist():
                self._end(row, batch.step_id)
        if message.traces:
            self._begin(message)

    def record_output(self, output: StepOutput) -> None:
        """A step has run. Its failed rows get failed spans."""
        for error in output.errors:
            trace = self._rows.get(error.row)
            if trace is not None:
                trace.error = error.code.name.lower()

    def reset(self) -> None:
        """The lease has ended: all rows are closed."""
        for trace in self._rows.values():
            trace.span.end(time.monotonic(), error="lease ended")
        self._rows.clear()

    def _begin(self, message: worker_pb2.StepBatch) -> None:
        opens = {row_open.row: row_open for row_open in message.opens}
        for traced in message.traces:
            parent, row_open = valid_traceparent(traced.traceparent), opens.get(traced.row)
            if not parent or row_open is None:
                continue
            facts: Attributes = {
                "quire.request_id": row_open.request_id,
                "quire.worker_id": self._worker_id,
                "quire.sample": row_open.sample_index,
                "quire.row": row_open.row,
                "quire.prompt_tokens": row_open.prompt_len,
                "quire.computed_tokens": row_open.num_computed_tokens,
            }
            span = self._tracer.begin("row", parent=parent, at=time.monotonic(), attributes=facts, is_served=True)
            self._rows[traced.row] = RowTrace(span, message.step_id)

    def _end(self, row: int, step_id: int) -> None:
        trace = self._rows.pop(row, None)
        if trace is not None:
            # Steps of the worker while the row was open; a row that waits for its budget computes nothing in some.
            trace.span.end(time.monotonic(), {"quire.steps": step_id - trace.step_id}, trace.error)
