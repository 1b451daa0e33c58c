"""Metrics and debug lines of a worker's steps."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from quire.internal.v1 import worker_pb2

from step_protocol.messages import StepBatch
from worker_svc.metrics import StepMeter
from worker_svc.steps.row_traces import RowLog


def make_batch(*query_lens: int, close_rows: tuple[int, ...] = ()) -> StepBatch:
    num_rows = len(query_lens)
    column = np.arange(num_rows, dtype=np.uint32)
    return StepBatch(
        step_id=1,
        rows=column,
        query_lens=np.array(query_lens, dtype=np.uint32),
        context_lens=column,
        sample_mask=np.ones(num_rows, dtype=bool),
        slot_mapping=np.arange(sum(query_lens), dtype=np.uint32),
        close_rows=np.array(close_rows, dtype=np.uint32),
    )


def run(meter: StepMeter, batch: StepBatch, *, is_done: bool = True) -> None:
    meter.begin(batch, time.monotonic())
    meter.end(batch, is_done=is_done)


def test_tokens_are_counted_by_stage() -> None:
    meter = StepMeter()
    run(meter, make_batch(1, 1, 30))
    run(meter, make_batch(1, 1))
    run(meter, make_batch(5), is_done=False)  # failed: nothing was computed
    assert (meter.prefill_tokens, meter.decode_tokens) == (30, 4)
    assert (sum(meter.step.counts), meter.rows.total) == (2, 5)
    assert sum(meter.queue.counts) == 3


def test_debug_lines_name_the_request_of_each_row(caplog: pytest.LogCaptureFixture) -> None:
    row_log = RowLog()
    message = worker_pb2.StepBatch(opens=[worker_pb2.RowOpen(row=3, request_id="r", prompt_len=9)])
    row_log.note(message, make_batch(1))  # debug logging is off
    caplog.set_level(logging.DEBUG, logger="worker_svc.steps.row_traces")
    row_log.note(message, make_batch(1))
    row_log.note(worker_pb2.StepBatch(), make_batch(1, close_rows=(3, 4)))
    assert [(record.getMessage(), record.__dict__["request_id"]) for record in caplog.records] == [
        ("request r: sample 0 has row 3", "r"),
        ("request r: row 3 is closed", "r"),
    ]
