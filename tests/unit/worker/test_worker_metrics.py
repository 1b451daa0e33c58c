"""Idle time of the model."""

from __future__ import annotations

import pytest
from quire.internal.v1 import worker_pb2

from step_protocol.messages import StepBatch
from worker_svc import metrics
from worker_svc.metrics import StepMeter
from worker_svc.wire import step_batch_from_proto


def batch(num_rows: int, num_new: int) -> StepBatch:
    columns = bytes(4 * num_rows)
    opens = [worker_pb2.RowOpen(row=row) for row in range(num_new)]
    return step_batch_from_proto(
        worker_pb2.StepBatch(rows=columns, context_lens=columns, slot_mapping=columns, opens=opens)
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times that the meter will read, in order."""
    times: list[float] = []
    monkeypatch.setattr(metrics.time, "monotonic", lambda: times.pop(0))
    return times


def run_step(meter: StepMeter, num_rows: int, num_new: int, *, is_done: bool = True) -> None:
    step = batch(num_rows, num_new)
    meter.begin(step, 0.0)
    meter.end(step, is_done=is_done)


def num_idle(meter: StepMeter) -> int:
    return sum(meter.idle.counts)


def test_idle_is_the_time_that_open_rows_waited(clock: list[float]) -> None:
    meter = StepMeter()
    clock += [0.0, 1.0, 1.5, 2.5, 9.0, 10.0]
    run_step(meter, num_rows=2, num_new=2)  # no row waited
    run_step(meter, num_rows=3, num_new=1)  # two rows waited
    run_step(meter, num_rows=1, num_new=1)  # a long pause without open rows
    assert (num_idle(meter), meter.idle.total) == (1, 0.5)
    assert (sum(meter.step.counts), meter.step.total) == (3, 3.0)


def test_a_step_that_computes_nothing_is_part_of_the_pause(clock: list[float]) -> None:
    meter = StepMeter()
    clock += [0.0, 1.0, 1.1, 1.2, 3.0, 4.0]
    run_step(meter, num_rows=1, num_new=1)
    run_step(meter, num_rows=0, num_new=0)
    run_step(meter, num_rows=1, num_new=0)
    assert (num_idle(meter), meter.idle.total) == (1, 2.0)


def test_a_step_that_failed_is_not_counted(clock: list[float]) -> None:
    meter = StepMeter()
    clock += [0.0, 2.0]
    run_step(meter, num_rows=1, num_new=1, is_done=False)
    assert sum(meter.step.counts) == 0
