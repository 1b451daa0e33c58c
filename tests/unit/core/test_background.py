"""Background work (the lowest priority) beside chats, on virtual time: it delays them little, and ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import pytest

from request_fields.fields import LAST_PRIORITY
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from step_protocol.messages import StepBatch, StepOutput
from tests.invariants import check_scheduler

NUM_LINES = 200  # open at the same time
SERVICES = [(0.005, 1 / 20_000), (0.002, 1 / 20_000), (0.02, 1 / 10_000), (0.03, 1 / 2000)]  # s per step, per token


class Worker:
    """One worker whose steps take `step_s` and `token_s` per prompt token; two are in flight."""

    def __init__(self, step_s: float, token_s: float, **sizes: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_waiting=10_000))
        sizes = {"num_blocks": 2000, "block_size": 16, "max_num_seqs": 48, "max_num_batched_tokens": 2048} | sizes
        self.scheduler.add_worker(WorkerCapacity("w", 1, max_model_len=16_384, **sizes))
        self._step_s, self._token_s = step_s, token_s
        self._rng = np.random.default_rng(0)
        self._answers: list[tuple[float, StepBatch]] = []
        self.now = self._free_at = 0.0
        self.began: list[float] = []  # by handle
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.on_end: Callable[[int], None] = lambda handle: None

    def add(self, num_tokens: int, max_tokens: int, priority: int = 0) -> int:
        handle, prompt = len(self.began), self._rng.integers(1, 1 << 30, num_tokens, dtype=np.uint32)
        stop = StopCondition(max_tokens, ignore_eos=True)
        self.began.append(self.now)
        self._note(
            self.scheduler.add_group(
                SequenceGroup(f"r{handle}", prompt, stop, handle=handle, priority=priority), self.now
            )
        )
        return handle

    def run(self, until: float) -> None:
        """Answer steps until this time, or until nothing is left."""
        while True:
            for batch in self.scheduler.schedule(self.now):
                num_tokens = int(batch.query_lens[batch.query_lens > 1].sum())
                self._free_at = max(self.now, self._free_at) + self._step_s + self._token_s * num_tokens
                self._answers.append((self._free_at, batch))
            if not self._answers or self._answers[0][0] > until:
                self.now = max(self.now, min(until, 1e9))
                return
            self.now, batch = heapq.heappop(self._answers)
            rows = batch.rows[batch.sample_mask]
            output = StepOutput(batch.step_id, rows, np.full_like(rows, 9), worker_id="w")
            self._note(self.scheduler.update(output, self.now))

    def _note(self, deltas: Deltas | None) -> None:
        if deltas is None:
            return
        self.first |= dict.fromkeys(deltas.handles[deltas.offsets == 0].tolist(), self.now)
        for finished in deltas.finished:
            self.ended[finished.group.handle] = self.now
            self.on_end(finished.group.handle)


def chats(step_s: float, token_s: float, *, num_lines: int) -> tuple[float, float, int]:
    """The median and the 99th percentile of the times of chats, and the number of lines that were answered."""
    worker, lines, rng = Worker(step_s, token_s), set[int](), np.random.default_rng(1)

    def next_line(ended: int) -> None:
        if ended in lines and len(lines) < 100_000:
            lines.add(worker.add(int(rng.integers(100, 900)), 50, LAST_PRIORITY))

    worker.on_end = next_line
    online, at = [worker.add(100, 20)], 0.0
    worker.run(60 * step_s)  # its times are known
    lines |= {worker.add(int(rng.integers(100, 900)), 50, LAST_PRIORITY) for _ in range(num_lines)}
    arrivals = np.random.default_rng(2)
    for _ in range(250):
        at = max(worker.now, at) + arrivals.exponential(40 * step_s)
        worker.run(at)
        online.append(worker.add(int(arrivals.integers(50, 250)), int(arrivals.integers(50, 150))))
    worker.run(at + 1000 * step_s)
    check_scheduler(worker.scheduler)
    median, most = np.percentile([worker.ended[one] - worker.began[one] for one in online], (50, 99))
    return float(median), float(most), len(lines & worker.ended.keys())


@pytest.mark.parametrize(("step_s", "token_s"), SERVICES)
def test_lines_of_batches_delay_chats_by_at_most_five_percent(step_s: float, token_s: float) -> None:
    alone, beside = (chats(step_s, token_s, num_lines=count) for count in (0, NUM_LINES))
    assert beside[0] < 1.05 * alone[0]
    assert beside[1] < 1.05 * alone[1]
    assert beside[2] > 20


def test_without_other_work_background_prompts_have_whole_steps() -> None:
    times = []
    for priority in (0, LAST_PRIORITY):
        worker = Worker(0.005, 1 / 20_000)
        for _ in range(100):
            worker.add(500, 50, priority)
        worker.run(1e9)
        times.append(worker.now if worker.now < 1e9 else max(worker.ended.values()))
    assert times[0] == times[1]


def test_a_chat_takes_the_place_of_background_work_that_fills_worker_and_steps() -> None:
    worker = Worker(0.005, 1 / 20_000, max_num_seqs=8, num_blocks=200)
    for _ in range(50):
        worker.add(8000 // 16 - 100, 100, LAST_PRIORITY)
    worker.run(30.0 * 0.005)
    chat = worker.add(100, 10)
    worker.run(1e9)
    assert worker.first[chat] - worker.began[chat] < 3 * (0.005 + 2048 / 20_000)
    assert len(worker.ended) == 51


def test_a_long_background_prompt_keeps_no_tokens_from_others_and_ends_beside_them() -> None:
    worker = Worker(0.005, 1 / 20_000)
    worker.add(100, 3)
    worker.run(0.1)
    stream = worker.add(50, 4000)
    long = worker.add(10_000, 5, LAST_PRIORITY)
    worker.run(1.0)
    chat = worker.add(2000, 5)
    worker.run(1e9)
    assert worker.first[chat] - worker.began[chat] < 0.005 * 4 + 2300 / 20_000
    assert worker.first[long] < worker.ended[stream] + 1.0
