#!/usr/bin/env python
"""The capacity of one scheduler: 64 workers and 20,000 running sequences on one CPU core, without I/O or real workers.

    python bench/scale.py [--workers 64] [--rows 312] [--steps 100] [--mean-output 1000] [--waiting 5000]

Time is virtual: a worker takes 10 ms for a step and has two in flight. Two phases are measured in thread CPU time:
`steady`, in which all sequences decode, and `churn`, in which each answer that ends is replaced by a new request while
thousands wait. `us_per_step` is the mean cost of one worker's step: update, schedule and, in `churn`, adding the new
requests. `steps_per_s` is the step rate per worker that one core can sustain; steps of 10 ms need 100. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import time

import numpy as np

from bench.machine import StealMeter, describe
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup, StopCondition
from step_protocol.messages import StepBatch, StepOutput

STEP_S = 0.010
BLOCK_SIZE = 16
PROMPT_LEN = 128
MAX_MODEL_LEN = 4096
LONGEST = MAX_MODEL_LEN - PROMPT_LEN - BLOCK_SIZE  # an answer that does not end during the benchmark


class Cluster:
    """Workers with a fixed step time, and the requests that keep them full."""

    def __init__(self, num_workers: int, num_rows: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_waiting=1 << 20, max_waiting_tokens=1 << 40))
        num_blocks = num_rows * MAX_MODEL_LEN // BLOCK_SIZE
        for i in range(num_workers):
            capacity = WorkerCapacity(f"w{i}", 1, num_blocks, BLOCK_SIZE, num_rows, 8192, MAX_MODEL_LEN, 2)
            self.scheduler.add_worker(capacity)
        self.now = 0.0
        self.step_ns: list[int] = []
        self.num_ended = 0
        self.queue_delays_s: list[float] = []
        self._rng = np.random.default_rng(0)
        self._added_at: list[float] = []  # indexed by handle
        self._free_at = {f"w{i}": STEP_S * i / num_workers for i in range(num_workers)}  # staggered
        self._answers: list[tuple[float, int, StepBatch]] = []  # time, number
        self._num_sent = 0

    def add(self, max_tokens: int) -> None:
        """Add a request. Lengths differ, so that blocks fill at different times."""
        handle = len(self._added_at)
        prompt = self._rng.integers(3, 1 << 17, PROMPT_LEN + handle % BLOCK_SIZE, dtype=np.uint32)
        self._added_at.append(self.now)
        stop = StopCondition(max_tokens, ignore_eos=True)
        self.scheduler.add_group(SequenceGroup(str(handle), prompt, stop, handle=handle), self.now)

    def add_some(self, count: int, mean_output: int) -> None:
        for length in self._rng.exponential(mean_output, count).tolist():
            self.add(min(LONGEST, 1 + int(length)))

    def schedule(self) -> None:
        self._send(self.scheduler.schedule(self.now))

    def step(self, mean_output: int | None) -> None:
        """The next worker completes its step and gets another one. Each request that ends is replaced."""
        self.now, _, batch = heapq.heappop(self._answers)
        rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
        answer = StepOutput(batch.step_id, rows, np.full(len(rows), 7, dtype=np.uint32), worker_id=batch.worker_id)
        start = time.thread_time_ns()
        deltas = self.scheduler.update(answer, self.now)
        if mean_output is not None and deltas.finished:
            self.add_some(len(deltas.finished), mean_output)
        batches = self.scheduler.schedule(self.now)
        self.scheduler.take_prefix_events()
        self.step_ns.append(time.thread_time_ns() - start)
        self.num_ended += len(deltas.finished)
        self._send(batches)

    def _send(self, batches: list[StepBatch]) -> None:
        for batch in batches:
            self._num_sent += 1
            self._free_at[batch.worker_id] = max(self.now, self._free_at[batch.worker_id]) + STEP_S
            heapq.heappush(self._answers, (self._free_at[batch.worker_id], self._num_sent, batch))
            self.queue_delays_s += [self.now - self._added_at[opened.group.handle] for opened in batch.opens]

    def reset_figures(self) -> None:
        self.step_ns, self.queue_delays_s, self.num_ended = [], [], 0

    def figures(self) -> dict[str, float]:
        """Figures of the steps since the last `reset_figures`."""
        spent_us = np.array(self.step_ns) / 1000
        num_workers, load = len(self._free_at), self.scheduler.load()
        p50, p99 = np.percentile(spent_us, (50, 99))
        delays = np.percentile(self.queue_delays_s or [0.0], (50, 90, 99))
        return {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "ended": self.num_ended,
            "us_per_step": round(float(spent_us.mean()), 1),
            "us_p50": round(float(p50), 1),
            "us_p99": round(float(p99), 1),
            "steps_per_s": round(1e6 / float(spent_us.mean()) / num_workers, 1),
            **{f"queue_delay_p{p}_s": round(float(s), 4) for p, s in zip((50, 90, 99), delays, strict=True)},
        }


def fill(cluster: Cluster, num_rows: int, mean_output: int | None) -> None:
    """Run until every row decodes."""
    if mean_output is None:
        for _ in range(num_rows):
            cluster.add(LONGEST)
    else:
        cluster.add_some(num_rows, mean_output)
    cluster.schedule()
    target = 0.99 * num_rows
    while (
        cluster.scheduler.load().num_running < target or cluster.scheduler.load().pending_tokens > target * PROMPT_LEN
    ):
        for _ in range(200):
            cluster.step(mean_output)


def measure(cluster: Cluster, num_steps: int, mean_output: int | None) -> dict[str, float]:
    cluster.reset_figures()
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        cluster.step(mean_output)
    return cluster.figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rows", type=int, default=312, help="running sequences per worker")
    parser.add_argument("--steps", type=int, default=100, help="measured steps per worker")
    parser.add_argument("--mean-output", type=int, default=1000, help="mean tokens per answer in `churn`")
    parser.add_argument("--waiting", type=int, default=5000, help="requests in the queue in `churn`")
    args = parser.parse_args()
    num_rows, num_steps = args.workers * args.rows, args.workers * args.steps
    meter = StealMeter()
    figures = {}
    phases = {"steady": None, "churn": args.mean_output}
    for phase, mean_output in phases.items():
        print(f"{phase}: {args.workers} workers, {num_rows} sequences", flush=True)
        cluster = Cluster(args.workers, args.rows)
        fill(cluster, num_rows, mean_output)
        if mean_output is not None:
            cluster.add_some(args.waiting, mean_output)
        figures[phase] = measure(cluster, num_steps, mean_output)
        print(f"  {figures[phase]}", flush=True)
        del cluster
    print(json.dumps({**figures, **describe(), "steal_pct": meter.pct()}))


if __name__ == "__main__":
    main()
