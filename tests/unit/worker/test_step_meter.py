"""Metrics and debug lines of a worker's steps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from step_protocol.messages import StepBatch
from worker_svc.metrics import MIN_MEASURED, StepMeter, StuckWatch


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


class Looks:
    """Steps on a clock of their own, and the heartbeats of their worker, every 2 s."""

    def __init__(self) -> None:
        self.watch = StuckWatch()
        self.now = 100.0

    def run(self, batch: StepBatch, seconds: float) -> None:
        """A step that ends."""
        self.watch.begin(batch, self.now)
        self.now += seconds
        self.watch.end(self.now, is_done=True)

    def hang(self, batch: StepBatch, seconds: float, every_s: float = 2.0) -> float | None:
        """After how long a step that does not end is found."""
        began = self.now
        self.watch.begin(batch, began)
        while self.now < began + seconds:
            self.now += every_s
            if self.watch.look(self.now):
                return self.now - began
        return None


def test_a_step_that_hangs_is_found_by_the_times_of_earlier_ones() -> None:
    looks = Looks()
    for _ in range(MIN_MEASURED):
        looks.run(make_batch(1, 1), 0.02)
        looks.run(make_batch(2000), 1.35)
    assert looks.hang(make_batch(1, 1), 60.0) == 12.0
    assert looks.hang(make_batch(1, 2000), 60.0) == 16.0  # 10 times as long as usual


def test_a_slow_step_does_not_hang() -> None:
    looks = Looks()
    assert looks.hang(make_batch(1), 100.0) is None  # the first steps compile kernels
    for _ in range(MIN_MEASURED):
        looks.run(make_batch(1), 0.02)
    assert looks.hang(make_batch(3000), 100.0) is None  # no step of this size has been measured
    encoding = make_batch(1)
    encoding.opens.append(SimpleNamespace(encoder=None, images=("an image",)))
    assert looks.hang(encoding, 100.0) is None
    assert looks.hang(make_batch(1), 8.0) is None
    for _ in range(20):  # other steps, and no look during any of them
        looks.run(make_batch(1), 9.0)
    assert looks.hang(make_batch(1), 80.0) is None


def test_the_time_of_a_stopped_process_does_not_count() -> None:
    looks = Looks()
    for _ in range(MIN_MEASURED):
        looks.run(make_batch(1), 0.02)
    assert looks.hang(make_batch(1), 1000.0, every_s=500.0) is None
