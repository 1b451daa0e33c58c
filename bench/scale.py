#!/usr/bin/env python
"""What one scheduler can carry: 64 workers and 20,000 running sequences on one CPU core, with no I/O and no worker.

    python bench/scale.py [--workers 64] [--rows 320] [--seconds 8] [--mean-output 1000] [--waiting 5000] [--profile]

Time is virtual: each worker answers a step 10 ms after it was sent, with two steps in flight. Two phases are measured in
thread CPU time: `steady`, where everybody decodes, and `churn`, where answers end, new requests come at the same rate,
and thousands wait in the queue all the time. `steps_per_s` is what one CPU core could serve each worker with; 100 are
needed for steps of 10 ms. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import heapq
import json
import pstats
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import Deltas, StepBatch, StepOutput, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition

STEP_S = 0.010
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NEVER = 3000  # tokens of an answer that outlasts the bench


class Fleet:
    """Workers that answer after a fixed time, and the requests that keep them full."""

    def __init__(self, num_workers: int, num_rows: int, prompt_len: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_waiting=1 << 20, max_waiting_tokens=1 << 40))
        for i in range(num_workers):
            blocks = num_rows * MAX_MODEL_LEN // BLOCK_SIZE
            self.scheduler.add_worker(
                WorkerCapacity(f"w{i}", 1, blocks, BLOCK_SIZE, num_rows, 8192, MAX_MODEL_LEN, 2), 0.0
            )
        self.now = 0.0
        self.num_steps = self.num_tokens = self.num_ended = self.num_added = 0
        self.step_ns: list[int] = []
        self.queue_delays_s: list[float] = []
        self._rng = np.random.default_rng(0)
        self._prompt_len = prompt_len
        self._answers: deque[tuple[float, StepBatch]] = deque()  # in order of time: all take the same
        self._added_at: dict[int, float] = {}

    def add(self, max_tokens: int) -> None:
        """One request comes."""
        prompt = self._rng.integers(3, 1 << 17, self._prompt_len, dtype=np.uint32)
        handle = self.num_added
        self.num_added += 1
        self._added_at[handle] = self.now
        group = SequenceGroup(str(handle), prompt, StopCondition(max_tokens, ignore_eos=True), handle=handle)
        self.scheduler.add_group(group, self.now)

    def schedule(self) -> None:
        for batch in self.scheduler.schedule(self.now):
            self._answers.append((self.now + STEP_S * (1 + (len(self._answers) and 1)), batch))
            for opened in batch.opens:
                self.queue_delays_s.append(self.now - self._added_at.pop(opened.group.handle))

    def answer(self) -> Deltas:
        """The next worker answers its oldest step, and gets another."""
        self.now, batch = self._answers.popleft()
        rows = batch.rows[batch.sample_mask]
        answer = StepOutput(batch.worker_id, batch.step_id, rows, np.full(len(rows), 7, dtype=np.uint32))
        start = time.thread_time_ns()
        deltas = self.scheduler.update(answer, self.now)
        self.schedule()
        self.scheduler.take_prefix_events()
        self.step_ns.append(time.thread_time_ns() - start)
        self.num_steps += 1
        self.num_tokens += len(deltas.token_ids)
        return deltas


def start(num_workers: int, num_rows: int, prompt_len: int, progress: str) -> Fleet:
    """A fleet of which every row decodes, no two in the same phase of their blocks."""
    fleet = Fleet(num_workers, num_rows, prompt_len)
    print(progress, flush=True)
    for _ in range(num_workers * num_rows):
        fleet.add(NEVER)
    fleet.schedule()
    while fleet.scheduler.load().num_waiting or fleet.scheduler.load().pending_tokens:
        fleet.answer()
    return fleet
