"""Logs at debug level which request opens and closes each row, to follow a request into the worker."""

from __future__ import annotations

import logging

from quire.internal.v1 import worker_pb2

from step_protocol.messages import StepBatch

log = logging.getLogger(__name__)


class RowLog:
    """Keeps the requests of open rows while debug logging is on; costs nothing otherwise."""

    def __init__(self) -> None:
        self._request_ids: dict[int, str] = {}

    def note(self, message: worker_pb2.StepBatch, batch: StepBatch) -> None:
        """A step was accepted; `batch` is the decoded message."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        for row in batch.close_rows.tolist():
            self._note_closed(row, batch.step_id)
        for row_open in message.opens:
            self._note_opened(row_open, batch.step_id)

    def reset(self) -> None:
        """A new lease: all rows are closed."""
        self._request_ids.clear()

    def _note_opened(self, row_open: worker_pb2.RowOpen, step_id: int) -> None:
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

    def _note_closed(self, row: int, step_id: int) -> None:
        request_id = self._request_ids.pop(row, None)
        if request_id is not None:
            facts = {"request_id": request_id, "row": row, "step_id": step_id}
            log.debug("request %s: row %d is closed", request_id, row, extra=facts)
